"""Exit codes of every command, as docs/reference/exit-codes.md has them: with a sentence that says what to change, and no traceback."""

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from penstock.services.cli.__main__ import app, main
from tests.cli.test_cli import ROOT, RUN
from tests.cli.test_terminal import OF_NO_RUN, commands
from tests.conftest import PATIENCE_S
from tests.support.http_server import served

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130
ARGUMENTS = {
    "rollback": ["4"], "policies show": ["4"], "policies pin": ["4"], "policies release": ["4"],
    "services cordon": ["rollout-0"], "services drain": ["rollout-0"], "runs delete": ["a-run"],
    "dead show": ["rollouts", "1-0"], "dead requeue": ["rollouts", "1-0"], "dead discard": ["rollouts", "1-0"],
    "push": ["owner/name"], "deploy": ["run.toml", "--on", "run.toml"], "new": ["new.toml"],
}  # fmt: skip
"""What a command must have beside a run."""
OF_FILES = {"up", "sft", "plan", "eval", "data check"}
"""Commands whose options are settings, too."""
NAMES = sorted({name for name, _ in commands(get_command(app))})
OF_RUNS = [[*name.split(), *ARGUMENTS.get(name, []), "--run", "RUN"] for name in NAMES if name not in OF_NO_RUN]
ELSEWHERE = [
    ["report", ".", "--against", "RUN"], ["plan", "--memory", "RUN"], ["plan", "--model", "7b", "--calibrate", "RUN"],
    ["up", "--resume", "RUN"], ["up", "run.toml", "--from", "RUN"], ["events", "RUN", "--follow"],
    ["chat", "RUN", "--version", "1", "--ask", "1+1="],
    *([*command, "RUN"] for command in (["up"], ["sft"], ["data", "check"], ["plan"])),
    ["deploy", "RUN", "--on", "run.toml"],
]  # fmt: skip
"""Other places where a run, or its settings file, is named."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a folder that is no run, and a file that is no TOML."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("of something else")
    (tmp_path / "broken").write_text("[run\n")
    (tmp_path / "run.toml").write_text('policy.model = "."\ndata.path = "none.jsonl"\n')
    return tmp_path


@pytest.mark.parametrize("place", ["absent", "other", "broken"])
@pytest.mark.parametrize("words", [*OF_RUNS, *ELSEWHERE], ids=" ".join)
def test_a_name_that_is_no_run_is_wrong_usage(
    here: Path, words: list[str], place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([place if word == "RUN" else word for word in words]) == WRONG
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"penstock {words[0]}: ")
    assert place in said.err or "." in words or "run.toml" in said.err
    assert re.search(r"\b(give|change|check|set)\b|is not TOML", said.err), said.err
    assert len(said.err.splitlines()) == 1
    assert not (here / "other" / "report.html").exists()


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_wrong_usage(here: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = ["run.toml"] if name in OF_FILES else []
    assert main([*name.split(), *ARGUMENTS.get(name, []), *file, "--nonsense", "1"]) == WRONG
    said = capsys.readouterr()
    assert said.out == ""
    assert "--nonsense" in said.err


@pytest.mark.parametrize("name", sorted({*ARGUMENTS, "sft", "data check", "up"}))
def test_a_missing_argument_is_wrong_usage(here: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(name.split()) == WRONG
    said = capsys.readouterr()
    assert said.out == ""
    assert "issing" in said.err or "found neither" in said.err


def test_options_without_effect_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["run.toml"], ["--model", "7b"], ["--write", "new.toml"], ["--gpus", "4xH100"]):
        assert main(["plan", "--memory", "other", *words]) == WRONG
        assert "leave out CONFIG and all options but --json" in capsys.readouterr().err


class Waiting(http.server.BaseHTTPRequestHandler):
    """A coordinator whose commands never end; whoever waits is interrupted, as by Ctrl-C."""

    asked: list[str]
    over: threading.Event

    def do_GET(self) -> None:
        if self.path.startswith(("/v1/operations/", "/v1/events/stream")):
            self.interrupt()
        else:
            self.answer(RUN)

    def do_POST(self) -> None:
        if self.path.endswith("/generate"):
            self.interrupt()
        else:
            self.answer({"kind": "a command", "id": "7", "state": "running", "detail": ""})

    def interrupt(self) -> None:
        self.asked.append(self.path)
        os.kill(os.getpid(), signal.SIGINT)
        self.over.wait(PATIENCE_S)

    def answer(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def waiting() -> Iterator[str]:
    Waiting.asked, Waiting.over = [], threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Waiting)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    Waiting.over.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    "words",
    [
        ["events", "--follow"], ["pause", "--drain"], ["rollback", "4"], ["services", "drain", "rollout-0"],
        ["export", "--version", "4"], ["chat", "--ask", "1+1="],
    ],
    ids=" ".join,
)  # fmt: skip
def test_ctrl_c_ends_what_waits_for_a_coordinator(
    words: list[str], waiting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--url", waiting]) == INTERRUPTED
    assert len(Waiting.asked) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    (tmp_path / "settings.toml").write_text("run.steps = 6")
    (tmp_path / "summary.json").write_text('{"state": "finished", "steps": 6}')
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer-0.log").write_text("a line\n")
    return tmp_path


@pytest.mark.parametrize("words", [["page"], ["logs", "--follow"]], ids=" ".join)
def test_ctrl_c_ends_what_goes_on_until_then_with_its_processes(words: list[str], ended: Path) -> None:
    command = [sys.executable, "-m", "penstock.services.cli", *words, str(ended)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, err = process.communicate(timeout=PATIENCE_S)  # at the end of the last process that has these pipes
    assert process.returncode == INTERRUPTED
    assert out == ""
    assert "Traceback" not in err


def test_a_run_without_what_a_command_reads_is_a_failure(ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, piece in (
        (["pause"], "has no coordinator"),
        (["logs", "--service", "reward"], "no log files"),
        (["delete"], "was not started by `penstock deploy`"),
        (["plan", "--memory"], "no records of memory"),
        (["status", "--url", "http://127.0.0.1:1"], "no coordinator answers"),
        (["policies", "show", "9", "--run"], "no policy version 9"),
    ):
        assert main([*words, str(ended)]) == FAILED
        assert piece in capsys.readouterr().err
    assert main(["status", str(ended)]) == DONE
    assert main(["report", str(ended)]) == DONE
    assert capsys.readouterr().out.endswith(f"{ended / 'report.html'}\n")


def test_another_http_server_is_a_sentence_without_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    class Foreign(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with served(Foreign) as url:
        assert main(["status", "--url", url]) == FAILED
    said = f"penstock status: expected a Penstock coordinator at {url}/v1/run, found another answer (status 404): check --url"
    assert capsys.readouterr().err.splitlines() == [said]


def test_a_missing_package_is_named_with_its_extra_and_a_fault_of_our_own_modules_is_not_called_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, own = (
        ModuleNotFoundError("No module named 'torch'", name="torch"),
        ImportError("x", name="penstock.shared"),
    )

    def failing(*_: object, **__: object) -> None:
        raise errors.pop()

    errors: list[ImportError] = [own, missing]
    monkeypatch.setattr("penstock.services.cli.__main__.app", failing)
    assert main(["plan"]) == WRONG
    assert "penstock plan: No module named 'torch': pip install" in capsys.readouterr().err
    with pytest.raises(ImportError, match="x"):
        main(["plan"])


def test_the_page_of_exit_codes_has_these_codes() -> None:
    page = (ROOT / "docs/reference/exit-codes.md").read_text()
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == ["0", "1", "2", "130", "143"]
    for name in re.findall(r"^\| `([a-z -]+)` \|", page, re.MULTILINE):
        assert name in NAMES
