"""Every alert of episodes by its fault: one real run whose agent fails or edits its histories, with a hurried Prometheus."""

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.shared.bus.bus import Bus
from tests.chaos import episodes
from tests.chaos.alarms import Alarms
from tests.chaos.run import Run, running
from tests.conftest import need
from tests.support.guessing import SPOILED

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.debian,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

_FLAGS = {
    "episodes.agent": "tests.support.guessing:spoiled_agent",
    "episodes.replicas": 1,
    "rollout.replicas": 1,
    "algorithm.groups_per_step": 4,
    "sampling.group_size": 4,
    "evaluation.every_steps": 100_000,
    "guards.pause": "[]",  # an agent that edits gets no reward: a fast machine would pause for want of a signal
}
_MINUTE_S = 1.0
_BLOCKED_S, _FREE_S = 0.3, 0.1
"""Of 0.1 s of work, a timer of 50 ms has at most one in three delayed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Faults:
    run: Run
    bus: Bus
    alarms: Alarms
    folder: Path

    @contextlib.contextmanager
    def agent(self, does: str) -> Iterator[None]:
        (self.folder / SPOILED).write_text(does)
        yield
        (self.folder / SPOILED).write_text("")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def faults(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Faults]:
    need("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("episodes")
    (folder / SPOILED).write_text("")
    flags = {**episodes.flags(folder), **_FLAGS}
    async with running(folder, flags=flags, config=episodes.CONFIG, prometheus=True) as run:
        bus = await run.connect()
        await run.more_steps(bus, 1)
        alarms = Alarms(run, bus)
        await alarms.hurry(_MINUTE_S, {}, {})
        yield Faults(run, bus, alarms, folder)
        await bus.close()


async def test_attempts_without_a_reward_are_told_and_cost_no_group(faults: Faults) -> None:
    async with faults.alarms.raised({"PenstockEpisodesLost"}) as seen:
        with faults.agent("fail"):
            await seen()
    await faults.alarms.over({"PenstockEpisodesLost"})
    await faults.run.more_steps(faults.bus, 1)


async def test_an_agent_that_edits_what_it_was_sent_is_told(faults: Faults) -> None:
    async with faults.alarms.raised({"PenstockEpisodesBranching"}) as seen:
        with faults.agent("edit"):
            await seen()
    await faults.run.more_steps(faults.bus, 1)


async def test_a_service_of_episodes_without_processor_time_is_told(faults: Faults) -> None:
    async with faults.alarms.raised({"PenstockEpisodesStarving/episodes-0"}) as seen:
        blocking = asyncio.create_task(_block_again_and_again(faults.run))
        try:
            await seen()
        finally:
            blocking.cancel()
            await asyncio.gather(blocking, return_exceptions=True)
            faults.run.send("episodes-0", signal.SIGCONT)
    await faults.run.more_steps(faults.bus, 1)


async def _block_again_and_again(run: Run) -> None:
    while True:
        run.send("episodes-0", signal.SIGSTOP)
        await asyncio.sleep(_BLOCKED_S)
        run.send("episodes-0", signal.SIGCONT)
        await asyncio.sleep(_FREE_S)
