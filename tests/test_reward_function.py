"""Laws of the user's own scorer, with functions of this module and in real processes."""

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from services.reward.function import FunctionScorer
from services.reward.function_call import as_result, load
from services.reward.scorer import Result
from shared.errors import SettingsError
from shared.messages import Prompt, Sample, Score, ScoreStatus
from shared.scorers import PythonScorer
from tests import builders
from tests.conftest import until

ROOT = Path(__file__).parent.parent


def score(sample: Sample, prompt: Prompt) -> float | Result:
    """Do what the completion says."""
    print("what a function prints is no answer")
    match sample.text.split():
        case ["raise"]:
            raise ZeroDivisionError("no")
        case ["exit"]:
            sys.exit(0)
        case ["die"]:
            os._exit(3)
        case ["hang", folder]:
            child = subprocess.Popen(["sleep", "600"])
            (Path(folder) / "child").write_text(str(child.pid))
            time.sleep(600)
        case ["text"]:
            return "0.5"  # type: ignore[return-value]
        case ["nan"]:
            return float("nan")
        case ["unknown"]:
            return Result(None, "the index is being built")
        case ["form"]:
            return Result(0.25, "no table", ScoreStatus.WRONG_FORMAT)
        case ["read"]:
            return float(len(sys.stdin.read()))
        case ["see", name]:
            return float(name in os.environ)
    return float(sample.text == prompt.answer and prompt.extra["level"] == 1 and sample.token_ids.tolist() == [0, 1, 2])


_LOOPS: list[asyncio.AbstractEventLoop] = []


async def score_async(sample: Sample, prompt: Prompt) -> float:
    """Return how many event loops this process has had."""
    await asyncio.sleep(0)
    _LOOPS.append(asyncio.get_running_loop())
    return float(len(set(_LOOPS)))


@asynccontextmanager
async def scorer(function: str = "score", **more: object) -> AsyncIterator[FunctionScorer]:
    settings = PythonScorer.model_validate({"kind": "python", "function": f"{__name__}:{function}"} | more)
    found = FunctionScorer(settings)
    try:
        await found.start()
        yield found
    finally:
        await found.close()


async def scores(*texts: str, **more: object) -> list[Score]:
    async with scorer(**more) as found:  # type: ignore[arg-type]
        return await found.score(builders.group(0, texts))


async def test_it_gives_what_the_function_returns_for_each_sample_and_its_prompt() -> None:
    found = await scores("46", "47", "form", "read", "unknown")
    assert found == [
        Score("python", ScoreStatus.OK, 1.0),
        Score("python", ScoreStatus.OK, 0.0),
        Score("python", ScoreStatus.WRONG_FORMAT, 0.25, "no table"),
        Score("python", ScoreStatus.OK, 0.0),
        Score("python", ScoreStatus.UNAVAILABLE, None, "the index is being built"),
    ]


async def test_an_async_function_keeps_one_event_loop() -> None:
    assert [found.value for found in await scores("a", "b", "c", function="score_async")] == [1.0, 1.0, 1.0]


async def test_a_bug_in_the_function_makes_the_reward_unknown_not_0() -> None:
    found = await scores("raise", "exit", "die", "text", "nan", "46")
    assert [one.status for one in found] == [ScoreStatus.UNAVAILABLE] * 5 + [ScoreStatus.OK]
    assert [one.detail for one in found[:5]] == [
        "ZeroDivisionError: no",
        "SystemExit: 0",
        "two processes died of it",
        "TypeError: expected a number or a Result from the function, found str",
        "ValueError: expected a finite value from the function, found nan",
    ]


async def test_a_bug_is_worth_0_where_the_user_says_so() -> None:
    found = await scores("raise", on_error="zero")
    assert found == [Score("python", ScoreStatus.CRASHED, 0.0, "ZeroDivisionError: no")]


async def test_a_late_function_is_killed_with_what_it_started_and_the_next_sample_is_scored(tmp_path: Path) -> None:
    async with scorer(timeout_s=3.0, on_error="zero") as found:
        late, well = await found.score(builders.group(0, (f"hang {tmp_path}", "46")))
    assert late == Score("python", ScoreStatus.TIMEOUT, 0.0, "no answer within 3 s")
    assert well.value == 1.0
    child = int((tmp_path / "child").read_text())
    await until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


async def test_the_function_sees_no_variable_but_those_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK__BUS__URL", "redis://:secret@host")
    monkeypatch.setenv("MY_INDEX", "/data")
    found = await scores("see PENSTOCK__BUS__URL", "see MY_INDEX", environment=["MY_INDEX"])
    assert [one.value for one in found] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("function", "found"),
    [
        ("no_such_module:score", "ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{__name__}:nothing", "AttributeError: module 'tests.test_reward_function' has no attribute 'nothing'"),
        (f"{__name__}:ROOT", "ValueError: tests.test_reward_function:ROOT is no function but PosixPath"),
        ("nobody", "ValueError: no entry point 'nobody' in the group 'penstock.scorers'"),
    ],
)
async def test_a_function_that_is_not_there_stops_the_start(function: str, found: str) -> None:
    wrong = FunctionScorer(PythonScorer(kind="python", function=function))
    with pytest.raises(SettingsError) as caught:
        await wrong.start()
    await wrong.close()
    assert f"for scorer 'python', found {found}" in str(caught.value)


def test_a_function_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mine-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[penstock.scorers]\nmine = {__name__}:score\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load("mine") is score


def test_a_number_of_any_kind_is_a_score() -> None:
    assert [as_result(value).value for value in (1, True, 0.5)] == [1.0, 1.0, 0.5]


def test_unavailable_is_said_without_a_value() -> None:
    with pytest.raises(ValueError, match="expected value=None"):
        Result(0.0, status=ScoreStatus.UNAVAILABLE)


async def test_the_example_in_the_documents_does_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "rewards.md").read_text()
    example = re.search(r"```python\n# my_scorers\.py\n(.*?)```", page, re.DOTALL)
    settings = re.search(r"```toml\n# the user's own scorer\n\[\[reward\.scorers\]\]\n(.*?)```", page, re.DOTALL)
    assert example is not None
    assert settings is not None
    (tmp_path / "my_scorers.py").write_text(example[1])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    import tomllib

    found = FunctionScorer(PythonScorer.model_validate(tomllib.loads(settings[1])))
    group = builders.group(0, ("Because 12 and 34 are 46.", "x" * 81, "  "))
    group = dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, extra={"limit": 40}))
    try:
        await found.start()
        assert [(one.status.value, one.value) for one in await found.score(group)] == [
            ("ok", 1.0),
            ("ok", 0.0),
            ("wrong_format", 0.0),
        ]
    finally:
        await found.close()
