"""A run ends well only if it leaves what it promised; else it says so last, in its summary, and by its exit code."""

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.services.cli.__main__ import main
from penstock.services.client.views import RunView
from penstock.services.up import leftovers, run_folder
from penstock.services.up.prepare import Prepared
from penstock.services.up.supervisor import Ending
from penstock.shared.errors import PenstockError
from penstock.shared.settings import Settings
from penstock.shared.tracked import write_undelivered
from tests.support import forge

CAUSE = "the disk is a teapot"


def run(folder: Path, sinks: tuple[str, ...] = (), state: str = "finished", **summary: Any) -> Prepared:
    """Return a run whose coordinator and trainer left everything."""
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "config.json").write_text("{}")
    (folder / "checkpoints" / "step-000004").mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"state": state, "steps": 4, "missing": {}, **summary}))
    settings = Settings.model_validate({"tracking": {"sinks": list(sinks)}})
    return cast("Prepared", SimpleNamespace(folder=folder, settings=settings))


def missing(prepared: Prepared) -> Any:
    return json.loads((prepared.folder / "summary.json").read_text())["missing"]


def test_a_run_that_left_everything_ends_well_and_an_interrupted_one_is_not_judged(tmp_path: Path) -> None:
    done = run(tmp_path / "done")
    assert leftovers.judge(done, Ending(0)) == Ending(0)
    (done.folder / "policy" / "config.json").unlink()
    assert leftovers.judge(done, Ending(130)) == Ending(130)


def test_a_missing_policy_or_checkpoint_is_a_failure_with_its_cause(tmp_path: Path) -> None:
    told = run(tmp_path / "told", missing={"policy": CAUSE})
    old_s = (told.folder / "summary.json").stat().st_mtime - 60
    os.utime(told.folder / "policy" / "config.json", (old_s, old_s))  # of the run before it was extended
    ending = leftovers.judge(told, Ending(0))
    assert ending.code == 1
    assert ending.sentence.splitlines()[0] == f"the run ended without its policy: {CAUSE}"
    gone = run(tmp_path / "gone")
    (gone.folder / "policy" / "config.json").unlink()
    (gone.folder / "checkpoints" / "step-000004").rmdir()
    assert leftovers.judge(gone, Ending(0)).code == 1
    assert missing(gone).keys() == {"policy", "checkpoint"}
    stopped = run(tmp_path / "stopped", state="stopped")
    (stopped.folder / "policy" / "config.json").unlink()
    assert leftovers.judge(stopped, Ending(0)) == Ending(0), "one that was stopped for good promises no policy"


def test_a_policy_that_was_written_after_the_summary_is_not_missing(tmp_path: Path) -> None:
    late = run(tmp_path / "late", missing={"policy": "the trainer had not written it when the run ended"})
    later_s = (late.folder / "summary.json").stat().st_mtime + 60
    os.utime(late.folder / "policy" / "config.json", (later_s, later_s))
    assert leftovers.judge(late, Ending(0)) == Ending(0)
    assert missing(late) == {}


def test_what_an_ended_run_lacked_is_judged_again(tmp_path: Path) -> None:
    late = run(tmp_path / "the late", missing={"policy": CAUSE})
    (late.folder / "settings.toml").write_text('policy.model = "x"')
    policy, summary = late.folder / "policy" / "config.json", late.folder / "summary.json"
    os.utime(policy, (summary.stat().st_mtime - 60,) * 2)
    with pytest.raises(PenstockError, match=rf"{CAUSE}\n.*`penstock export '.*the late'`"):
        leftovers.check_ended(late.folder)
    os.utime(policy, (summary.stat().st_mtime + 60,) * 2)
    leftovers.check_ended(late.folder)
    assert missing(late) == {}


def test_a_tracker_that_lacks_records_is_named_with_its_cause(tmp_path: Path) -> None:
    tracked = run(tmp_path / "tracked", sinks=("mlflow", "wandb"))
    write_undelivered(tracked.folder, {"mlflow": f"it received nothing: {CAUSE}"})
    ending = leftovers.judge(tracked, Ending(0))
    assert ending == Ending(1, f"the run ended without its records in mlflow: it received nothing: {CAUSE}")
    assert missing(tracked) == {"records in mlflow": f"it received nothing: {CAUSE}"}
    write_undelivered(tracked.folder, {})
    assert leftovers.judge(tracked, Ending(0)) == Ending(0)


def test_a_run_without_a_summary_did_not_end_well(tmp_path: Path) -> None:
    ended = run(tmp_path / "ended")
    (ended.folder / "summary.json").unlink()
    assert leftovers.judge(ended, Ending(0)).code == 1


@pytest.mark.timeout(600)
async def test_a_policy_that_cannot_be_written_is_the_last_line_and_the_exit_code_and_can_still_be_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / ".policy.tmp").touch()  # where the policy's folder is to be written
    flags = [
        "--run.id=blocked",
        f"--run.folder={tmp_path}",
        "--run.steps=2",
        "--trainer.warmup_steps=0",
        "--algorithm.groups_per_step=4",
    ]
    words = [
        "sft",
        "config/arithmetic.toml",
        *flags,
        "--data.completion_field=answer",
        f"--evaluation.path={forge.FEW_PROBLEMS}",
    ]
    with (tmp_path / "out.txt").open("w") as output:
        process = forge.start("penstock.services.cli", words, output)
    assert await asyncio.to_thread(process.wait, 500) == 1
    said, folder = (tmp_path / "out.txt").read_text().splitlines(), tmp_path / "blocked"
    assert said[-2].startswith("penstock sft: the run ended without its policy: [Errno 17] File exists"), said
    assert said[-1].endswith(f"remove the cause, then `penstock export {folder}`")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["state"], summary["steps"], list(summary["missing"])) == ("finished", 2, ["policy"])
    assert main(["up", "--resume", str(folder)]) == 1, "the run has ended, still without its policy"
    assert "the run ended without its policy: [Errno 17]" in capsys.readouterr().err
    assert main(["export", str(folder), "--to", str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / "config.json").is_file()


def test_payloads_of_dead_letters_of_a_run_that_may_be_extended_stay(tmp_path: Path) -> None:
    def left(state: str, counts: dict[str, int]) -> list[str]:
        for name in ("rollout-0/3-x", "trainer-0/4-x"):
            (tmp_path / "shelf" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "shelf" / name).touch()
        (tmp_path / "shelf" / "reward-0").mkdir(exist_ok=True)
        run_folder.remove_shelves(tmp_path, has_letters=RunView(state=state, counts=counts).has_letters)
        return sorted(str(path.relative_to(tmp_path / "shelf")) for path in (tmp_path / "shelf").glob("*/*"))

    assert left("finished", {"trained": 9, "dead:rollouts": 1}) == ["rollout-0/3-x", "trainer-0/4-x"]
    assert left("stopped", {"dead:rollouts": 1}) == ["trainer-0/4-x"], "which is not extended"
    assert left("finished", {"trained": 9, "dead:rollouts": 0}) == ["trainer-0/4-x"]
