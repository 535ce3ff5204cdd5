"""A host's ranks get their numbers, live and die together, with one exit code."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.services.trainer import launcher, rank_group
from penstock.services.up.process_tree import is_alive
from penstock.shared.settings import TrainerSettings
from tests.conftest import PATIENCE_S, until

LAUNCH = (
    "import sys\nfrom penstock.services.trainer.launcher import launch\nfrom penstock.shared.settings import TrainerSettings\n"
    "sys.exit(launch([sys.executable, '-c', sys.argv[1], *sys.argv[2:]], TrainerSettings(ranks=3), drain_s=600.0))"
)
WAITING = (
    "import os, signal, sys, time\nfrom pathlib import Path\nrank = os.environ['RANK']\n"
    "def stop(*_):\n    Path(sys.argv[1], 'stopped').touch()\n    sys.exit(int(sys.argv[2]))\n"
    "signal.signal(signal.SIGTERM, stop if rank == '0' else signal.SIG_IGN)\n"
    "Path(sys.argv[1], rank).touch()\n"
    "while not Path(sys.argv[1], 'stopped').exists(): time.sleep(0.05)\n"
)


class Host:
    """Three ranks that run until rank 0 is stopped and exits with ``code``."""

    def __init__(self, folder: Path, code: int = 0) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, WAITING, str(folder), str(code)], stderr=subprocess.PIPE, text=True
        )

    async def ranks(self) -> list[psutil.Process]:
        await until(lambda: {"0", "1", "2"} <= {path.name for path in self.folder.iterdir()})
        children: list[psutil.Process] = psutil.Process(self.process.pid).children()
        return children

    def ends(self) -> int:
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.process.kill()
    made.process.communicate()


def gone(processes: list[psutil.Process]) -> bool:
    return not any(is_alive(process.pid) for process in processes)


async def test_a_rank_that_is_killed_takes_the_others_with_it(host: Host) -> None:
    ranks = await host.ranks()
    assert len(ranks) == 3
    ranks[1].kill()
    assert host.ends() == 128 + signal.SIGKILL
    assert gone(ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_launcher_that_is_told_to_stop_lets_rank_0_stop_in_order(host: Host, number: signal.Signals) -> None:
    ranks = await host.ranks()
    host.process.send_signal(number)
    assert host.ends() == 0
    assert (host.folder / "stopped").exists()
    assert gone(ranks)


async def test_the_exit_status_of_rank_0_is_the_launchers(tmp_path: Path) -> None:
    host = Host(tmp_path, code=143)
    await host.ranks()
    host.process.send_signal(signal.SIGTERM)
    assert host.ends() == 143
    host.process.communicate()


def test_ranks_that_do_not_stop_are_killed() -> None:
    ranks = launcher.Ranks(stop_s=0.2)
    with ranks.forwarding_signals():
        ignoring = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
        )
        process = subprocess.Popen([sys.executable, "-c", ignoring], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        ranks._processes.append(process)
        signal.raise_signal(signal.SIGTERM)
        assert ranks.wait() == 1
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_exit_status_of_a_rank_that_refuses_its_settings_is_the_launchers() -> None:
    code = "import os, sys, time\nif os.environ['RANK'] == '2': sys.exit(2)\ntime.sleep(600)"
    started_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", LAUNCH, code], capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert time.monotonic() - started_s < 600


def test_ranks_are_told_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    of = TrainerSettings(ranks=2, nodes=3, node=1, rendezvous="a:1")
    actual = [launcher.environment(of, local, Path("/store")) for local in (0, 1)]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PENSTOCK_RANKS_STORE", "OMP_NUM_THREADS")
    assert [[each[name] for name in names] for each in actual] == [
        ["2", "0", "6", "2", "/store", "1"],
        ["3", "1", "6", "2", "/store", "1"],
    ]
    away = of.model_copy(update={"offload": "optimizer"})
    cores = len(os.sched_getaffinity(0))
    assert launcher.environment(away, 0, Path("/store"))["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert launcher.environment(of, 0, Path("/store"))["OMP_NUM_THREADS"] == "8"


def test_ranks_of_one_host_wait_for_hours_for_the_first_which_may_wait_for_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_RANKS_STORE", str(tmp_path / "store"))
    store: Any = rank_group._store(TrainerSettings(ranks=2), 0, 2, "")
    assert store.timeout == timedelta(hours=6)


@pytest.mark.parametrize(("local", "several"), [(None, False), ("4", False), ("2", True)])
def test_ranks_are_on_several_hosts_where_not_all_are_local(
    local: str | None, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert rank_group.spans_hosts() is several


def test_the_folder_in_which_ranks_meet_is_private_and_removed() -> None:
    code = (
        "import json, os, pathlib\nif os.environ['RANK'] == '0':\n"
        "    folder = pathlib.Path(os.environ['PENSTOCK_RANKS_STORE']).parent\n"
        "    print(json.dumps([str(folder), folder.stat().st_mode & 0o777]), flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", LAUNCH, code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    folder, mode = json.loads(done.stdout)
    assert mode == 0o700
    assert not Path(folder).exists()


def test_ranks_of_another_launcher_are_refused_with_what_to_set() -> None:
    program = "from penstock.services.trainer.rank_group import start_ranks; start_ranks('cpu')"
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    environment.pop(launcher.RANKS_STORE, None)
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "found RANK and WORLD_SIZE = 2 of another launcher" in ended.stderr.splitlines()[-1]
