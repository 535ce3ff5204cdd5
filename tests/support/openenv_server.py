# mypy: disable-error-code="misc,untyped-decorator"
"""OpenEnv servers of tests, for a Python that has openenv-core: ``python openenv_server.py guess | tools PORT``."""

import asyncio
import os
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, MCPEnvironment, Observation, State, create_app
from openenv.core.env_server.types import ConcurrencyConfig

PLACES = 16


class Guess(Action):
    """Guess a number."""

    number: int


class Hint(Observation):
    text: str = ""


class Guessing(Environment[Guess, Hint, State]):
    """Hints at a secret, by which it also misbehaves."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._secret = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, secret: int = 0, **row: Any) -> Hint:
        self._secret = secret
        return Hint(text=" (a number)")

    async def step_async(self, action: Guess, timeout_s: float | None = None, **given: Any) -> Hint:
        if self._secret == -1:
            await asyncio.sleep(10_000)
        if self._secret == -2:
            os._exit(1)
        if self._secret == -3:
            return Hint(text="over", done=True)
        if self._secret == -4:
            return Hint(text="x" * (8 << 20))
        if self._secret == -5:
            raise ValueError("only even numbers")
        hint = "=" if action.number == self._secret else "<" if self._secret < action.number else ">"
        return Hint(text=hint, done=hint == "=", reward=1.0 if hint == "=" else 0.0)

    def step(self, action: Guess, timeout_s: float | None = None, **given: Any) -> Hint:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("tests")
        words: list[str] = []

        @server.tool
        def keep(word: str) -> str:
            """Keep a word; return all."""
            words.append(word)
            return " ".join(words)

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **row: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **given: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    limits = ConcurrencyConfig(max_concurrent_envs=PLACES, session_timeout=600.0)
    classes: Any = (Guessing, Guess, Hint) if sys.argv[1] == "guess" else (Tools, Action, Observation)
    app = create_app(*classes, concurrency_config=limits)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error")
