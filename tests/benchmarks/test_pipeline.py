"""Laws of the benchmark's folder, and of how it ends what it started."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import pipeline
from benchmarks.peers import work as pipeline_work
from benchmarks.peers.pipeline import NotDone, _Command, _counted, _kept, _Report, _Run, _steady, end, heed_sigterm
from benchmarks.peers.work import TAIL_TOKENS, long

_FOREVER = [sys.executable, "-c", "import time; time.sleep(600)"]
_HEEDS_THE_SECOND_SIGNAL = """
import signal, sys
told = []
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3) if told else told.append(1))
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def _sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[Any]]:
    """Return the processes that are started from now on."""
    processes: list[subprocess.Popen[Any]] = []

    class Noted(subprocess.Popen[Any]):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return processes


def _line(step: int) -> dict[str, Any]:
    return {
        "step": step, "samples": 30, "finished_at_s": 10.0 * step, "phase_wait_s": 1.0, "generate_s_mean": 2.0,
        "response_tokens_mean": 100.0 * step,
    }  # fmt: skip


# ---------------------------------------------------------------- model and prompts


def test_a_kept_model_is_written_once_and_again_if_it_is_not_whole(tmp_path: Path) -> None:
    work = long(tmp_path, "tiny", "cpu", "auto")
    weights = Path(work.model) / "model.safetensors"
    first = weights.read_bytes()
    weights.write_bytes(b"kept")
    assert long(tmp_path, "tiny", "cpu", "auto") == work
    assert weights.read_bytes() == b"kept"
    (weights.parent.parent / "made.json").unlink()
    assert long(tmp_path, "tiny", "cpu", "auto") == work
    assert weights.read_bytes() == first


def test_works_and_shapes_have_different_models_at_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_work, "_write_once", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    kinds = [(shape, tokens) for shape in ("tiny", "0.5b") for tokens in (0, TAIL_TOKENS["cpu"], 20)]
    works = [long(Path("kept"), shape, "cpu", "auto", mean_tokens=tokens) for shape, tokens in kinds]
    assert len({work.model for work in works}) == len(kinds)
    assert all(Path(work.model).is_relative_to(tmp_path / "kept") for work in works)


# ---------------------------------------------------------------- ends


def test_a_command_is_ended_once_all_is_measured(tmp_path: Path, started: list[subprocess.Popen[Any]]) -> None:
    class Done(_Command):
        def done(self) -> bool:
            return True

    pipeline._run(_FOREVER, tmp_path, 600.0, watched=Done())
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def test_a_run_is_done_with_its_last_step(tmp_path: Path) -> None:
    run, metrics = _Run(tmp_path, 2), tmp_path / "metrics.jsonl"
    assert not run.done()
    first, second = (json.dumps(_line(step)) for step in (1, 2))
    metrics.write_text(f"{first}\n{second}")  # the second line is not whole yet
    assert not run.done()
    metrics.write_text(f"{first}\n{second}\n")
    assert run.done()


@pytest.mark.usefixtures("_sigterm")
def test_the_first_sigterm_interrupts_and_ends_the_command_and_later_ones_do_nothing(
    tmp_path: Path, started: list[subprocess.Popen[Any]]
) -> None:
    class Terminated(_Command):
        def wrong(self) -> str:
            os.kill(os.getpid(), signal.SIGTERM)
            return ""

    heed_sigterm()
    with pytest.raises(KeyboardInterrupt):
        pipeline._run(_FOREVER, tmp_path, 600.0, watched=Terminated())
    os.kill(os.getpid(), signal.SIGTERM)
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def test_a_late_command_reports_the_states_of_before_its_end(
    tmp_path: Path, started: list[subprocess.Popen[Any]]
) -> None:
    class Late(_Command):
        def states(self) -> str:
            return f"alive: {started[0].poll() is None}"

    with pytest.raises(NotDone) as late:
        pipeline._run(_FOREVER, tmp_path, 0.0, watched=Late())
    assert late.value.states == "alive: True"
    assert started[0].returncode == -signal.SIGTERM


def test_a_command_that_does_not_end_in_order_gets_a_second_signal() -> None:
    with subprocess.Popen([sys.executable, "-c", _HEEDS_THE_SECOND_SIGNAL], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert end(process, 0.5, 10.0) == 3


# ---------------------------------------------------------------- what is kept and printed


def test_files_are_kept_during_a_run_and_after_its_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_KEEP_EVERY_S", 0.01)
    metrics, kept = tmp_path / "async" / "metrics.jsonl", tmp_path / "kept" / "async" / "metrics.jsonl"
    metrics.parent.mkdir()

    def interrupted() -> None:
        metrics.write_text("1\n")
        turn = threading.Event()
        while not kept.exists() or kept.read_text() != "1\n":
            turn.wait(0.01)
        metrics.write_text("1\n2\n")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), _kept(metrics.parent, tmp_path / "kept"):
        interrupted()
    assert kept.read_text() == "1\n2\n"


def test_without_a_coordinator_the_states_are_those_of_the_supervisor(tmp_path: Path) -> None:
    row = {"name": "trainer-0", "state": "starting", "restarts": 2}
    (tmp_path / "up.json").write_text(json.dumps({"processes": [row]}))
    assert _Run(tmp_path, 1).states() == "trainer-0: starting, 2 restarts"


def test_an_interrupted_call_prints_whole_runs_and_the_rate_of_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    figures = _Report({"async": [4.0], "sync": []})
    figures.note_partial("sync", [_line(step) for step in range(1, 7)])
    figures.print({}, {"complete": False})
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["samples_per_s"] == {"async": 4.0}
    assert printed["partial"] == {"sync": {"steps": 6, "samples_per_s": 3.0}}
    assert printed["tokens_per_sample"] == {"sync": 450.0}  # of steps 3 to 6
    assert printed["measured_steps"] == {"sync": 4}
    assert printed["complete"] is False


@pytest.mark.parametrize(
    ("made", "max_lag", "counted"),
    [
        (15, 0, range(6, 16)),
        (15, 1, range(7, 15)),  # of each turn both steps, and not the last, beside which nothing is admitted
        (15, 2, range(8, 14)),
        (15, 4, range(7, 12)),
        (6, 0, range(3, 7)),
        (4, 2, range(3, 5)),
        (3, 1, range(3, 4)),
    ],
)
def test_steady_steps_count(made: int, max_lag: int, counted: range) -> None:
    before, *rest = _steady([_line(step) for step in range(1, made + 1)], max_lag)
    assert [line["step"] for line in rest] == list(counted)
    assert before["step"] == counted[0] - 1


def test_a_run_that_ended_early_was_as_steady_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("[algorithm]\nmax_lag = 2\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(_line(step)) + "\n" for step in range(1, 7)))
    assert [_counted(tmp_path, steps)[1] for steps in (6, 15)] == [2, 0]


def test_a_call_interrupted_before_enough_steps_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    figures = _Report({"async": []})
    figures.note_partial("async", [_line(1), _line(2), _line(3)])
    figures.print({}, {"complete": False})
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == {
        "complete": False,
        "tokens_per_sample": {},
        "measured_steps": {},
        "gpus": {},
        "trl_figures": {},
        "partial": {},
    }


def test_runs_of_one_name_are_kept_beside_each_other(tmp_path: Path) -> None:
    run = tmp_path / "async"
    run.mkdir()
    for steps in (1, 2, 3):
        (run / "metrics.jsonl").write_text("{}\n" * steps)
        with _kept(run, tmp_path / "kept"):
            pass
    kept = sorted(path.relative_to(tmp_path / "kept").as_posix() for path in tmp_path.glob("kept/*/*"))
    assert kept == ["async-2/metrics.jsonl", "async-3/metrics.jsonl", "async/metrics.jsonl"]
    assert (tmp_path / "kept" / "async-2" / "metrics.jsonl").read_text() == "{}\n" * 2


def test_collected_rates_are_of_the_same_flags(tmp_path: Path) -> None:
    file, lagging = tmp_path / "rates", ("--algorithm.max_lag=2",)
    for mode, rate in (("async", 10.0), ("trl", 2.0)):
        pipeline.Results(file).add("long", mode, rate)
    pipeline.Results(file).add("long", "async", 14.0, lagging)
    assert pipeline.Results(file).rates("long") == {"async": [10.0], "trl": [2.0]}
    assert pipeline.Results(file).rates("long", lagging) == {"async": [14.0], "trl": [2.0]}
