"""Laws of trackers: each step once, whatever dies; training waits for none."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

from penstock.services.coordinator.records.jsonl import Lines
from penstock.services.tracking.offset import Offset
from penstock.services.tracking.points import Segments
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.evaluations import EVALUATIONS
from penstock.shared.errors import SettingsError
from tests.conftest import PATIENCE_S, Server, until
from tests.support.coordinator_players import report
from tests.support.trackers import READERS, TABLES
from tests.tracking.conftest import Tracking, line, points

EVALUATION = {
    "version": 0, "step": 0, "set": "heldout", "problems": 2, "samples": 1, "answered": 2, "correct": 1, "accuracy": 0.5,
    "accuracy_low": 0.1, "accuracy_high": 0.9, "pass_at": {"2": {"value": 0.75, "low": 0.5, "high": 1.0}},
    "initial": True, "final": False, "started_at_s": 1.0, "seconds": 2.0, "note": "",
}  # fmt: skip


async def test_a_step_that_was_written_but_not_acknowledged_is_in_the_tracker_once(tracking: Tracking) -> None:
    await tracking.put(1, 2)
    assert await tracking.follower.deliver()
    before = tracking.path.read_text()
    await tracking.put(3, 4)
    assert await tracking.follower.deliver()
    after = Offset.read(tracking.path)
    pending = [Segments(0, 2, 2).of_step(report(3, 3)), Segments(0, 3, 3).of_step(report(4, 4))]
    after.pending, after.sink = pending, json.loads(before)["sink"]
    after.write(tracking.path)  # as it was before the acknowledgement
    follower = await tracking.restart()
    assert await follower.deliver()
    await tracking.put(5)
    assert await follower.deliver()
    await tracking.close()
    assert tracking.shown() == points(1, 2, 3, 4, 5)


async def test_a_rollback_begins_a_segment_of_its_own(tracking: Tracking) -> None:
    await tracking.put(1, 2, 3, 2, 3, 4)
    assert await tracking.follower.deliver()
    await tracking.close()
    assert tracking.shown() == points(1, 2, 3)
    assert tracking.shown("run-segment-1") == points(2, 3, 4)


async def test_an_evaluation_is_in_the_tracker_once(tracking: Tracking) -> None:
    await tracking.put(1)
    await tracking.bus.write(EVALUATIONS, "HSET", "0", json.dumps([EVALUATION]))
    assert await tracking.follower.deliver()
    assert not await (await tracking.restart()).deliver()
    await tracking.close()
    read = READERS[tracking.name]
    assert read(tracking.folder, "run", "eval/heldout/accuracy") == [(0, 0.5)]
    assert read(tracking.folder, "run", "eval/heldout/pass_at_2") == [(0, 0.75)]


async def test_a_write_that_was_torn_by_the_kill_is_completed(tensorboard: Tracking) -> None:
    await tensorboard.put(1, 2)
    assert await tensorboard.follower.deliver()
    (file,) = tensorboard.folder.glob("tensorboard/run/*")
    with file.open("ab") as events:
        events.write(file.read_bytes()[-40:-3])
    await tensorboard.put(3)
    assert await (await tensorboard.restart()).deliver()
    assert tensorboard.shown() == points(1, 2, 3)


async def test_a_sink_that_hangs_is_killed_and_its_steps_are_sent_again(tensorboard: Tracking) -> None:
    await tensorboard.put(1)
    assert await tensorboard.follower.deliver()
    tensorboard.hang()
    tensorboard.client._timeout_s = 0.2
    await tensorboard.put(2)
    assert not await tensorboard.follower.deliver()
    assert tensorboard.follower.trouble == "no answer within 0.2 s"
    tensorboard.client._timeout_s = PATIENCE_S
    assert await tensorboard.follower.deliver()
    assert tensorboard.follower.trouble == ""
    assert tensorboard.events == [
        ("tracker failed", "tensorboard: no answer within 0.2 s: training continues, and it is tried again"),
        ("tracker works again", "tensorboard"),
    ]
    assert tensorboard.shown() == points(1, 2)


async def test_a_tracker_that_is_down_receives_all_steps_when_it_is_back(tensorboard: Tracking) -> None:
    (tensorboard.folder / "tensorboard").write_text("a file where the folder should be")
    stop = asyncio.Event()
    following = asyncio.create_task(tensorboard.follower.run(stop))
    await tensorboard.put(1, 2)
    await until(lambda: "Error" in tensorboard.follower.trouble)
    await tensorboard.put(3)
    (tensorboard.folder / "tensorboard").unlink()
    await until(lambda: tensorboard.follower.delivered == 3 and not tensorboard.follower.trouble)
    stop.set()
    await following
    assert tensorboard.shown() == points(1, 2, 3)


async def test_what_a_tracker_lacks_at_the_end_is_known_with_its_cause(tensorboard: Tracking) -> None:
    await tensorboard.put(1, 2)
    follower = tensorboard.follower.followers[0]
    (tensorboard.folder / "tensorboard").write_text("a file where the folder should be")
    await tensorboard.follower.finish(PATIENCE_S)
    assert re.fullmatch(r"it received nothing: \w+Error: .*; the log of tracking-0 has more", follower.undelivered)
    (tensorboard.folder / "tensorboard").unlink()
    await tensorboard.follower.finish(PATIENCE_S)
    assert follower.undelivered == ""
    await tensorboard.put(3)
    await follower.deliver()
    assert follower.undelivered.startswith("it received not all records (3 points): "), "nobody saw that it is all"


async def test_a_cancelled_delivery_loses_nothing(tensorboard: Tracking) -> None:
    await tensorboard.put(1, 2)
    delivering = asyncio.create_task(tensorboard.follower.deliver())
    await until(lambda: tensorboard.path.exists())
    delivering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await delivering
    await tensorboard.follower.finish(PATIENCE_S)
    assert tensorboard.shown() == points(1, 2)


async def test_the_service_shows_each_step_and_table_once_though_it_is_killed(server: Server, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        tomli_w.dumps(
            {
                "run": {"id": f"tracked-{os.getpid()}", "folder": str(tmp_path)},
                "bus": {"url": server.url},
                "tracking": {"sinks": ["tensorboard"]},
            }
        )
    )
    folder = tmp_path / f"tracked-{os.getpid()}"
    bus = await Bus.connect(server.url, folder.name, wait_s=PATIENCE_S)
    folder.mkdir()
    offset = folder / "tracking" / "tensorboard.json"
    command = [sys.executable, "-m", "penstock.services.tracking", "--config", str(config), "--replica", "tracking-0"]
    try:
        for last in (20, 40):
            Lines(folder / "rollouts.jsonl").append([line(step) for step in range(last - 19, last + 1)])
            await _publish(bus, last - 19, last)
            await _run(command, lambda last=last: _after(offset, last - 10), signal.SIGKILL)  # type: ignore[misc]
        await _publish(bus, 41, 45)
        await _run(command, lambda: _delivered(offset, 45, str(line(40)["entry"])), signal.SIGTERM)
    finally:
        await bus.close()
    assert READERS["tensorboard"](folder, folder.name, "train/reward") == points(*range(1, 46))
    assert [step for step, _, _ in TABLES["tensorboard"](folder, folder.name)] == list(range(1, 41))


async def _publish(bus: Bus, first: int, last: int) -> None:
    for step in range(first, last + 1):
        await bus.publish(streams.STEPS, report(step, step))


async def _run(command: list[str], done: Callable[[], bool], end: signal.Signals) -> None:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await until(done)
    finally:
        process.send_signal(end)
        process.wait(PATIENCE_S)


def _after(offset: Path, step: int) -> bool:
    """Whether the service has read a step; with SIGKILL it may not have delivered it."""
    return offset.exists() and Offset.read(offset).segments.last_step >= step


def _delivered(offset: Path, step: int, entry: str) -> bool:
    """Whether the tracker has all up to a step and a table: the service's last batch at its end may take too long."""
    read = Offset.read(offset)
    return (read.pending, read.segments.last_step, read.rollouts) == ([], step, entry)


def test_points_have_the_names_of_trl() -> None:
    point = Segments().of_step(report(3, 3))
    assert (point["segment"], point["index"], point["step"], point["at_s"]) == (0, 0, 3, 103.0)
    assert point["values"] == {
        "train/reward": pytest.approx(0.3),
        "penstock/version": 3.0,
        "penstock/samples": 4.0,
        "penstock/tokens_per_s": 50.0,
        "train/completions/mean_length": 10.0,
        "train/step_time": 1.0,
    }, "what is not finite is left out"


def test_an_offset_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wandb.json").write_text('{"after": "1-0"')
    with pytest.raises(SettingsError, match="remove it to copy the run again"):
        Offset.read(tmp_path / "wandb.json")
