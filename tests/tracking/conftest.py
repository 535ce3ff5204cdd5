"""A follower of one run, and a tracker with its data in the test's folder."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from penstock.services.coordinator.records.jsonl import Lines
from penstock.services.tracking.follower import SEPARATE, Follower, finish
from penstock.services.tracking.sink_client import SinkClient, SinkFailure
from penstock.services.tracking.sinks.sink import TrackedRun
from penstock.shared.backoff import Backoff
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from tests.conftest import PATIENCE_S
from tests.support.coordinator_players import report
from tests.support.trackers import READERS


@pytest.fixture(params=["tensorboard", "mlflow", "trackio", "wandb"])
def tracker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tracker whose library is installed, with its data in the test's folder."""
    name = str(request.param)
    pytest.importorskip(name, reason=f"needs the extra {name}")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    return name


class Both:
    """The followers of one sink."""

    def __init__(self, followers: Sequence[Follower]) -> None:
        self.followers = followers

    @property
    def trouble(self) -> str:
        return next((follower.trouble for follower in self.followers if follower.trouble), "")

    @property
    def delivered(self) -> int:
        return self.followers[0].delivered

    async def deliver(self) -> bool:
        """Return whether one of them delivered a batch."""
        return any([await follower.deliver() for follower in self.followers])

    async def run(self, stop: asyncio.Event) -> None:
        await asyncio.gather(*(follower.run(stop) for follower in self.followers))

    async def finish(self, within_s: float) -> None:
        await finish(self.followers, within_s)


Write: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], Coroutine[Any, Any, dict[str, Any]]]


def unanswered(write: Write) -> Write:
    async def write_only(points: Sequence[Any], state: Mapping[str, Any]) -> dict[str, Any]:
        await write(points, state)
        raise SinkFailure("killed")

    return write_only


class Tracking:
    """Followers of one run, one after the other."""

    def __init__(self, bus: Bus, folder: Path, name: str) -> None:
        self.bus, self.folder, self.name = bus, folder, name
        self.path = folder / "tracking" / f"{name}.json"
        self.events: list[tuple[str, str]] = []
        self.client = self.connect()
        self.follower = self.follow()

    def connect(self, timeout_s: float = PATIENCE_S) -> SinkClient:
        run = TrackedRun("run", "penstock", self.folder, {"trainer.learning_rate": "0.1"})
        self.client, self.files = SinkClient(self.name, run, timeout_s), SinkClient(self.name, run, timeout_s)
        return self.client

    def follow(self) -> "Both":
        async def tell(name: str, detail: str) -> None:
            self.events.append((name, detail))

        again = Backoff(0.01, longest_s=0.05)
        followers = [Follower(self.name, self.bus, self.folder, self.client, tell, again)]
        if self.name in SEPARATE:
            files = Follower(self.name, self.bus, self.folder, self.files, tell, again, behind=followers[0])
            followers.append(files)
        self.follower = Both(followers)
        return self.follower

    def hang(self) -> None:
        """Stop the sink's process."""
        assert self.client.pid is not None
        os.kill(self.client.pid, signal.SIGSTOP)

    async def kill(self) -> None:
        await self.client.kill()
        await self.files.kill()

    async def close(self) -> None:
        await self.client.close(PATIENCE_S)
        await self.files.close(PATIENCE_S)

    async def restart(self) -> "Both":
        """Begin again as after a kill -9: what is left is the offset files and what the tracker has."""
        await self.kill()
        self.connect()
        return self.follow()

    async def killed_after_the_write(self) -> "Both":
        """Let the sink write a batch, kill its process and the follower before the answer, and begin again; the same
        where tables and the report are sent by a follower of their own.
        """
        troubles = []
        for first in range(len(self.follower.followers)):
            for client in (self.client, self.files)[first:]:
                client.write = unanswered(client.write)  # type: ignore[assignment, method-assign]
            await self.follower.deliver()
            troubles += [follower.trouble for follower in self.follower.followers[first:]]
            await self.restart()
        assert "killed" in troubles, "the sink wrote the batch"
        assert set(troubles) <= {"", "killed"}
        return self.follower

    async def put(self, *steps: int) -> None:
        for step in steps:
            await self.put_version(step, step)

    async def put_version(self, step: int, version: int) -> None:
        await self.bus.publish(streams.STEPS, report(step, version))

    def record(self, *lines: dict[str, Any]) -> None:
        """Append to rollouts.jsonl as the coordinator does."""
        Lines(self.folder / "rollouts.jsonl").append(lines)

    def shown(self, segment: str = "run") -> list[tuple[int, float]]:
        """Return (step, reward) of each point in the tracker, in its order."""
        return READERS[self.name](self.folder, segment, "train/reward")


@pytest.fixture
async def tracking(bus: Bus, tmp_path: Path, tracker: str) -> AsyncIterator[Tracking]:
    made = Tracking(bus, tmp_path, tracker)
    yield made
    await made.close()


@pytest.fixture
async def tensorboard(bus: Bus, tmp_path: Path) -> AsyncIterator[Tracking]:
    made = Tracking(bus, tmp_path, "tensorboard")
    yield made
    await made.kill()


def points(*steps: int) -> list[tuple[int, Any]]:
    return [(step, pytest.approx(0.1 * step)) for step in steps]


def line(step: int, version: int | None = None, texts: tuple[str, ...] = ("46", "47")) -> dict[str, Any]:
    """A line of rollouts.jsonl as the coordinator writes it: of a step, whose version is the same by default."""
    completions = [
        {
            "text": text,
            "reward": 0.5,
            "scores": {
                "answer": {"status": "ok", "value": 1.0, "detail": ""},
                "slow": {"status": "failed", "value": None, "detail": "timeout"},
            },
            "tokens": 3,
            "finish_reason": "stop",
            "versions": [6, 7],
        }
        for text in texts
    ]
    return {
        "entry": f"{1000 * (step if version is None else version)}-1", "step": step,
        "version": step if version is None else version, "group": 4, "problem": "train.jsonl:5", "prompt": "12+34=",
        "answer": "46", "replica": "rollout-0", "completions": completions,
    }  # fmt: skip
