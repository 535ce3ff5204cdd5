"""Episodes with a real OpenEnv server, whose packages live in a Python of their own; the policy is scripted."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.services.episodes.drivers.hosts import Hosts
from penstock.services.episodes.drivers.openenv import OpenEnv
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Ended
from penstock.shared.errors import SettingsError, TemporaryError
from tests.episodes.test_service import players, settings
from tests.support.chat_tokenizers import characters
from tests.support.environments import python_with, served

pytestmark = pytest.mark.timeout(600)  # among the first: it may install a Python
SERVER = Path(__file__).parents[1] / "support" / "openenv_server.py"


def halving(prompt: str, *_: Any) -> tuple[str, float]:
    low, high = 0, 15
    for number, hint in re.findall(r'"number": ?(\d+)\}.*?t:([<>=])', prompt):
        low, high = (low, int(number) - 1) if hint == "<" else (int(number) + 1, high)
    return f'<tool_call>{{"name": "step", "arguments": {{"number":{(low + high) // 2}}}}}</tool_call>', 0.5


@pytest.fixture(scope="module")
def guess() -> Iterator[int]:
    """The port of a server of a game."""
    with asyncio.Runner() as runner:
        server = served(python_with("openenv-core==0.3.0"), SERVER, "guess")
        yield runner.run(server.__aenter__())
        runner.run(server.__aexit__(None, None, None))


@pytest.fixture
async def playing(bus: Bus, tmp_path: Path) -> AsyncIterator[Any]:
    async with players(bus, tmp_path) as begin:
        yield lambda port, script=halving, **changes: begin(script, environment=f"http://127.0.0.1:{port}", **changes)


async def test_more_episodes_than_the_server_has_places_are_all_played(playing: Any, guess: int) -> None:
    """32 samples at 16 places: those without one wait."""
    player = await playing(guess)
    await player.admit(*range(14), 6, 13)
    groups = await player.groups(16)
    assert await player.bus.xrange(streams.EPISODES.dead) == []
    for group in groups:
        for sample in group.samples:
            assert (sample.environment_reward, sample.ended) == (1.0, Ended.STOP)
            assert "(a number)<eos>a:" in characters().decode(sample.token_ids)


TROUBLE = {
    -1: "did not answer `step`: TimeoutError",
    -3: "ended the episode without a reward",
    -4: "frame with 8388",
}


async def test_a_server_that_fails_costs_its_episode_and_an_invalid_action_is_answered(
    playing: Any, guess: int
) -> None:
    def script(prompt: str, *_: Any) -> tuple[str, float]:
        return '<tool_call>{"name": "step", "arguments": {"numbers": 1}}</tool_call>', 0.5

    player = await playing(guess, script, max_turns=1)
    await player.admit(5)
    (group,) = await player.groups(1)
    assert {sample.environment_reward for sample in group.samples} == {0.0}


async def test_the_tools_of_an_environment_are_called_by_step(playing: Any) -> None:
    def script(prompt: str, *_: Any) -> tuple[str, float]:
        turn = prompt.count("</tool_call>")
        if turn == 2:
            return prompt.rpartition("</tool_call>t:")[2].removesuffix("a:"), 0.5
        return f'<tool_call>{{"name": "keep", "arguments": {{"word": "{"ab"[turn]}"}}}}</tool_call>', 0.5

    async with served(python_with("openenv-core==0.3.0"), SERVER, "tools") as port:
        player = await playing(port, script)
        await player.admit(0, 0)
        for group in await player.groups(2):
            assert {(sample.text, sample.environment_reward) for sample in group.samples} == {("a b", 0.0)}


async def test_a_server_that_does_not_answer_is_refused() -> None:
    hosts = Hosts(settings(environment="http://127.0.0.1:9").episodes)
    with pytest.raises(SettingsError, match="could not connect to ws://127"):
        await hosts.open()
    await hosts.close()


def test_what_a_server_does_wrong_makes_its_episode_unavailable(guess: int) -> None:
    for secret, sentence in TROUBLE.items():
        environment = OpenEnv(f"http://127.0.0.1:{guess}", 60.0, 1.0)
        environment.reset(secret=secret)
        with pytest.raises((ConnectionError, TemporaryError), match=sentence):
            played(environment)


def played(environment: OpenEnv) -> float:
    environment.tools()["step"](number=1)
    return environment.get_reward()
