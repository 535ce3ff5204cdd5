"""What commands print fits terminals of 80, 120 and 200 columns: no word of ordinary length is cut."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from penstock.services.cli.__main__ import app, main
from tests.coordinator.records.test_report import whole_run, write_lines

pytestmark = pytest.mark.usefixtures("served_once")
ORDINARY = 20
"""Characters of a word that no column may cut; longer ones, such as paths, are folded."""
WHOLE = 1000
"""Columns of a terminal on which nothing is folded."""
COMMANDS = {
    "status": "status {run}",
    "events": "events {run} --most 7",
    "policies": "policies --run {run} --most 7",
    "a version": "policies show 250 --run {run}",
    "two versions": "policies show 249 250 --run {run}",
    "report": "report {run} --against {other}",
    "rewards": "audit-rewards {run} --sample 5",
    "settings": "settings algorithm",
    "plan": "plan --model 7b --gpus 2xH100",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two runs that have ended and differ, with checkpoints and long events."""
    folders = {name: whole_run(tmp_path_factory.mktemp("runs") / name) for name in ("run", "other")}
    for name, folder in folders.items():
        (folder / "checkpoints" / "step-000250").mkdir(parents=True)
        (folder / "settings.toml").write_text(
            f'[run]\nsteps = 250\n[trainer]\nlearning_rate = {len(name)}e-6\n[policy]\nmodel = "{name}/a-name-of-a-model"\n'
            '[[reward.scorers]]\nkind = "answer"\nmode = "exact"\n'
        )
        detail = "the self-test compared logprobs of trainer and engine on the same sequences and found differences"
        events = [{"entry": f"{n}-0", "at_s": 1.8e9 + n, "source": "trainer-0", "name": "self-test passed", "detail": detail} for n in range(9)]  # fmt: skip
        write_lines(folder / "events.jsonl", events)
        known = {"version": 250, "step": 250, "problems": 500, "answered": 500, "correct": 445, "accuracy": 0.89}
        rest = {"initial": False, "final": True, "started_at_s": 1.8e9, "seconds": 1.0, "note": "", "pass_at": {}}
        of_set = {"set": "main", "samples": 1, "accuracy_low": None, "accuracy_high": None}
        write_lines(folder / "evaluations.jsonl", [known | rest | of_set])
    return {name: str(folder) for name, folder in folders.items()}


def words(printed: str) -> set[str]:
    return {word for word in re.findall(r"\S+", printed) if len(word) <= ORDINARY}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_word_is_cut_on_a_narrow_terminal(
    command: str, places: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = COMMANDS[command].format(**places).split()
    printed = {}
    for columns in (WHOLE, 200, 120, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(given) == 0
        printed[columns] = capsys.readouterr().out
    assert len(words(printed[WHOLE])) > 10, printed[WHOLE]
    cut = {columns: sorted(words(printed[WHOLE]) - words(printed[columns])) for columns in (200, 120, 80)}
    assert cut == {200: [], 120: [], 80: []}, printed[80]
    assert "…" not in printed[80] or "…" in printed[WHOLE]


def test_the_newest_versions_are_listed_with_their_accuracy(
    places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policies", "--run", places["run"], "--most", "3", "--json"]) == 0
    assert [each["version"] for each in json.loads(capsys.readouterr().out)] == [248, 249, 250]
    assert main(["policies", "--run", places["run"], "--most", "2"]) == 0
    assert " 0.89 " in capsys.readouterr().out


OF_NO_RUN = {"up", "sft", "new", "deploy", "plan", "settings", "doctor", "data check"}
"""Commands that begin a run, name one in other words, or need none."""


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", {})
    for word, each in inner.items():
        yield from commands(each, f"{name} {word}".strip())
    if name and (not inner or command.invoke_without_command):
        yield name, command


def test_every_command_of_a_run_takes_it_as_an_option_and_unless_it_has_another_word_by_place() -> None:
    takers = {name: command for name, command in commands(get_command(app)) if name not in OF_NO_RUN}
    assert len(takers) > 25
    for name, command in takers.items():
        assert any("--run" in parameter.opts for parameter in command.params), name
        words = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
        assert words or hasattr(command, "commands"), f"{name} takes no run by its place"
        assert "RUN_FOLDER" not in {parameter.metavar for parameter in command.params}, name


def test_help_imports_no_settings_client_or_server() -> None:
    # which took it from 0.23 to 0.55 s of processor time
    read = "import sys\nfrom penstock.services.cli.__main__ import main\nmain(['--help'])\nprint('\\n', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", read], check=True, stdout=subprocess.PIPE, text=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "penstock.services.cli.__main__" in modules
    assert modules & {"pydantic", "redis", "torch", "httpx", "fastapi", "tomli_w"} == set()
