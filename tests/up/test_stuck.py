"""A process that dies repeatedly while no step is trained ends the run. Real processes."""

import signal
from pathlib import Path

import pytest

from penstock.services.up.plan import PROMETHEUS, TRACKING, VALKEY
from penstock.services.up.process import Restarts
from penstock.services.up.supervisor import Supervisor
from tests.conftest import until
from tests.support.disks import small_disk
from tests.up.test_up import COORDINATOR, PATIENT, RESTARTS, Up, up

__all__ = ["up"]

MORE_THAN_STUCK = 6

DYING = """
import json, os, pathlib, signal, sys, time
folder, name = pathlib.Path(os.environ["RUN"]), pathlib.Path(sys.argv[0]).stem
def is_ready():
    rows = json.loads((folder / "up.json").read_text())["processes"]
    return any((row["name"], row["pid"], row["state"]) == (name, os.getpid(), "ready") for row in rows)
def live():
    while not is_ready():
        time.sleep(0.05)
"""
"""The beginning of a process that dies once it is ready."""

LIBRARY = "Error invalid argument at line 177 in file /src/csrc/ops.cu"


def dying(end: str) -> str:
    return f"{DYING}live()\n{end}\n"


async def _comes_back(up: Up, name: str) -> None:
    """Wait for more deaths than end a run, then stop the run."""
    assert up.process is not None
    process = up.process

    def restarts() -> int:
        return int(str(up.table().get(name, {}).get("restarts", 0)))

    await until(lambda: restarts() >= MORE_THAN_STUCK or process.poll() is not None)
    up.signal(signal.SIGTERM)
    assert up.wait()[0] == 143


@pytest.mark.parametrize(
    ("end", "died"), [("sys.exit(1)", "exit code 1"), ("os.abort()", "SIGABRT")], ids=["exit", "signal"]
)
async def test_a_process_that_dies_repeatedly_ends_the_run_which_can_be_resumed(up: Up, end: str, died: str) -> None:
    up.script("coordinator-0", COORDINATOR)
    up.script("trainer-0", dying(f"print({LIBRARY!r} + chr(27) + '[2J', flush=True)\n{end}"))
    up.start()
    code, output = up.wait()
    assert code == 1
    assert f"trainer-0 stopped ({died}; the last line of its log: {LIBRARY}\\u001b[2J); starts again in 0.1 s" in output
    assert (
        f"ENDING 1 trainer-0 stopped 4 times in a row (last: {died}), and no step was trained after step 3: remove the cause, "
        f"then resume the run (penstock up --resume {up.run_folder}); the end of its log, "
        f"{up.run_folder / 'logs' / 'trainer-0.log'}:\n  {LIBRARY}"
    ) in output
    assert output.count("starts again in") == 3

    up.script("trainer-0")
    up.start("resume", "--resume", str(up.run_folder))
    await until(lambda: up.ready("trainer-0"))
    up.signal(signal.SIGTERM)
    assert up.wait()[0] == 143


async def test_a_coordinator_that_dies_repeatedly_ends_the_run(up: Up) -> None:
    end = "\ndef end():\n    live()\n    os._exit(1)\nthreading.Thread(target=end).start()\nserver.serve_forever()\n"
    up.script("coordinator-0", DYING + COORDINATOR.replace("\nserver.serve_forever()\n", end))
    up.script("trainer-0")
    up.start()
    code, output = up.wait()
    assert code == 1
    assert (
        "ENDING 1 coordinator-0 stopped 4 times in a row (last: exit code 1), and no step was trained after step 3"
        in output
    )


async def test_deaths_between_which_steps_are_trained_end_nothing_until_none_is(up: Up) -> None:
    train = (
        "file = folder / 'step.txt'\nstep = int(file.read_text()) if file.exists() else 3\n"
        "file.write_text(str(min(step + 1, 9)))\nsys.exit(1)"
    )
    up.script("coordinator-0", COORDINATOR)
    up.script("reward-0", dying(train))
    up.start()
    code, output = up.wait()
    assert code == 1
    assert (
        "ENDING 1 reward-0 stopped 4 times in a row (last: exit code 1), and no step was trained after step 9" in output
    )
    assert output.count("reward-0 stopped (exit code 1); starts again in") == (9 - 4) + 3


async def test_deaths_by_signals_of_others_end_nothing(up: Up) -> None:
    """Signals to the process, and to a rank of a trainer whose launcher passes them on."""
    up.script("coordinator-0", COORDINATOR)
    by_turns = (
        "lives = folder / 'lives.txt'\nlife = len(lives.read_text()) if lives.exists() else 0\n"
        "lives.open('a').write('x')\n"
        "if life % 3 == 0: sys.exit(137)\n"
        "os.kill(os.getpid(), (signal.SIGKILL, signal.SIGTERM)[life % 2])"
    )
    up.script("trainer-0", dying(by_turns))
    up.start()
    await _comes_back(up, "trainer-0")


async def test_deaths_in_a_paused_run_do_not_count(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    up.script("rollout-0")
    up.start()
    await until(lambda: up.ready("rollout-0"))
    state, more = up.run_folder / "state.txt", up.run_folder / "more.txt"
    state.write_text("paused")
    up.script("rollout-0", dying(f"open({str(more)!r}, 'a').write('x')\nsys.exit(1)"))
    up.signal(signal.SIGTERM)
    up.wait()
    up.start("resume", "--resume", str(up.run_folder))
    process = up.process
    assert process is not None
    await until(lambda: (more.exists() and more.stat().st_size > MORE_THAN_STUCK) or process.poll() is not None)
    state.write_text("running")
    code, output = up.wait()
    assert code == 1
    assert "ENDING 1 rollout-0 stopped 4 times in a row" in output
    assert more.stat().st_size > MORE_THAN_STUCK


async def test_deaths_after_long_lives_end_nothing(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONG_LIFE_S", "0")
    up.script("coordinator-0", COORDINATOR)
    up.script("trainer-0", dying("sys.exit(1)"))
    up.start()
    await _comes_back(up, "trainer-0")


async def test_one_of_several_replicas_ends_nothing_and_all_of_them_end_the_run(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    up.script("rollout-0", dying("sys.exit(1)"))
    up.script("rollout-1", PATIENT)
    up.start()
    await _comes_back(up, "rollout-0")

    up.script("rollout-1", dying("sys.exit(1)"))
    up.start("resume", "--resume", str(up.run_folder))
    code, output = up.wait()
    assert code == 1
    assert "times in a row (last: exit code 1), as did the other rollout processes, and no step was trained" in output


async def test_the_last_words_of_a_rank_are_told_in_short_and_not_its_launchers(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    launcher = '{"time": "2026-11-24", "level": "ERROR", "replica": "trainer-0.launcher", "event": "a rank ended"}'
    up.script("trainer-0", dying(f"print('x' * 9000)\nprint({launcher!r})\nsys.exit(1)"))
    up.start()
    _, output = up.wait()
    assert f"trainer-0 stopped (exit code 1; the last line of its log: {'x' * 300}…); starts again" in output
    assert "x" * 301 not in output


async def test_of_an_exception_group_the_last_error_is_told(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    inner = "ExceptionGroup('inner', [OSError(5, 'a disk'), ValueError('expected a step')])"
    up.script("trainer-0", dying(f"raise ExceptionGroup('a task ended', [{inner}])"))
    up.start()
    _, output = up.wait()
    assert "trainer-0 stopped (ValueError: expected a step); starts again" in output


async def test_deaths_do_not_count_while_the_run_waits_for_its_bus_or_for_disk_space(tmp_path: Path) -> None:
    async def step() -> int | None:
        return 3

    async def finished() -> bool:
        return False

    def supervisor(folder: Path) -> Supervisor:
        return Supervisor(folder, [], f"unix://{tmp_path}/away.sock", RESTARTS, print, finished, step)

    assert await supervisor(tmp_path)._step_without(VALKEY) == 3
    for service in ("trainer", TRACKING, PROMETHEUS):
        assert await supervisor(tmp_path)._step_without(service) is None
    with small_disk(tmp_path / "disk", 8192) as disk:
        if not disk.mounted:
            pytest.skip("this process may not mount a small disk")
        full = supervisor(disk.folder)
        assert await full._step_without(VALKEY) == 3
        with disk.full():
            assert await full._step_without(VALKEY) is None


def test_a_group_that_kills_its_process_is_buried_before_the_run_ends() -> None:
    """Two deaths in a batch, five alone (`services/trainer/rank0/intake.py`, `shared/bus/worker.py`)."""
    from penstock.services.trainer.rank0 import intake
    from penstock.shared.settings import Settings

    assert Restarts().stuck > intake._ALONE_FROM + Settings().internal.max_attempts
