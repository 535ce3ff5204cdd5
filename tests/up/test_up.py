"""`penstock up` with a real Valkey; services are tiny scripts."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.services.cli.__main__ import main
from penstock.services.up import run_folder
from penstock.services.up.display import summary
from penstock.services.up.display.view import duration, spark
from penstock.services.up.plan import services
from penstock.services.up.prepare import prepare
from penstock.services.up.process import ProcessFailure, Restarts, how
from penstock.services.up.process_tree import is_alive
from penstock.services.up.supervisor import Supervisor
from penstock.shared.bus import embedded
from penstock.shared.bus.bus import Bus
from penstock.shared.errors import SettingsError
from penstock.shared.process.memory_timeline import host_bytes
from penstock.shared.settings import Settings, load
from tests.conftest import PATIENCE_S, until
from tests.support import forge
from tests.support.disks import small_disk
from tests.support.model_folders import write_model
from tests.support.modes import open_to_others

RESTARTS = Restarts(first_s=0.1, longest_s=1.0, well_after_s=0.0, give_up=3)

PATIENT = """
import os, pathlib, signal, sys, time
name = pathlib.Path(sys.argv[0]).stem
def stop(*_):
    with open(os.environ["RUN"] + "/order.txt", "a") as order:
        order.write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(os.environ["RUN"], name + ".heeds").touch()
while True:
    time.sleep(0.05)
"""

COORDINATOR = """
import http.server, json, os, pathlib, signal, sys, threading, time
folder, started = pathlib.Path(os.environ["RUN"]), time.time()
def stop(*_):
    with open(folder / "order.txt", "a") as order:
        order.write("coordinator-0\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/v1/run":
            state = (folder / "state.txt").read_text() if (folder / "state.txt").exists() else "running"
            step = int((folder / "step.txt").read_text()) if (folder / "step.txt").exists() else 3
            body = {"run_id": "x", "state": state, "step": step, "steps": 3 if state == "finished" else 1000}
        elif self.path.startswith("/v1/events"):
            told = folder / "events.json"
            body = {"items": json.loads(told.read_text()) if told.exists() else []}
            with open(folder / "asked.txt", "a") as asked:
                asked.write("x" if told.exists() else "")
        else:
            rows = json.loads((folder / "up.json").read_text())["processes"]
            body = {"services": [
                {"service": row["service"], "replica": row["name"], "state": "working", "pid": row["pid"] or 0,
                 "started_at_s": row["started_at_s"] + 0.01} for row in rows]}
        data = json.dumps(body).encode()
        self.send_response(200); self.end_headers(); self.wfile.write(data)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
new = folder / "coordinator.json.new"
new.write_text(json.dumps({"url": f"http://127.0.0.1:{server.server_address[1]}"}))
new.replace(folder / "coordinator.json")
server.serve_forever()
"""


class Up:
    """`penstock up` on scripts, as a process: ``tests/support/scripts_of_up.py``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_folder = folder / "runs" / "law"
        self.scripts = folder / "scripts"
        self.scripts.mkdir()
        model = write_model(folder / "a model")
        (folder / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
        (folder / "run.toml").write_text(
            textwrap.dedent(f"""
            run = {{ id = "law", folder = "{folder}/runs" }}
            policy.model = "{model}"
            data.path = "{folder}/train.jsonl"
            """)
        )
        self.output = folder / "output.txt"
        self.process: forge.Started | None = None

    def script(self, name: str, text: str = PATIENT) -> None:
        (self.scripts / f"{name}.py").write_text(text)

    def start(self, *words: str) -> None:
        arguments = (self.scripts, *(words or (self.folder / "run.toml",)))
        with self.output.open("w") as file:
            self.process = forge.start("tests.support.scripts_of_up", arguments, file, PYTHONPATH=str(forge.ROOT))

    def table(self) -> dict[str, dict[str, object]]:
        try:
            rows = json.loads((self.run_folder / "up.json").read_text())["processes"]
        except FileNotFoundError:
            return {}
        return {row["name"]: row for row in rows}

    def pid(self, name: str) -> int:
        row = self.table().get(name, {})
        return int(str(row.get("pid") or 0))

    def ready(self, name: str) -> bool:
        return self.table().get(name, {}).get("state") == "ready"

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> tuple[int, str]:
        assert self.process is not None
        code = self.process.wait(PATIENCE_S)
        return code, self.output.read_text()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE_S)
        run_folder.end_leftovers(self.run_folder)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    up = Up(tmp_path)
    yield up
    up.close()


def gone(*pids: int) -> bool:
    return not any(map(is_alive, pids))


async def test_a_killed_process_comes_back_and_so_does_the_bus_with_its_data(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    up.script("rollout-0")
    up.start()
    await until(lambda: up.ready("rollout-0") and up.ready("valkey"))
    first = up.pid("rollout-0"), up.pid("valkey")
    os.kill(first[0], signal.SIGKILL)
    os.kill(first[1], signal.SIGKILL)
    await until(lambda: up.pid("rollout-0") not in (0, first[0]) and up.pid("valkey") not in (0, first[1]))
    assert up.table()["rollout-0"]["restarts"] == 1
    await until(lambda: up.ready("rollout-0"))
    up.signal(signal.SIGTERM)
    code, output = up.wait()
    assert code == 143
    assert "rollout-0 stopped (SIGKILL); starts again in 0.1 s" in output


async def test_the_bus_of_a_run_stops_taking_work_before_the_kernel_ends_it(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    up.start()
    await until(lambda: up.ready("coordinator-0") and up.ready("valkey"))
    bus = await Bus.connect(f"unix://{place_of_socket(up)}", "limits")
    try:
        assert (await bus.memory_bytes())[1] == pytest.approx(host_bytes()[0] / 4, rel=1e-6)
    finally:
        await bus.close()
    up.signal(signal.SIGTERM)
    up.wait()


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/runs/demo", "nfs4"),
        ("/runs/demo/local", ""),
        ("/home/me", ""),
        ("/buckets/a", "fuse.gcsfuse"),
        ("/runs2", ""),
    ],
)
def test_a_bus_on_a_network_file_system_is_known(folder: str, kind: str) -> None:
    mounts = [("/runs/demo/local", "xfs"), ("/runs", "nfs4"), ("/", "overlay"), ("/buckets", "fuse.gcsfuse")]
    assert embedded.slow_disk(Path(folder), mounts) == kind


async def test_what_a_run_leaves_is_this_users_alone(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    up.start()
    await until(lambda: up.ready("coordinator-0") and up.ready("valkey"))
    socket = place_of_socket(up)
    await until(lambda: any((up.run_folder / "valkey").rglob("*.aof")))
    assert [*open_to_others(up.run_folder), *open_to_others(socket.parent)] == []
    assert (up.run_folder.parent / ".metrics" / f"{up.run_folder.name}.json").stat().st_mode & 0o777 == 0o644
    assert up.run_folder.parent.stat().st_mode & 0o777 == 0o755, "the folder of all runs is not the run's"
    up.signal(signal.SIGTERM)
    up.wait()


async def test_a_damaged_append_only_file_ends_the_start_with_the_way_out_which_works(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    up.start()
    await until(lambda: up.ready("coordinator-0") and any((up.run_folder / "valkey").rglob("*.incr.aof")))
    up.signal(signal.SIGTERM)
    up.wait()
    data = up.run_folder / "valkey"
    (file,) = data.rglob("*.incr.aof")
    file.write_bytes(b"*1\r\n$4\r\nPING\r\n" + b"damaged" * 100)
    up.start("resume", "--resume", str(up.run_folder))
    code, output = up.wait()
    sentence = next((line for line in output.splitlines() if line.startswith("ENDING 1 ")), output)
    assert code == 1
    assert "Bad file format reading the append only file" in sentence
    way_out = f"move it away (mv {data} {data}-damaged) and resume: penstock up --resume {up.run_folder}."
    assert way_out in sentence
    data.rename(f"{data}-damaged")
    up.start("resume", "--resume", str(up.run_folder))
    await until(lambda: up.ready("coordinator-0") and up.ready("valkey"))
    up.signal(signal.SIGTERM)
    up.wait()


async def test_what_a_dead_process_left_behind_is_ended(up: Up) -> None:
    """A killed launcher's rank, in a separate session."""
    up.script("coordinator-0", COORDINATOR)
    up.script(
        "trainer-0",
        "import os, subprocess, time\n"
        "rank = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "open(os.environ['RUN'] + '/rank.txt', 'a').write(f'{rank.pid}\\n')\n"
        "time.sleep(1000)",
    )
    up.start()
    ranks = up.run_folder / "rank.txt"
    await until(lambda: up.ready("trainer-0") and ranks.exists() and ranks.read_text())
    orphan = int(ranks.read_text().split()[0])
    os.kill(up.pid("trainer-0"), signal.SIGKILL)
    await until(lambda: gone(orphan))
    await until(lambda: len(ranks.read_text().split()) == 2)
    up.signal(signal.SIGTERM)
    up.wait()
    assert gone(int(ranks.read_text().split()[1]))


async def test_a_full_disk_ends_nothing_and_the_table_is_written_when_there_is_room(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    up.script("rollout-0")
    with small_disk(up.folder / "runs", 8192) as disk:
        if not disk.mounted:
            pytest.skip("this process may not mount a small disk")
        up.start()
        await until(lambda: up.ready("rollout-0") and up.ready("valkey"))
        assert up.process is not None
        first, parent = up.pid("rollout-0"), psutil.Process(up.process.pid)
        with disk.full():
            os.kill(first, signal.SIGKILL)
            await until(lambda: any(child.pid != first and _runs(child, "rollout-0.py") for child in parent.children()))
            assert up.pid("rollout-0") == first, "the table is as it was"
        await until(lambda: up.pid("rollout-0") not in (0, first))
        up.signal(signal.SIGTERM)
        code, output = up.wait()
    assert code == 143
    for said in ("cannot write up.json in ", "up.json is written again"):
        assert said in output
    assert "Traceback" not in output


TOGETHER = """
import pathlib, signal, sys, time
told = []
script = pathlib.Path(sys.argv[0])
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
script.with_suffix(".heeds").touch()
while not told:
    time.sleep(0.05)
script.with_suffix(".told").touch()
while len(list(script.parent.glob("*.told"))) < len(list(script.parent.glob("*.py"))):
    time.sleep(0.05)
script.with_suffix(".ended").touch()
"""
"""A process that ends once all were asked to end."""


async def test_on_a_full_disk_no_process_waits_until_another_has_given_up_its_work(up: Up) -> None:
    names = ["coordinator-0", "reward-0", "rollout-0", "tracking-0", "trainer-0"]
    for name in names:
        up.script(name, TOGETHER)
    with small_disk(up.folder / "runs", 8192) as disk:
        if not disk.mounted:
            pytest.skip("this process may not mount a small disk")
        up.start()
        await until(lambda: len(list(up.scripts.glob("*.heeds"))) == len(names))
        with disk.full():
            up.signal(signal.SIGINT)
            code, output = up.wait()
    assert code == 130
    assert sorted(path.stem for path in up.scripts.glob("*.ended")) == names
    assert f"no space left on the disk of {up.run_folder}, so that the bus takes no work back" in output


async def test_on_sigterm_after_which_a_node_waits_seconds_all_processes_stop_at_the_same_time(up: Up) -> None:
    names = ["coordinator-0", "reward-0", "rollout-0", "trainer-0"]
    for name in names:
        up.script(name, TOGETHER)
    up.start()
    await until(lambda: len(list(up.scripts.glob("*.heeds"))) == len(names))
    up.signal(signal.SIGTERM)
    code, output = up.wait()
    assert code == 143, output
    assert sorted(path.stem for path in up.scripts.glob("*.ended")) == names


async def test_the_console_says_which_process_a_stop_waits_for(up: Up) -> None:
    slow = PATIENT.replace("def stop(*_):", "def stop(*_):\n    pathlib.Path(sys.argv[0]).with_suffix('.told').touch()\n    "
        "while not pathlib.Path(sys.argv[0]).with_suffix('.may').exists(): time.sleep(0.05)")  # fmt: skip
    up.script("coordinator-0", COORDINATOR)
    up.script("rollout-0", slow)
    up.start()
    await until(lambda: (up.run_folder / "rollout-0.heeds").exists() and up.ready("rollout-0"))
    up.signal(signal.SIGTERM)
    said = "waiting up to 180 s for rollout-0 to finish work or give it back (bus.drain_s)"
    await until(lambda: said in up.output.read_text())
    (up.scripts / "rollout-0.may").touch()
    code, _ = up.wait()
    assert code == 143


def _runs(process: psutil.Process, script: str) -> bool:
    try:
        return any(word.endswith(script) for word in process.cmdline())
    except psutil.Error:
        return False  # it has just ended


UNWATCHED = """
import asyncio, logging, os, sys
from pathlib import Path
from typing import Any
import psutil
from penstock.services.up.process import Child, ProcessPlan, Restarts, Surroundings
from tests.conftest import until

async def main(folder):
    async def unasked(*_):
        return None

    around = Surroundings(folder, Restarts(), asyncio.Lock(), lambda: None, print, print, unasked, unasked, lambda _: [])
    writing = "import time\\nfor n in range(10**6): print(n, flush=True); time.sleep(0.001)"
    child = Child(ProcessPlan("x-0", "x", (sys.executable, "-c", writing), dict(os.environ)), around)
    life = asyncio.create_task(child.run())
    moved = folder / "x-0.log.1"

    def has_moved():
        child.rotate_log(most_bytes=500)
        return moved.exists()

    await until(has_moved)
    written = moved.read_text().splitlines()
    await until(lambda: child.log.read_text().count("\\n") > 2)
    assert written[:3] == ["0", "1", "2"]
    assert int(child.log.read_text().splitlines()[1]) >= len(written), "the process appends to the emptied log"
    pid = child.pid
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)
    assert not psutil.pid_exists(pid)

logging.basicConfig()
asyncio.run(main(Path(sys.argv[1])))
"""
"""In a process of its own: one that has run many tests may be too large to be forked."""


def test_a_process_that_is_no_longer_watched_is_ended_and_its_log_moves_while_it_is_written(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", UNWATCHED, tmp_path], cwd=root, capture_output=True, text=True)
    assert (ended.returncode, "nknown child" in ended.stderr) == (0, False), ended.stderr


async def test_waits_double_up_to_a_cap() -> None:
    restarts = Restarts(first_s=0.25, longest_s=1.5)
    assert [restarts.wait_s(failures) for failures in (1, 2, 3, 4, 5, 1000)] == [0.25, 0.5, 1.0, 1.5, 1.5, 1.5]


async def test_wrong_settings_of_a_service_end_the_run_with_its_sentence(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    up.script(
        "reward-0",
        "import sys; print('penstock reward: expected a scorer, found none: change reward.scorers', file=sys.stderr); sys.exit(2)",
    )
    earlier = up.run_folder.parent / "earlier"
    earlier.mkdir(parents=True)
    (earlier.parent / "latest").symlink_to("earlier")
    up.start()
    code, output = up.wait()
    assert code == 2
    assert (earlier.parent / "latest").readlink() == Path("earlier")  # not the run that never began
    assert "ENDING 2 expected a scorer, found none: change reward.scorers" in output
    assert "Traceback" not in output


async def test_a_run_that_several_services_refuse_says_once_why_it_stops(tmp_path: Path) -> None:
    async def unasked(*_: object) -> Any:
        raise AssertionError

    said: list[str] = []
    supervised = Supervisor(tmp_path, [], "", Restarts(), said.append, unasked, unasked)
    for service in ("trainer", "rollout"):
        supervised._fail(ProcessFailure(f"{service}: it does not fit", 2))
    assert said == ["stopping: trainer: it does not fit"]


async def test_wrong_settings_of_a_rank_are_the_sentence_alone_whatever_its_launcher_says_besides(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    up.script(
        "trainer-0",
        """
        import sys
        for _rank in range(2):
            print("penstock trainer: expected a GPU, found none: change run.device", file=sys.stderr)
        print("E1122 torch/distributed/elastic/multiprocessing/api.py: failed (exitcode: 2) local_rank: 0", file=sys.stderr)
        print("nanobind: leaked 4 instances!", file=sys.stderr)
        sys.exit(1)
        """.replace("\n        ", "\n"),
    )
    up.start()
    code, output = up.wait()
    assert code == 2
    assert "ENDING 2 expected a GPU, found none: change run.device\n" in output
    assert "nanobind" not in output


async def test_a_death_by_an_exception_is_told_with_it(up: Up) -> None:
    up.script("trainer-0", "raise RuntimeError('the disk is gone')")
    up.start()
    assert "trainer-0 stopped (RuntimeError: the disk is gone); starts again in 0.1 s" in up.wait()[1]


async def test_a_process_that_never_gets_ready_ends_the_run_with_the_end_of_its_log(up: Up) -> None:
    up.script("trainer-0", "import sys; print('no module named torch', file=sys.stderr); sys.exit(1)")
    up.start()
    code, output = up.wait()
    assert code == 1
    assert "trainer-0 stopped 3 times before it was ready (last: exit code 1)" in output
    assert "no module named torch" in output
    assert str(up.run_folder / "logs" / "trainer-0.log") in output


async def test_services_stop_upstream_first_and_the_bus_last(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    for name in ("trainer-0", "reward-0", "rollout-0"):
        up.script(name)
    up.start()
    await until(lambda: all(up.ready(name) for name in ("trainer-0", "reward-0", "rollout-0", "coordinator-0")))
    await until(lambda: len(list(up.run_folder.glob("*.heeds"))) == 3)  # ready is also reported while starting
    pids = [up.pid(name) for name in up.table()]
    socket, snapshots = place_of_socket(up), place_of_snapshots(up)
    assert snapshots.exists()
    up.signal(signal.SIGINT)
    code, _ = up.wait()
    assert code == 130
    assert (up.run_folder / "order.txt").read_text().split() == ["rollout-0", "reward-0", "trainer-0", "coordinator-0"]
    assert gone(*pids)
    assert not socket.parent.exists()
    assert not snapshots.exists()
    assert not (up.run_folder / "coordinator.json").exists()


async def test_an_executor_is_ready_once_it_listens_comes_back_and_leaves_no_socket(
    up: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEEDS_EXECUTOR", "1")
    flags = ("--reward.executor.isolation", "landlock", "--internal.executor_profiles", '["stdlib"]')
    up.start(str(up.folder / "run.toml"), *flags)
    await until(lambda: up.ready("executor"))
    socket = Path(load(up.run_folder / "settings.toml").reward.executor.address.removeprefix("unix:"))
    pid = up.pid("executor")
    assert socket.is_socket()
    harmless = {"PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "VIRTUAL_ENV", "TMPDIR"}
    assert set(psutil.Process(pid).environ()) <= harmless
    os.kill(pid, signal.SIGKILL)
    await until(lambda: up.pid("executor") not in (0, pid) and up.ready("executor"))
    up.signal(signal.SIGINT)
    assert up.wait()[0] == 130
    assert not socket.exists()


def place_of_snapshots(up: Up) -> Path:
    return load(up.run_folder / "settings.toml").snapshot_folder


def place_of_socket(up: Up) -> Path:
    url = json.loads((up.run_folder / "up.json").read_text())["bus"]
    return Path(str(url).removeprefix("unix://"))


async def test_a_finished_run_ends_by_itself_with_code_0(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    up.script("rollout-0")
    up.start()
    await until(lambda: up.ready("rollout-0"))
    (up.run_folder / "state.txt").write_text("finished")
    code, output = up.wait()
    assert code == 0
    assert "finished step 3/3" in output


async def test_a_replica_drained_during_the_last_evaluation_comes_back(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    up.script("rollout-0")
    up.start()
    await until(lambda: up.ready("rollout-0") and (up.run_folder / "rollout-0.heeds").exists())
    (up.run_folder / "step.txt").write_text("1000")
    drained = up.pid("rollout-0")
    os.kill(drained, signal.SIGTERM)  # it exits with code 0, as a drained replica
    await until(lambda: up.pid("rollout-0") not in (0, drained))
    (up.run_folder / "state.txt").write_text("finished")
    assert up.wait()[0] == 0


DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(os.environ["RUN"] + "/deaf.txt", "w")
time.sleep(1000)
"""


async def test_a_stop_does_not_wait_for_a_process_that_is_not_ready(up: Up) -> None:
    up.script("rollout-0", DEAF)
    up.start()
    await until(lambda: (up.run_folder / "deaf.txt").exists())
    up.signal(signal.SIGINT)
    code, output = up.wait()
    assert code == 130
    assert "waiting up to 5 s for rollout-0" in output, "not the 180 s of one that is ready"


async def test_a_second_interrupt_ends_what_does_not_stop(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    up.script("rollout-0", DEAF)
    up.start()
    await until(lambda: (up.run_folder / "deaf.txt").exists() and up.ready("rollout-0"))
    pids = [up.pid(name) for name in up.table()]
    up.signal(signal.SIGINT)
    await until(lambda: up.table()["rollout-0"]["state"] == "stopping")
    up.signal(signal.SIGINT)
    code, _ = up.wait()
    assert code == 130
    assert gone(*pids)


async def test_a_killed_up_leaves_no_process_and_the_run_can_be_resumed(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    up.script("rollout-0")
    up.start()
    await until(lambda: up.ready("rollout-0"))
    pids = [up.pid(name) for name in up.table()]
    assert "True" in on_bus(place_of_socket(up), "set('penstock:{law}:mark', 'here')")
    left = place_of_socket(up).parent
    up.signal(signal.SIGKILL)
    up.wait()
    await until(lambda: gone(*pids))
    up.start("resume", "--resume", str(up.run_folder))
    await until(lambda: up.pid("rollout-0") not in (0, *pids) and up.ready("rollout-0"))
    assert not left.exists()
    assert "here" in on_bus(place_of_socket(up), "get('penstock:{law}:mark')")
    up.signal(signal.SIGTERM)
    assert up.wait()[0] == 143


def test_the_resume_of_a_finished_run_starts_nothing_and_says_how_to_extend_it(
    up: Up, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(up.folder / "run.toml", None, ["--run.steps", "20"]).lock.close()
    (up.run_folder / "summary.json").write_text('{"state": "finished", "steps": 20, "reason": ""}')
    prepare(None, up.run_folder, []).lock.close()  # without a report the records are not complete
    (up.run_folder / "report.html").touch()
    assert main(["up", "--resume", str(up.run_folder)]) == 1, "neither its policy nor its checkpoint exists"
    capsys.readouterr()
    (up.run_folder / "checkpoints" / "step-000020").mkdir(parents=True)
    (up.run_folder / "policy").mkdir()
    (up.run_folder / "policy" / "config.json").touch()
    assert main(["up", "--resume", str(up.run_folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "the run has finished its 20 steps: to extend it, give a larger number, such as --run.steps 40\n"
    )
    assert not (up.run_folder / "up.json").exists()
    prepare(None, up.run_folder, ["--run.steps", "21"]).lock.close()


def test_an_interrupted_run_does_not_call_the_policy_of_an_earlier_end_its_own(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    assert "/policy  the trained policy in Hugging Face form" in summary.text(tmp_path, resumable=False)
    assert "/policy  of an earlier end of this run, which went on since" in summary.text(tmp_path, resumable=True)


def test_the_words_at_the_end_say_the_step_and_how_to_get_the_policy(tmp_path: Path) -> None:
    assert summary.text(tmp_path, resumable=True).startswith("interrupted after step 0\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 6}\n{"step": 7}\n')
    assert summary.text(tmp_path, resumable=True).startswith("interrupted after step 7\n")
    (tmp_path / "summary.json").write_text('{"state": "stopped", "steps": 1}')
    assert "export" not in summary.text(tmp_path, resumable=False)
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    stopped = summary.text(tmp_path, resumable=False)
    assert stopped.startswith("stopped: 1 step\n")
    assert stopped.endswith(f"write the policy:\n  penstock export {tmp_path}")


def test_a_run_behind_a_link_has_the_same_folder_when_it_is_started_and_resumed(up: Up) -> None:
    link = up.folder / "linked"
    up.run_folder.parent.mkdir(exist_ok=True)
    link.symlink_to(up.run_folder.parent, target_is_directory=True)
    started = prepare(up.folder / "run.toml", None, ["--run.folder", str(link)])
    started.lock.close()
    resumed = prepare(None, link / started.settings.run.id, [])
    resumed.lock.close()
    assert started.settings.run_folder == resumed.settings.run_folder == up.run_folder


def test_the_resume_of_a_stopped_run_starts_nothing_and_says_how_to_go_on(
    up: Up, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(up.folder / "run.toml", None, ["--run.steps", "20"]).lock.close()
    stopped: dict[str, object] = {"state": "stopped", "reason": "on request: enough"}
    (up.run_folder / "summary.json").write_text(json.dumps(stopped | {"steps": 7}))
    (up.run_folder / "report.html").touch()
    (up.run_folder / "checkpoints" / "step-000005").mkdir(parents=True)
    prepare(None, up.run_folder, []).lock.close()  # the trainer writes the last checkpoint
    (up.run_folder / "checkpoints" / "step-000007").mkdir()
    assert main(["up", "--resume", str(up.run_folder), "--run.steps", "40"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "the run was stopped for good after 7 steps (on request: enough): to train on from its newest checkpoint, start "
        f"another run (penstock up CONFIG --from {up.run_folder}); `penstock export {up.run_folder}` writes its policy\n"
    )
    (up.run_folder / "summary.json").write_text(json.dumps(stopped | {"steps": 0}))
    assert main(["up", "--resume", str(up.run_folder)]) == 0
    assert capsys.readouterr().out.startswith(
        "the run was stopped for good after 0 steps (on request: enough): start another run "
        "(penstock up CONFIG)\n\nstopped: 0 steps\n"
    )
    assert not (up.run_folder / "up.json").exists()


def test_a_resume_may_take_the_settings_of_a_file_but_for_those_that_need_a_new_run(up: Up) -> None:
    config = up.folder / "changed.toml"
    prepare(up.folder / "run.toml", None, ["--run.steps", "20"]).lock.close()
    config.write_text(
        (up.folder / "run.toml").read_text().replace('id = "law", ', "steps = 30, ") + "trainer.keep_last = 7\n"
    )
    resumed = prepare(config, up.run_folder, [])
    resumed.lock.close()
    assert (resumed.folder, resumed.resumed) == (up.run_folder, True)
    for settings in (resumed.settings, load(resumed.config, environment={})):
        assert (settings.run.id, settings.run.steps, settings.trainer.keep_last) == ("law", 30, 7)
    kept = load(up.run_folder / "settings.toml", environment={})  # until all have worked with the others
    assert kept.run.steps == 20
    with pytest.raises(SettingsError, match=r"expected run\.seed = 0, with which the run was started, found 5"):
        prepare(config, up.run_folder, ["--run.seed", "5"])


def on_bus(socket: Path, command: str) -> str:
    code = f"import redis; print(redis.Redis(unix_socket_path={str(socket)!r}).{command})"
    return python("-c", code).stdout


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=PATIENCE_S, cwd=Path(__file__).parents[2]
    )


async def test_a_resume_that_fails_leaves_the_settings_as_they_were_and_one_that_works_keeps_its_own(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    up.script("rollout-0")
    up.start()
    await until(lambda: up.ready("rollout-0"))
    up.signal(signal.SIGTERM)
    up.wait()
    settings = up.run_folder / "settings.toml"
    before = settings.read_bytes()

    up.script("rollout-0", "import sys; print('penstock rollout: it does not fit', file=sys.stderr); sys.exit(2)")
    up.start("resume", "--resume", str(up.run_folder), "--run.steps", "77")
    code, output = up.wait()
    assert code == 2
    assert "settings.toml keeps its old content: the changes of this resume did not come into effect" in output
    assert settings.read_bytes() == before

    up.script("rollout-0")
    up.start("resume", "--resume", str(up.run_folder), "--run.steps", "77")
    await until(lambda: b"steps = 77\n" in settings.read_bytes())
    up.signal(signal.SIGTERM)
    assert "keeps its old content" not in up.wait()[1]
    assert not (up.run_folder / "settings.next.toml").exists()


async def test_what_happens_is_told_where_the_run_is_watched_each_event_once(up: Up) -> None:
    up.script("coordinator-0", COORDINATOR)
    up.script("rollout-0")
    up.start()
    await until(lambda: up.ready("rollout-0"))
    now_s = time.time()
    events = [
        {"id": f"{number}-0", "at_s": at_s, "source": "trainer", "name": name, "detail": "of step 8"}
        for number, at_s, name in (
            (3, now_s + 60, "checkpoint damaged"),
            (2, now_s + 60, "rollback begun"),
            (1, now_s - 3600, "of the last time"),
        )
    ]
    new = up.run_folder / "events.json.new"
    new.write_text(json.dumps(events))
    new.replace(up.run_folder / "events.json")
    asked = up.run_folder / "asked.txt"
    await until(lambda: asked.exists() and asked.stat().st_size >= 3)
    up.signal(signal.SIGTERM)
    output = up.wait()[1]
    assert output.count("checkpoint damaged: of step 8") == output.count("rollback begun: of step 8") == 1
    assert output.index("rollback begun") < output.index("checkpoint damaged")
    assert "of the last time" not in output


async def test_one_up_holds_a_run_at_a_time(up: Up) -> None:
    up.script("rollout-0")
    up.start()
    await until(lambda: up.pid("rollout-0"))
    other = python("-m", "penstock.services.cli", "up", "--resume", str(up.run_folder))
    assert other.returncode == 2
    assert "another `penstock up` runs" in other.stderr
    up.signal(signal.SIGTERM)
    up.wait()


def test_a_curve_goes_from_lowest_to_highest() -> None:
    assert spark([0.0, 0.5, 1.0], 8) == "▁▅█"
    assert spark([0.0, 0.0, 1.0, 1.0], 2) == "▁█"
    assert spark([2.0, 2.0], 8) == "▄▄"
    assert spark([None, float("nan")], 8) == ""


def test_a_time_span_is_read_at_a_glance() -> None:
    assert [duration(value) for value in (5, 95, 7300, None)] == ["5s", "1m35s", "2h01m", "–"]


def test_a_death_is_named() -> None:
    codes = (-9, 1, 137, 255, -999)
    assert [how(code) for code in codes] == [
        "SIGKILL", "exit code 1", "exit code 137 (SIGKILL)", "exit code 255", "signal 999",
    ]  # fmt: skip


def test_a_run_id_tells_its_settings_file_and_its_time() -> None:
    first, second = run_folder.new_run_id(Path("config/my run.toml")), run_folder.new_run_id(Path("config/my run.toml"))
    assert first.startswith(f"my-run-{time.strftime('%Y%m', time.gmtime())}")
    assert first != second


def test_every_process_is_shown_the_gpus_that_are_its_own() -> None:
    settings = Settings.model_validate(
        {
            "run": {"id": "r"},
            "trainer": {"gpus": [0]},
            "rollout": {"replicas": 2, "gpus": [1, 2, 3, 4]},
            "reward": {"gpus": [5]},
        }
    )
    plans = services(settings, Path("run.toml"), "unix:///bus", {"PATH": "/bin"})
    shown = {plan.name: plan.environment.get("CUDA_VISIBLE_DEVICES") for plan in plans}
    assert shown == {"coordinator-0": None, "rollout-0": "1,2", "rollout-1": "3,4", "reward-0": "5", "trainer-0": "0"}
