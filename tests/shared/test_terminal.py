"""No text of a run can control the terminal, in any command."""

import http.server
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from penstock.services.cli.__main__ import app, main
from penstock.services.client.views import Notice, RunView
from penstock.services.up.display import console, screen, summary, view
from penstock.shared.process.log import JsonLines, PlainLines
from penstock.shared.text.terminal import escaped, escaped_line
from tests.support.http_server import served

BAD = [
    chr(code)
    for code in (
        *range(0x20),
        *range(0x7F, 0xA0),
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
        0x2028,
        0xE0041,
        0xD800,
    )
]
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\x85\r\x7f\u202eevil\u2066\u2028\U000e0041" + "".join(
    character for character in BAD if character not in "\n\t\ud800"
)
FORGED = "quiet\n12:00:00 run finished"
TIME = 1_795_264_087.0

RUN = {
    "run_id": HOSTILE,
    "state": HOSTILE,
    "reason": HOSTILE,
    "activity": HOSTILE,
    "step": 1,
    "steps": 2,
    "notices": [{"about": HOSTILE, "level": HOSTILE, "text": HOSTILE}],
    "evaluations": [{"set": HOSTILE, "accuracy": 0.5}, {"set": "b" + HOSTILE, "accuracy": 0.5}],
    "streams": {HOSTILE: {"entries": 1}},
}
ROW = {
    **dict.fromkeys(
        ("replica", "service", "state", "cordon", "last_error", "stream", "entry", "group", "reason"), HOSTILE
    ),
    **dict.fromkeys(("source", "name", "detail", "id", "run_id", "checkpoint", "kind", "phase", HOSTILE), HOSTILE),
    **{"at_s": TIME, "version": 1, "result": {"version": 1, "step": 1, "folder": HOSTILE, "revoked": 0, "undone": 0}},
    "buried_at_s": TIME,
}
DONE = {**ROW, "kind": "export", "state": "succeeded", "result": {**ROW["result"], "folder": "there"}}  # type: ignore[dict-item]


class Hostile(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/v1/events/stream":
            self.send(200, f"data: {json.dumps(ROW)}\n\n".encode(), "text/event-stream")
        elif path == "/v1/run":
            self.send(200, RUN)
        elif path.count("/") == 2:
            self.send(200, {"items": [ROW], "next": None})
        else:
            self.send(200, ROW)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path.endswith(("/stop", "/discard")):
            self.send(409, {"detail": HOSTILE})
        elif self.path.endswith("/generate"):
            completion = {"text": HOSTILE, "tokens": 1, "finish_reason": "stop", "versions": [1]}
            self.send(200, {"completions": [completion]})
        else:
            self.send(200, DONE if self.path.endswith(("/export", "/rollback", "/drain")) else ROW)

    def do_DELETE(self) -> None:
        self.send(409, {"detail": HOSTILE})

    def send(self, status: int, body: object, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with served(Hostile) as address:
        yield address


ARGUMENTS = {
    "rollback": ["1"],
    "policies show": ["1"],
    "policies show 1": ["2"],
    "events --follow": [],
    "policies pin": ["1"],
    "policies release": ["1"],
    "services cordon": ["x"],
    "services drain": ["x"],
    "dead show": ["rollouts", "1-0"],
    "dead requeue": ["rollouts", "1-0"],
    "dead discard": ["rollouts", "1-0"],
    "runs delete": ["x"],
    "chat": ["--ask", "hi"],
}
LOCAL = {"up", "report", "settings", "audit-rewards", "plan", "new", "data", "data check", "eval", "push"}
LOCAL |= {"delete", "deploy", "doctor", "logs", "sft"}
"""These read local files or a cluster; `up` and `logs` are tested below, the audit in tests/reward/test_audit.py."""


def commands(group: Any, prefix: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield f"{prefix}{name}"
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}"


COMMANDS = [name for name in commands(typer.main.get_command(app)) if name not in LOCAL]
COMMANDS += ["policies show 1", "events --follow"]


def clean(text: str) -> bool:
    return not any(character in text for character in BAD if character not in "\n\t")


@pytest.mark.parametrize("json_", [False, True])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_prints_what_steers_a_terminal(
    name: str,
    json_: bool,
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "events --follow":  # it follows forever: stop after the first event
        monkeypatch.setattr(console, "say", said := _Said())
    flags = [] if name == "runs delete" else ["--json"] * json_
    words = [*name.split(), *ARGUMENTS.get(name, []), "--url", url, *flags]
    main(words)
    printed = capsys.readouterr()
    text = printed.out + printed.err + (said.text if name == "events --follow" else "")
    assert clean(text), repr(text)
    assert "owned" in text or name in ("export", "drain", "page", "rollback"), (
        f"`penstock {name}` printed nothing of the run: {text}"
    )


def test_log_lines_are_printed_escaped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings.toml").write_text("")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer-0.log").write_bytes(HOSTILE.encode(errors="surrogatepass") + b"\xff\nlast\n")
    assert main(["logs", "--run", str(tmp_path)]) == 0
    printed = capfd.readouterr()
    assert clean(printed.out + printed.err), repr(printed.out)
    assert "owned" in printed.out
    assert printed.out.splitlines()[-1] == "last"


class _Said:
    def __init__(self) -> None:
        self.text = ""

    def __call__(self, text: str) -> None:
        self.text = escaped(text)
        raise KeyboardInterrupt


def rows() -> list[view.ViewRow]:
    return [view.ViewRow(HOSTILE, HOSTILE, note=HOSTILE)]


def test_the_live_screen_shows_hostile_text_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    live = screen.LiveScreen(HOSTILE, Console(file=output, width=100, color_system=None))
    with live:
        live.tell(f"{HOSTILE}{FORGED}")
        live.show(RunView.model_validate(RUN), rows())
    text = output.getvalue()
    assert "]0;owned" in text
    assert "\x1b]0;" not in text
    assert "\x1b[2J\\" not in text
    assert all(character not in text for character in BAD if character not in "\n\t\r\x1b")


def test_plain_lines_show_hostile_text_escaped_and_as_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    plain = screen.PlainDisplay()
    plain.tell(FORGED)
    plain.show(RunView.model_validate({**RUN, "notices": [{"about": "x", "level": "error", "text": HOSTILE}]}), rows())
    printed = capsys.readouterr().out
    assert clean(printed)
    assert len(printed.splitlines()) == 3, "one line told, one notice, one of the run"


def test_the_words_at_the_end_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"state": HOSTILE}))
    console.say(summary.text(tmp_path, resumable=False))
    assert clean(capsys.readouterr().out)


@pytest.mark.parametrize("form", [JsonLines("r"), PlainLines("r")])
def test_log_lines_are_escaped_and_json_stays_what_it_was(form: logging.Formatter) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, HOSTILE, (), (type(error), error, error.__traceback__))
    record.__dict__["reason"] = f"{HOSTILE}{FORGED}"
    line = form.format(record)
    assert clean(line)
    if isinstance(form, JsonLines):
        assert json.loads(line)["reason"] == f"{HOSTILE}{FORGED}"
        assert "\n" not in line
    else:
        assert "reason=" in line
        assert "\n12:00:00 run finished" not in line


def test_every_steering_character_is_escaped_and_text_stays_as_it_is() -> None:
    for character in BAD:
        assert character in "\n\t" or character not in escaped(character)
        assert character not in escaped_line(character)
    for text in ("Größe 数学 ∑ 👩‍🔬 é عربى עברית", "two\nlines\tand a tab", '{"a": "\\u001b"}'):
        assert escaped(text) == text


def test_a_notice_is_escaped_before_its_width_is_taken() -> None:
    assert Notice(about="x", level="error", text="a\x1bb").text == "a\\u001bb"
