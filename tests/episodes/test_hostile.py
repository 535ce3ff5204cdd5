"""An agent that works against the service costs its own episode at most."""

import dataclasses
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.shared.bus.messages import PolicyVersion, Prompt
from penstock.shared.bus.stores.policy.ledger import Ledger
from tests.conftest import until
from tests.episodes.test_service import Player, buried, playing
from tests.support.raw_redis import raw

__all__ = ["playing"]
AGENT = "tests.support.hostile_agents:hostile"
MAX_TURNS = 12


def say(*_: Any) -> tuple[str, float]:
    return "done", 0.5


@pytest.fixture
async def attacked(playing: Any, tmp_path: Path) -> Any:
    """Begin to play, with agents that do as they are told, the last of them well."""

    async def begin(*orders: str, **changes: Any) -> Player:
        player: Player = await playing(say, environment="", agent=AGENT, max_turns=MAX_TURNS, **changes)
        await raw(player.bus).hset(player.bus.keys.named("run"), mapping={"state": "running", "newest_version": 3})
        prompts = [_told(player.prompt(group, 5), order, tmp_path) for group, order in enumerate((*orders, "behave"))]
        assert await Ledger(player.bus).admit(prompts, 100, 10, 100, PolicyVersion(3)) == len(prompts)
        return player

    return begin


def _told(prompt: Prompt, order: str, folder: Path) -> Prompt:
    return dataclasses.replace(prompt, extra={"do": order, "folder": str(folder)})


@pytest.mark.parametrize(
    ("order", "reward"), [("flood", 1.0), ("send_much", 1.0), ("try_keys", 1.0), ("set_reward", 0.25)]
)
async def test_its_requests_are_refused_and_its_reward_is_what_it_returned(
    attacked: Any, order: str, reward: float
) -> None:
    player = await attacked(order, order)
    for group in await player.groups(3):
        for sample in group.samples:
            assert 1 <= int(sample.segments[:, 2].sum()) <= MAX_TURNS
            assert sample.environment_reward == (1.0 if group.group_id == 2 else reward)


async def test_one_that_hangs_costs_its_group_alone(attacked: Any) -> None:
    player = await attacked("hang", deadline_s=2.0)
    (group,) = await player.groups(1)
    assert (group.group_id, {sample.environment_reward for sample in group.samples}) == (1, {1.0})
    assert "did not answer `run` within 2 s (episodes.deadline_s)" in (await buried(player, 1))[0]


async def test_the_processes_that_it_leaves_end(attacked: Any, tmp_path: Path) -> None:
    player = await attacked("fork")
    assert "died" in (await buried(player, 1))[0]
    pids = [int(pid) for path in tmp_path.glob("forked-*") for pid in path.read_text().split()]
    assert len(pids) >= 6, "each attempt left two of which it knows"
    await player.end()
    await until(lambda: not any(psutil.pid_exists(pid) and _runs(pid) for pid in pids))
    assert not [each for each in psutil.process_iter() if _says(each, "sleep 10000")]


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _says(process: psutil.Process, words: str) -> bool:
    try:
        return bool(" ".join(process.cmdline()) == words and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
