"""Laws of the command line."""

import contextlib
import http.server
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from penstock.__main__ import command_line
from penstock.services.cli import settings_help
from penstock.services.cli.__main__ import main
from penstock.services.client.coordinator import find
from penstock.services.client.views import ReplicaView, RunView
from penstock.services.up.display import view
from penstock.services.up.prepare import prepare
from penstock.services.up.supervisor import Ending
from penstock.shared.errors import PenstockError
from tests.conftest import PATIENCE_S
from tests.support.model_folders import write_model

ROOT = Path(__file__).parents[2]

RUN = {
    "run_id": "arithmetic-20261121-101500-3f9c",
    "state": "running",
    "reason": "",
    "activity": "evaluating version 100",
    "step": 100,
    "steps": 250,
    "head": 100,
    "newest_version": 100,
    "groups_in_flight": 61,
    "slots": 64,
    "streams": {
        name: {"entries": entries, "pending": 0, "oldest_age_s": 0.1}
        for name, entries in (("prompts", 9), ("rollouts", 2), ("experience", 50), ("journal", 320))
    },
    "last": {
        "reward_mean": 0.71234,
        "lag_mean": 0.75,
        "lag_max": 1.0,
        "samples_per_s": 1012.7,
        "signal_fraction": 0.4375,
    },
    "history": {"step": [98, 99, 100], "reward_mean": [0.6, None, 0.71], "tokens_per_s": [3000.0, 3100.0, 3200.0]},
    "evaluations": [
        {"step": 0, "version": 0, "accuracy": 0.364, "problems": 500, "initial": True, "final": False},
        {"step": 100, "version": 100, "accuracy": 0.745, "problems": 200, "initial": False, "final": False},
    ],
    "tokens_per_s": 3200.0,
    "training_s": 65.0,
    "gpu_hours": 12.34,
    "eta_s": 95.0,
    "a_field_of_tomorrow": {"x": 1},
}
SERVICES = {
    "services": [
        {
            "service": "rollout",
            "replica": "rollout-0",
            "state": "working",
            "version": 100,
            "pid": 4711,
            "starts": 3,
            "memory_bytes": 2**28,
        }
    ]
}


EVENTS = {
    "items": [
        {"id": "2-0", "at_s": 2.0, "source": "trainer", "name": "checkpoint damaged", "detail": "of step 8"},
        {"id": "1-0", "at_s": 1.0, "source": "trainer", "name": "service restarted", "detail": "trainer-0"},
    ],
    "next": None,
}


class Coordinator:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.read: list[str] = []
        self.answers: dict[str, object] = {"/v1/run": RUN, "/v1/events": EVENTS}
        self.bodies: list[object] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.read.append(self.path)
                items = {"items": SERVICES["services"], "next": None}
                self.answer(200, outer.answers.get(self.path.partition("?")[0], items))

            def do_POST(self) -> None:
                outer.asked.append(self.path)
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"null"))
                if self.path.endswith("/stop"):
                    self.answer(409, {"title": "Conflict", "status": 409, "detail": "the run is finished already"})
                elif self.path.endswith("/export"):
                    result = {"version": int(self.path.split("/")[3]), "step": 80, "folder": "there", "adapter": False}
                    state = "succeeded" if result["version"] == 80 else "failed"
                    self.answer(202, {"kind": "export", "state": state, "detail": "no file has it", "result": result})
                else:
                    self.answer(200, {"state": "paused", "changed": True, "reason": ""})

            def answer(self, status: int, body: object) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    started = Coordinator()
    yield started
    started.close()


def penstock(*words: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, in a folder and an environment."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in {"COLUMNS": "100", **environment}.items():
            patch.setenv(name, value)
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        code = main(list(words))
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def process(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.services.cli", *words],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
    )


def test_status_shows_the_run_and_its_replicas(coordinator: Coordinator, tmp_path: Path) -> None:
    (tmp_path / "coordinator.json").write_text(json.dumps({"url": coordinator.url}))
    shown = penstock("status", "--run", str(tmp_path))
    assert shown.returncode == 0
    for piece in (
        "running",
        "evaluating version 100",
        "100/250",
        "eta 1m35s",
        "12.3 GPU-hours",
        "0.712",
        "0.745",
        "61 of 64",
        "rollout-0",
        "4711",
    ):
        assert piece in shown.stdout
    (replica,) = [line for line in shown.stdout.splitlines() if "rollout-0" in line]
    assert replica.split()[-3:-1] == ["3", "4711"], "its starts and its pid"
    assert max(len(line) for line in shown.stdout.splitlines()) <= 100


def test_status_is_json_for_scripts(coordinator: Coordinator) -> None:
    shown = penstock("status", "--url", coordinator.url, "--json")
    assert json.loads(shown.stdout)["step"] == 100
    assert json.loads(shown.stdout)["services"][0]["replica"] == "rollout-0"


def test_a_command_asks_the_coordinator_and_tells_the_state(coordinator: Coordinator) -> None:
    shown = penstock("pause", "--url", coordinator.url)
    assert coordinator.asked == ["/v1/run/pause"]
    assert coordinator.bodies == [{"reason": "", "mode": "admission"}]
    assert shown.stdout == "arithmetic-20261121-101500-3f9c: running, step 100 of 250\n"


def test_a_refusal_is_told_in_its_own_words(coordinator: Coordinator) -> None:
    shown = penstock("stop", "--url", coordinator.url)
    assert (shown.returncode, shown.stderr) == (1, "penstock stop: the run is finished already\n")


def test_nobody_there_is_one_sentence(tmp_path: Path) -> None:
    missing = penstock("status", "--run", str(tmp_path / "none"))
    dead = penstock("pause", "--url", "http://127.0.0.1:1")
    (tmp_path / "settings.toml").touch()
    ended = penstock("status", "--run", str(tmp_path))
    (tmp_path / "finished").mkdir()
    (tmp_path / "finished" / "settings.toml").write_text("run.steps = 6")
    (tmp_path / "finished" / "summary.json").write_text('{"state": "finished", "steps": 6}')
    finished = penstock("pause", "--run", str(tmp_path / "finished"))
    (tmp_path / "finished" / "settings.toml").write_text("run.steps = 7")
    extended = penstock("status", "--run", str(tmp_path / "finished"))
    (tmp_path / "finished" / "metrics.jsonl").write_text('{"step": 5}\n{"step": 6}\n')
    interrupted = penstock("status", "--run", str(tmp_path / "finished"))
    resume = f"interrupted. Its records are in that folder; `penstock up --resume {tmp_path}` continues it"
    for shown, piece in (
        (missing, "coordinator.json is missing there"),
        (dead, "no coordinator answers"),
        (ended, resume),
        (finished, "has no coordinator: it has finished after 6 steps. Its report.html and records are in that folder"),
        (finished, "/finished --run.steps N` extends it"),
        (extended, "it is starting, or was interrupted. "),
        (interrupted, "it is starting, or was interrupted after step 6. "),
    ):
        assert shown.returncode == (2 if shown is missing else 1)
        assert piece in shown.stderr
        assert len(shown.stderr.splitlines()) == 1


def test_a_coordinator_that_is_silent_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.services.client.coordinator.ANSWERS_WITHIN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        shown = penstock("pause", "--url", f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert shown.returncode == 1
    assert "(there was no answer within 0.2 s)" in shown.stderr
    assert len(shown.stderr.splitlines()) == 1


@pytest.mark.usefixtures("served_once")
def test_a_run_that_has_ended_is_shown_from_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings.toml").write_text("run.steps = 6")
    (tmp_path / "summary.json").write_text('{"state": "finished", "steps": 6, "samples_per_s": 3.0}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "version": 1, "finished_at_s": 2.0, "reward_mean": 0.5}\n')
    events = [
        {"entry": f"{n}-0", "at_s": 1.5e9 + n, "source": "trainer-0", "name": f"event {n}", "detail": "x"}
        for n in range(9)
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert main(["status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "finished: 6 steps" in shown
    assert [n for n in range(9) if f"event {n}: x" in shown] == [4, 5, 6, 7, 8]
    assert main(["events", "--run", str(tmp_path), "--most", "2", "--json"]) == 0
    assert [event["name"] for event in json.loads(capsys.readouterr().out)] == ["event 8", "event 7"]
    assert main(["status", "--run", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["step"], told["steps"], told["recorded"], told["services"]) == (
        "finished",
        6,
        6,
        True,
        [],
    )
    assert main(["policies", "--run", str(tmp_path), "--json"]) == 0
    policies = json.loads(capsys.readouterr().out)
    assert [(each["version"], each["parent"], each["metrics"].get("reward_mean")) for each in policies] == [
        (0, None, None),
        (1, 0, 0.5),
    ]
    assert main(["policies", "show", "1", "--run", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == policies[1]
    assert main(["policies", "show", "0", "1", "--run", str(tmp_path), "--json"]) == 0
    assert (compared := json.loads(capsys.readouterr().out))["ancestor"] == 0
    assert compared["metrics"]["reward_mean"] == {"left": None, "right": 0.5, "change": None}
    assert main(["policies", "show", "9", "--run", str(tmp_path)]) == 1
    assert "no policy version 9; it has versions up to 1" in capsys.readouterr().err
    for command in ("dead", "services", "runs"):  # the records say nothing of these, so an empty list would be a claim
        assert main([command, "--run", str(tmp_path)]) == 1
        assert "it has finished after 6 steps" in capsys.readouterr().err


def test_the_runs_of_a_folder_are_listed_whether_they_are_active_or_not(
    tmp_path: Path, coordinator: Coordinator
) -> None:
    for place, name in enumerate(("ended", "killed", "live")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "settings.toml").write_text("run.steps = 6")
        (folder / "metrics.jsonl").write_text('{"step": 4}\n')
        os.utime(folder / "settings.toml", (place, place))
    (tmp_path / "runs" / "latest").symlink_to("killed")
    (tmp_path / "runs" / "ended" / "summary.json").write_text('{"state": "stopped", "steps": 4}')
    (tmp_path / "runs" / "killed" / "coordinator.json").write_text('{"url": "http://127.0.0.1:9"}')
    (tmp_path / "runs" / "live" / "coordinator.json").write_text(json.dumps({"url": coordinator.url}))
    row = {"state": "running", "step": 5, "head": 5, "reason": ""}
    items = [{**row, "run_id": name, "here": name == "live"} for name in ("elsewhere", "live")]
    coordinator.answers["/v1/runs"] = {"items": items, "next": None}
    listed = json.loads(penstock("runs", "--json", folder=tmp_path).stdout)
    assert {each["run_id"]: (each["state"], each["step"]) for each in listed} == {
        "ended": ("stopped", 4),
        "killed": ("no coordinator", 4),
        "elsewhere": ("running", 5),
        "live": ("running", 5),
    }
    assert [each["run_id"] for each in listed][-1] == "live"
    killed = next(each["reason"] for each in listed if each["run_id"] == "killed")
    assert killed.endswith("`penstock up --resume runs/killed` continues it")
    of_bus = json.loads(penstock("runs", "--json", "--run", "runs/live", folder=tmp_path).stdout)
    assert [each["run_id"] for each in of_bus] == ["elsewhere", "live"]
    assert "ended" in penstock("runs", folder=tmp_path).stdout


@pytest.mark.parametrize(
    "words",
    [
        *(["status"], ["events"], ["page"], ["pause"], ["resume"], ["report"]),
        *(["export"], ["chat", "--ask", "1+1="], ["push", "owner/name"]),
    ],
)
def test_a_run_is_given_by_its_place_or_by_an_option(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, said = str(tmp_path / "nowhere"), []
    for given in ([folder], ["--run", folder]):
        assert main([*words, *given]) in (1, 2)
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert folder in said[0]


def test_several_settings_are_explained_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "trainer.learning_rate", "max_lag"]) == 0
    shown = capsys.readouterr().out
    assert "trainer.learning_rate" in shown
    assert "algorithm.max_lag" in shown
    assert main(["settings", "max_lag", "no_such"]) == 2
    assert "no setting's name contains 'no_such'" in capsys.readouterr().err


def test_paths_in_hints_are_quoted(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    (folder / "settings.toml").touch()
    with pytest.raises(PenstockError, match=r"up --resume '.*my runs'` continues"):
        find(None, folder)


def test_every_setting_is_explained() -> None:
    entries = settings_help.entries()
    assert [entry.key for entry in entries if not entry.text] == []
    explained = {entry.key: (entry.kind, entry.default) for entry in entries}
    assert explained["trainer.learning_rate"] == ("number", "1e-06")
    assert explained["sampling.group_size"] == ("integer", "16")
    assert explained["algorithm.on_stale"] == ("'drop' | 'requeue' | 'mask' | 'wait'", '"drop"')
    assert explained["reward.scorers[answer].needs_stop"] == ("true | false", "false")
    assert explained["evaluation.path"] == ("text | table", '""')


def test_the_common_settings_are_a_line_each_and_fit_a_screen() -> None:
    lines = penstock("settings").stdout.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    keys = [line.split(" = ")[0] for line in lines if " = " in line]
    assert keys == list(settings_help.COMMON)
    assert "sampling.group_size = 16                  Completions per prompt, 2 to 4096" in lines


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("trainer.store", ["trainer.store.uri", "trainer.store.endpoint", "trainer.store.counts"]),
        ("guards.pause", ["guards.pause"]),
        ("max_lag", ["algorithm.max_lag"]),
        ("bus", [f"bus.{name}" for name in ("url", "drain_s", "shelve_above_bytes", "shelf_bytes")]),
    ],
)
def test_a_section_or_a_name_is_explained(name: str, keys: list[str]) -> None:
    assert [entry.key for entry in settings_help.matching(name)] == keys
    assert f"{keys[0]}  " in penstock("settings", name).stdout


def test_the_reference_page_is_the_settings_own() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    assert page == settings_help.markdown(), (
        "run python -m penstock.services.cli.settings_help docs/reference/settings.md"
    )


def test_help_names_the_commands_and_shows_examples() -> None:
    top, up = penstock("--help").stdout, penstock("up", "--help").stdout
    for command in (
        *("up", "status", "pause", "resume", "stop", "report", "settings"),
        *("policies", "services", "dead", "events"),
    ):
        assert f"│ {command} " in top
    assert "penstock up config/arithmetic.toml --run.steps 50" in up
    assert "penstock up --resume runs/latest" in up


def _announced(folder: Path, url: str, *names: str) -> None:
    for name in names:
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "settings.toml").write_text("run.steps = 6")
        (folder / "runs" / name / "coordinator.json").write_text(json.dumps({"url": url}))


@pytest.mark.parametrize("answer", [{"status": "ok"}, {"items": ["a"], "next": None}, {"items": [{}], "next": None}])
def test_the_list_of_runs_needs_no_sense_of_a_port_that_another_program_has(
    answer: object, tmp_path: Path, coordinator: Coordinator
) -> None:
    _announced(tmp_path, coordinator.url, "killed")
    coordinator.answers["/v1/runs"] = answer
    (listed,) = json.loads(penstock("runs", "--json", folder=tmp_path).stdout)
    assert (listed["run_id"], listed["state"]) == ("killed", "no coordinator")


def test_coordinators_are_asked_for_their_runs_at_once_as_one_may_hang(
    tmp_path: Path, coordinator: Coordinator
) -> None:
    class AfterTheOther(dict[str, object]):
        both = threading.Barrier(2)

        def get(self, path: str, default: object = None) -> object:
            self.both.wait(PATIENCE_S)
            return {"items": [{"run_id": name, "state": "running"} for name in ("a", "b")], "next": None}

    _announced(tmp_path, coordinator.url, "a", "b")
    coordinator.answers = AfterTheOther()
    assert [each["state"] for each in json.loads(penstock("runs", "--json", folder=tmp_path).stdout)] == ["running"] * 2


@pytest.mark.parametrize(
    "words", [["tail"], ["memory", "runs/x"], ["policies", "unpin", "3"], ["runs", "list"], ["dpo", "run.toml"]]
)
def test_a_command_that_moved_or_is_of_other_tools_says_what_to_type_and_that_exists(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    (now,) = re.findall(r"there is no such command: use `penstock ([^`]+)`", capsys.readouterr().err)
    help_of = [word for word in now.split() if word.islower() and not word.startswith("-")]
    assert main([*help_of, "--help"]) == 0


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_the_view_fits_its_terminal(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None, legacy_windows=False)
    rows = [view.ViewRow(f"rollout-{index}", "working", 100, 2**30, 1, 4711, "no source " * 20) for index in range(3)]
    console.print(
        view.screen("penstock · a-run", RunView.model_validate(RUN), rows, ["12:00:00  rollout-0 stopped " * 5])
    )
    file = console.file
    assert isinstance(file, io.StringIO)
    lines = file.getvalue().splitlines()
    assert {len(line) for line in lines} == {width}
    assert sum("rollout-" in line for line in lines) >= 3, "names are not cut for a long note"
    assert all(line.endswith(("│", "╮", "╯")) for line in lines)
    assert any("signal" in line and "44% of groups" in line for line in lines)


def test_a_run_is_one_line_in_a_log() -> None:
    assert view.line(RunView.model_validate(RUN)) == (
        "running  step 100/250  head 100  reward 0.712  held-out 0.745  in flight 61/64  lag 0.75  3,200 tokens/s  eta 1m35s"
    )


def test_before_its_first_step_a_run_shows_what_is_in_flight_and_no_speed_of_0() -> None:
    begun = RunView.model_validate(RUN | {"step": 0, "tokens_per_s": 0.0, "last": {}})
    assert "  – tokens/s" in view.line(begun)
    assert "  – tokens/s, 1,234 drawn" in view.line(begun.model_copy(update={"drawn_tokens_per_s": 1234.0}))
    replica = ReplicaView(service="rollout", replica="rollout-0", state="working", values={"held": 12.0})
    assert view.row_of(replica).note == "12 in flight"
    assert view.row_of(replica.model_copy(update={"values": {"held": 0.0}})).note == ""
    assert view.row_of(replica.model_copy(update={"last_error": "no source"})).note == "no source"


def test_a_paused_run_shows_why_in_place_of_the_speed_of_its_last_step() -> None:
    paused = {"state": "paused", "reason": "on request:\nlunch", "tokens_per_s": 0.0, "eta_s": None, "notices": []}
    run = RunView.model_validate(RUN | paused)
    assert view.line(run).endswith("  lag 0.75  on request: lunch")
    file = io.StringIO()
    Console(width=120, file=file).print(view.screen("a-run", run, []))
    assert "– tokens/s  – samples/s  for" in file.getvalue()
    assert "paused  on request: lunch" in file.getvalue()


def test_a_supervised_run_shows_its_loss_and_how_many_pairs_it_orders() -> None:
    supervised = RunView.model_validate(RUN | {"last": {"loss": 0.576, "preference_accuracy": 0.75, "lag_mean": 1.0}})
    assert "  loss 0.576  pairs ordered 75%  held-out 0.745  " in view.line(supervised)
    console = Console(width=80, file=io.StringIO())
    console.print(view.screen("penstock · a-run", supervised, []))
    assert isinstance(console.file, io.StringIO)
    shown = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert any(line.startswith("│ loss 0.576") for line in shown)
    assert "│ ordered 75% of preference pairs │" in shown


@pytest.mark.parametrize("command", ["up", "sft"])
def test_a_run_that_is_refused_once_started_names_the_command_that_started_it(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = SimpleNamespace(folder=tmp_path)
    monkeypatch.setattr("penstock.services.up.prepare.prepare", lambda *_, **__: prepared)
    monkeypatch.setattr("penstock.services.cli.supervised.prepared", lambda *_: prepared)
    monkeypatch.setattr("penstock.services.up.run.go", lambda *_: Ending(2, "the data are refused"))
    assert main([command, "run.toml"]) == 2
    assert capsys.readouterr().err == f"logs: {tmp_path / 'logs'}\npenstock {command}: the data are refused\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "a-file").write_text("")
    (tmp_path / "run.toml").write_text('policy.model = "model"\ndata.path = "train.jsonl"\n')
    return tmp_path


BAD = {
    "unknown key": (["--trainer.learnin_rate", "1"], "did you mean 'learning_rate'?"),
    "wrong type": (["--run.steps", "many"], "run.steps: expected a valid integer"),
    "group of one": (["--sampling.group_size", "1"], "change sampling.group_size"),
    "impossible max_lag": (["--algorithm.max_lag", "-1"], "change algorithm.max_lag"),
    "too large max_lag": (["--algorithm.max_lag", "99999999"], "lower algorithm.max_lag"),
    "no model": (["--policy.model", "no/such/model"], "at 'no/such/model': change policy.model"),
    "no hub model offline": (
        ["--policy.model", "some/model"],
        "there is no folder 'some/model', and the hub cannot be reached (HF_HUB_OFFLINE is set): change policy.model",
    ),
    "a folder without a model": (
        ["--policy.model", "."],
        "has no config.json, but 'model' in it has one: change policy.model",
    ),
    "no dataset": (["--data.path", "none.jsonl"], "none.jsonl: change data.path"),
    "empty dataset": (["--data.path", "empty.jsonl"], "it has no rows: change data.path"),
    "a dataset of another kind": (
        ["--data.path", "a-file"],
        "expected .jsonl, .parquet, or a folder of a Hugging Face",
    ),
    "no evaluation": (["--evaluation.path", "none.jsonl"], "change evaluation.path"),
    "unreachable bus": (["--bus.url", "redis://:secret@127.0.0.1:1"], "change bus.url, or set it to 'embedded'"),
    "no bus at all": (["--bus.url", "http://x"], "change bus.url"),
    "a file as run folder": (["--run.folder", "a-file"], "change run.folder"),
    "a bad run id": (["--run.id", "a/b"], "change run.id"),
    "a flag without value": (["--run.steps"], "expected a value after --run.steps"),
    "no such option": (["--steps", "5"], "expected a setting such as --trainer.ranks 2, found '--steps'"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_a_sentence_with_the_setting_to_change(
    run: Path, case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, piece = BAD[case]
    monkeypatch.chdir(run)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(run / "hub"))
    assert main(["up", "run.toml", *flags]) == 2
    said = capsys.readouterr().err
    assert piece in said
    assert said.startswith("penstock up: ")
    assert "secret" not in said
    assert not (run / "runs").exists()


def test_wrong_input_ends_the_process_with_code_2_and_no_traceback(run: Path) -> None:
    shown = process("up", "run.toml", "--bus.url", "redis://127.0.0.1:1", folder=run)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert len(shown.stderr.splitlines()) == 1
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("setting", ["coordinator.port", "run.metrics_port"])
def test_a_taken_port_is_a_sentence(
    run: Path, setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["up", "run.toml", f"--{setting}={taken.getsockname()[1]}"]) == 2
    assert f"change {setting}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "piece"),
    [
        ([], "found neither"),
        (["run.toml", "other.toml"], "expected one settings file"),
        (["none.toml"], "no settings file at none.toml"),
        (["--resume", "model"], "no settings.toml in"),
    ],
)
def test_no_or_two_settings_files_are_a_sentence(
    run: Path, words: list[str], piece: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run)
    assert main(["up", *words]) == 2
    assert piece in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        (["--run.steps", "many"], {}, "flag --run.steps: run.steps: expected a valid integer"),
        (
            [],
            {"PENSTOCK__RUN__STEPS": "many"},
            "environment variable PENSTOCK__RUN__STEPS: run.steps: expected a valid",
        ),
        (["--run.stepz=3"], {}, "flag --run.stepz: run.stepz: expected a known setting"),
        ([], {}, "bad.toml: run.seed: expected greater than or equal to 0, found -1: change run.seed"),
        (
            ["--run.seed=0", "--trainer.offload", "all"],
            {"PENSTOCK__TRAINER__ZERO_STAGE": "2"},
            "found 2: change one of them (trainer.zero_stage is set by environment variable PENSTOCK__TRAINER__ZERO_STAGE, "
            "trainer.offload is set by flag --trainer.offload)",
        ),
    ],
)
def test_a_wrong_value_is_told_with_where_it_comes_from(
    run: Path,
    words: list[str],
    environment: dict[str, str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(run)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (run / "bad.toml").write_text("run.seed = -1\n" + (run / "run.toml").read_text())
    assert main(["up", "bad.toml", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        (
            "--trainer.optimizer=adamw_8bit",
            "expected trainer.optimizer = 'adamw', with which the run was started, found 'adamw_8bit' (flag --trainer.optimizer)",
        ),
        ("--policy.lora.rank=8", "expected policy.lora = {}, with which the run was started, found {'rank': 8}"),
        (
            "--policy.dtype=float32",
            "expected policy.dtype = 'bfloat16', with which the run was started, found 'float32'",
        ),
        ("--run.id=other", "expected run.id = 'mine', with which the run was started, found 'other'"),
        ("--run.steps=none", "flag --run.steps: run.steps: expected a valid integer"),
    ],
)
def test_a_resume_that_would_be_another_run_is_refused_in_a_sentence_and_changes_nothing(
    run: Path, flag: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run)
    prepare(Path("run.toml"), None, ["--run.id", "mine"]).lock.close()
    before = sorted((path.name, path.read_bytes()) for path in (run / "runs" / "mine").iterdir() if path.is_file())
    assert main(["up", "--resume", "runs/mine", flag]) == 2
    assert sentence in capsys.readouterr().err
    files = sorted((path.name, path.read_bytes()) for path in (run / "runs" / "mine").iterdir() if path.is_file())
    assert files == before


@pytest.mark.parametrize(
    ("command", "paths"),
    [("policies", ["/v1/run", "/v1/policies"]), ("services", ["/v1/services"]), ("dead", ["/v1/dead-letters"])],
)
def test_a_list_is_what_its_group_does_alone(
    coordinator: Coordinator, command: str, paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--url", coordinator.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == SERVICES["services"]
    assert [asked.partition("?")[0] for asked in coordinator.read] == paths
    assert main([command, "list"]) == 2
    assert f"use `penstock {command}`" in capsys.readouterr().err


def test_status_shows_the_newest_events_oldest_first(
    coordinator: Coordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--url", coordinator.url]) == 0
    shown = capsys.readouterr().out
    assert 0 < shown.index("service restarted: trainer-0") < shown.index("checkpoint damaged: of step 8")


def test_latest_of_a_run_that_goes_on_is_its_head_or_where_no_file_has_that_the_newest_with_a_checkpoint(
    coordinator: Coordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(60, "/c/60", "retired"), (80, "/c/80", "retired"), (90, "/c/90", "revoked"), (100, None, "live")]
    items = [{"version": version, "checkpoint": folder, "state": state} for version, folder, state in rows]
    coordinator.answers["/v1/policies"] = {"items": items, "next": None}
    assert main(["export", "--url", coordinator.url, "--version", "latest"]) == 0
    assert coordinator.asked == ["/v1/policies/100/export", "/v1/policies/80/export"]
    assert capsys.readouterr().out == "version 80 (step 80): there\n"
    items[-1]["checkpoint"] = "/c/100"  # written between the refusal and the list
    assert main(["export", "--url", coordinator.url]) == 1
    assert coordinator.asked[2:] == ["/v1/policies/100/export", "/v1/policies/100/export"]
    capsys.readouterr()
    assert main(["export", "--url", coordinator.url, "--version", "newest"]) == 2
    assert "expected a version's number or latest, found 'newest': change --version" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_written_is_a_sentence(run: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("root may write anywhere")
    (run / "runs").mkdir(mode=0o500)
    shown = process("up", "run.toml", folder=run)
    assert shown.returncode == 2
    assert "change run.folder" in shown.stderr


def test_an_interrupt_while_the_command_is_imported_ends_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "penstock.services.cli.__main__":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "penstock.services.cli.__main__")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        command_line()
    assert ended.value.code == 130


def test_dead_letters_are_listed_with_what_to_do(coordinator: Coordinator, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dead", "--url", coordinator.url]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for word in ("show", "requeue", "discard"):
        assert f"`penstock dead {word} STREAM ENTRY`" in shown
