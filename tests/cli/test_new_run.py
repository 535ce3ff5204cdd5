"""`penstock new`."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.services.cli.__main__ import main
from penstock.services.cli.new_run import toml
from penstock.services.cli.settings_help import COMMON
from penstock.shared.settings import Settings, load, loads

SCORERS = '[{kind = "trl", functions = ["rewards:right"]}]'
FLAGS = ("--policy.model", "models/m", "--run.steps=7", f"--reward.scorers={SCORERS}", "--policy.lora.rank", "8")


def test_a_new_run_has_what_was_given_and_the_common_settings_as_comments(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    assert main(["new", str(path), *FLAGS]) == 0
    assert load(path, environment={}) == load(None, FLAGS, environment={})
    lines = path.read_text().splitlines()
    assert [line.partition("#")[0].rstrip() for line in lines if line and line[0] not in "#["] == [
        "steps = 7",
        'model = "models/m"',
        "lora.rank = 8",
        f"scorers = {SCORERS}",
    ]
    default = '# device = "auto"'
    assert f"{default:<48}  # Device of the models: `auto`, `cpu` or `cuda`" in lines


def test_every_common_setting_is_a_comment_with_its_default() -> None:
    lines = [line.removeprefix("# ") for line in toml({}).splitlines()[2:]]
    assert sum(" = " in line.partition("  #")[0] for line in lines) == len(COMMON)
    defaults = "\n".join(line for line in lines if "not set by default" not in line)
    assert " = none" not in defaults
    example = 'path = "heldout.jsonl"'
    assert f"{example:<46}  # Held-out problems, or several sets by name; not set by default" in lines
    assert loads(defaults, "defaults") == Settings()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "the name of the new file is missing"),
        (("run.toml", "--run.stepz=7"), "stepz"),
        (("run.toml", "--run.steps=0"), "run.steps"),
        (("old.toml",), "expected a new file, found old.toml (File exists)"),
    ],
)
def test_a_new_run_that_would_not_work_is_not_written(
    words: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.toml").write_text("kept")
    assert main(["new", *(words or ("--run.steps=7",))]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("run.toml").exists()
    assert Path("old.toml").read_text() == "kept"


def test_a_new_environment_has_a_test_that_passes_and_a_run_that_the_check_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "agent"
    assert main(["new", str(folder), "--environment", "--run.steps=3"]) == 0
    monkeypatch.chdir(folder)
    settings = load(folder / "run.toml", environment={})
    assert (settings.run.steps, settings.algorithm.on_stale, settings.sampling.max_new_tokens) == (3, "mask", 12)
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_environment.py"]
    assert subprocess.run(test, check=False, stdout=subprocess.DEVNULL).returncode == 0
    assert main(["data", "check", "run.toml"]) == 0
    assert "50 episodes of random calls: rewards of 0.6 to 1" in capsys.readouterr().out
    assert main(["new", str(folder), "--environment"]) == 2
    assert "expected a new folder" in capsys.readouterr().err
    assert main(["new", str(tmp_path / "other"), "--environment", "--episodes.max_turns=0"]) == 2
    assert not (tmp_path / "other").exists()
