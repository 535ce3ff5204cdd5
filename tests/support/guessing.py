"""Environments, tools and agents of tests of episodes."""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

from tests.support.clients import TOOL

KEYS = "keys-{}.txt"
"""In the folder of its row: the endpoints and keys of a process's episodes, by its id."""

SPOILED = "spoiled"


class Guess:
    """Guess a number; a wrong guess is answered by a hint."""

    def reset(self, secret: int, **row: object) -> str:
        self.secret, self.done, self._tries = secret, False, 0
        return " (a number)"

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The guess.
        """
        self._tries += 1
        self.done = number == self.secret
        return "=" if self.done else "<" if self.secret < number else ">"

    def get_reward(self) -> float:
        return 1.0 if self.done else 0.0


class Trouble(Guess):
    """By its row: hangs, dies, is unavailable, or gives no number."""

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The guess.
        """
        if self.secret == -1:
            time.sleep(10_000)
        if self.secret == -2:
            os._exit(1)
        if self.secret == -3:
            raise ConnectionError("no sandbox is free")
        if self.secret == -4:
            raise ValueError("only even numbers")
        return super().guess(number)

    def get_reward(self) -> float:
        return float("nan") if self.secret == -5 else super().get_reward()


class Silent:
    """Has a tool that says nothing of its arguments."""

    def reset(self) -> None:
        return None

    def guess(self, number):  # type: ignore[no-untyped-def]
        return number


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


async def recording_agent(task: Any, base_url: str, api_key: str, secret: int, folder: str, hooks: Any = None) -> float:
    """Guess by plain HTTP, four times at most; record the key. ``hooks``: of the client's requests and answers."""
    import httpx

    with (Path(folder) / KEYS.format(os.getpid())).open("a") as file:
        file.write(f"{base_url} {api_key}\n")
    messages: list[Any] = [{"role": "user", "content": task}]
    async with httpx.AsyncClient(
        base_url=base_url, timeout=600.0, verify=False, trust_env=False, event_hooks=hooks
    ) as client:
        for _ in range(4):
            body = {"messages": messages, "tools": [TOOL]}
            answer = await client.post("/chat/completions", json=body, headers={"x-api-key": api_key})
            said = answer.raise_for_status().json()["choices"][0]["message"]
            if not said.get("tool_calls"):
                return 0.0
            number = json.loads(said["tool_calls"][0]["function"]["arguments"])["number"]
            hint = "=" if number == secret else "<" if secret < number else ">"
            if hint == "=":
                return 1.0
            messages += [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": hint}]
    return 0.0


async def spoiled_agent(task: str, base_url: str, api_key: str, secret: int, folder: str) -> float:
    """Guess, unless the file ``SPOILED`` says ``fail`` (each fifth time there is no sandbox) or ``edit`` (no message as before)."""
    import httpx

    spoiled = (Path(folder) / SPOILED).read_text()
    if spoiled != "edit":
        if spoiled == "fail" and random.random() < 0.2:
            raise ConnectionError("no sandbox is free")
        return await recording_agent(task, base_url, api_key, secret, folder)
    async with httpx.AsyncClient(base_url=base_url, timeout=600.0, verify=False, trust_env=False) as client:
        for number in range(1, 4):
            body = {"messages": [{"role": "user", "content": task * number}]}
            answer = await client.post("/chat/completions", json=body, headers={"x-api-key": api_key})
            answer.raise_for_status()
    return 0.0


async def hostile_agent(task: str, base_url: str, api_key: str) -> float:
    """Ask what is refused; return 1 if all of it was, with the right status."""
    import httpx

    asked = {"messages": [{"role": "user", "content": task}]}
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    cases: list[tuple[str, Any, str, int]] = [
        ("chat/completions", asked, "wrong", 401),
        ("chat/completions", {**asked, "logit_bias": {"5": 100}}, api_key, 400),
        ("chat/completions", {**asked, "response_format": {"type": "json_object"}}, api_key, 400),
        ("chat/completions", {"messages": [{"role": "user", "content": image}]}, api_key, 400),
        ("chat/completions", {"messages": [{"role": "root", "content": "x"}]}, api_key, 400),
        ("chat/completions", {"messages": []}, api_key, 400),
        ("chat/completions", {**asked, "stop": ["x" * 300]}, api_key, 400),
        ("chat/completions", {**asked, "n": 1000}, api_key, 400),
        ("chat/completions", "x" * (17 << 20), api_key, 400),
        ("responses", {"input": [{"type": "computer_call"}]}, api_key, 400),
        ("responses", {"input": "x", "previous_response_id": "resp_1"}, api_key, 400),
        ("messages", {"messages": [{"role": "user", "content": image}]}, api_key, 400),
        ("messages", [], api_key, 400),
        ("chat/completions", {**asked, "temperature": 0.1}, api_key, 200),
    ]
    async with httpx.AsyncClient(timeout=600.0) as client:
        statuses = [
            (await client.post(f"{base_url}/{path}", json=body, headers={"authorization": f"Bearer {key}"})).status_code
            for path, body, key, _ in cases
        ]
        # a marked retry gets the answer to the request before, an unmarked repetition another draw
        texts = [
            (
                await client.post(
                    f"{base_url}/chat/completions",
                    json={**asked, "max_tokens": 5},
                    headers={"x-api-key": api_key, "x-stainless-retry-count": retry},
                )
            ).json()["choices"][0]["message"]["content"]
            for retry in ("0", "1", "0", "2")
        ]
    expected = [status for *_, status in cases]
    return float(statuses == expected and texts[0] == texts[1] != texts[2] == texts[3])
