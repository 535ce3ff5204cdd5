"""A stopped run continues as what it was started with, and its time is that in which processes ran."""

import asyncio
import functools
import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.services.cli.__main__ import main
from penstock.services.client.views import ReplicaView, RunView
from penstock.services.up.display.watch import RunSnapshot
from penstock.services.up.process import ChildState
from penstock.services.up.run import _End
from penstock.services.up.supervisor import Ending, Supervisor
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from tests.chaos.run import left_behind, running
from tests.conftest import PATIENCE_S, until
from tests.support import forge

GAP_S = 6.0


@pytest.mark.timeout(900)
async def test_changed_data_are_refused_or_accepted_and_told_and_the_stop_is_no_training_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text((forge.ROOT / "examples" / "arithmetic" / "train.jsonl").read_text())
    flags = {"data.path": data, "data.completion_field": "answer"}
    async with running(tmp_path, flags=flags, command="sft") as run:
        bus = await run.connect()
        await run.more_steps(bus, 3)
        await bus.close()
        run.process.terminate()
        await asyncio.to_thread(run.process.wait, PATIENCE_S)
        stopped_s, rows = time.time(), data.read_text().splitlines(keepends=True)
        data.write_text("".join(reversed(rows)))
        assert main(["up", "--resume", str(run.folder)]) == 2
        assert f"found that {data} (data.path) has changed: " in capsys.readouterr().err
        await until(lambda: time.time() - stopped_s > GAP_S)
        steps = len((run.folder / "metrics.jsonl").read_text().splitlines()) + 2
        resumed_s, output = time.time(), tmp_path / "resumed.txt"
        await forge.up(["--resume", run.folder, "--accept-changed-inputs", f"--run.steps={steps}"], output)
    said = f"{data} (data.path) has changed, accepted at "
    assert f"changed input 1: {said}" in output.read_text()
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["state"], summary["steps"], summary["missing"]) == ("finished", steps, {})
    assert [sentence.startswith(said) for sentence in summary["changed_inputs"]] == [True]
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert any(event["detail"].startswith(said) for event in events)
    assert "service restarted" not in [event["name"] for event in events], "all left in order"
    async with left_behind(run) as bus:
        status = await Ledger(bus).status()
    assert status.state is RunState.FINISHED
    assert resumed_s - stopped_s <= status.paused_s, "the whole stop"
    assert status.last_commit_s is not None
    assert status.first_admission_s is not None
    elapsed_s = status.last_commit_s - status.first_admission_s
    assert summary["training_s"] == pytest.approx(elapsed_s - status.paused_s, abs=1e-3)  # kept to 1e-6 s


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_run_that_is_stopped_while_its_trainer_starts_ends_with_its_checkpoint(tmp_path: Path) -> None:
    flags = {"data.completion_field": "answer", "trainer.checkpoint_every_steps": 100_000}
    async with running(tmp_path, flags=flags, command="sft") as run:
        bus = await run.connect()
        await run.more_steps(bus, 3)
        killed = run.pid("trainer-0")
        await run.until(functools.partial(run.send, "trainer-0", signal.SIGKILL))
        await run.until(lambda: run.pid("trainer-0") != killed and run.send("trainer-0", signal.SIGSTOP))
        await run.command("/v1/run/stop", {"reason": "enough"})
        await run.until(lambda: _is_closed(bus))
        step = (await Ledger(bus).status()).step
        await bus.close()
        await asyncio.sleep(2.0)
        assert run.process.poll() is None, "the trainer has yet to write its checkpoint"
        assert run.send("trainer-0", signal.SIGCONT)
        assert await asyncio.to_thread(run.process.wait, PATIENCE_S) == 0, run.report()
    assert (run.folder / "checkpoints" / f"step-{step:06d}").is_dir()
    assert json.loads((run.folder / "summary.json").read_text())["missing"] == {}


@pytest.mark.parametrize(
    ("state", "values", "ends"),
    [
        (ChildState.READY, {"step": 7.0}, False),
        (ChildState.READY, {"step": 7.0, "stored": 0.0}, True),
        (ChildState.READY, None, True),
        (ChildState.STARTING, None, False),
        (ChildState.ENDED, None, True),
    ],
    ids=["it writes", "it was refused, or is being uploaded", "it is silent", "it starts", "it has ended"],
)
def test_a_stopped_run_ends_when_its_last_checkpoint_is_written_however_long_that_takes(
    tmp_path: Path, state: ChildState, values: dict[str, float | None] | None, ends: bool
) -> None:
    told: list[Ending] = []
    child = SimpleNamespace(plan=SimpleNamespace(service="trainer", name="trainer-0"), state=state)
    supervisor = cast(Supervisor, SimpleNamespace(children=[child], end=told.append))
    beats = (
        {} if values is None else {"trainer-0": ReplicaView.model_validate({"replica": "trainer-0", "values": values})}
    )
    run = RunView.model_validate({"state": "stopped", "closed": True, "step": 7, "steps": 9})
    end = _End(supervisor, tmp_path, print)
    end.look(RunSnapshot(run, beats))
    assert told == [Ending(0)] * ends
    (tmp_path / "checkpoints" / "step-000007").mkdir(parents=True)
    end.look(RunSnapshot(run, beats))
    assert told[-1] == Ending(0)


async def _is_closed(bus: Bus) -> bool:
    return (await Ledger(bus).status()).closed
