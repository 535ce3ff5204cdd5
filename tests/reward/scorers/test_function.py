"""The user's own scorer, with ``scorer_functions`` in real processes."""

import dataclasses
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from penstock import Result
from penstock.services.reward.scorers.function.function_call import as_result, load
from penstock.services.reward.scorers.function.scorer import FunctionScorer
from penstock.services.reward.scoring import Scoring
from penstock.services.up.process_tree import is_alive
from penstock.shared.backoff import Backoff
from penstock.shared.bus.messages import Score, ScoreStatus
from penstock.shared.errors import SettingsError
from penstock.shared.expression import Expression
from penstock.shared.process.telemetry import Status
from penstock.shared.settings.rewards.scorers import PythonScorer
from tests.conftest import PATIENCE_S, until
from tests.support import builders, scorer_functions
from tests.support.overdue import hang_up

ROOT = Path(__file__).parents[3]
FUNCTIONS = scorer_functions.__name__


@asynccontextmanager
async def scorer(function: str = "score", **more: object) -> AsyncIterator[FunctionScorer]:
    settings = PythonScorer.model_validate({"kind": "python", "function": f"{FUNCTIONS}:{function}"} | more)
    function_scorer = FunctionScorer(settings)
    try:
        await function_scorer.start()
        yield function_scorer
    finally:
        await function_scorer.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lenient() -> AsyncIterator[FunctionScorer]:
    async with scorer(timeout_s=PATIENCE_S) as scored:
        yield scored


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict() -> AsyncIterator[FunctionScorer]:
    async with scorer(on_error="zero") as scored:
        with pytest.MonkeyPatch.context() as patched:
            hang_up(scored._processes, patched)
            yield scored


@pytest.mark.asyncio(loop_scope="module")
async def test_it_gives_what_the_function_returns_for_each_sample_and_its_prompt(lenient: FunctionScorer) -> None:
    assert await lenient.score(builders.group(0, ("46", "47", "form", "read", "unknown"))) == [
        Score("python", ScoreStatus.OK, 1.0),
        Score("python", ScoreStatus.OK, 0.0),
        Score("python", ScoreStatus.WRONG_FORMAT, 0.25, "no table"),
        Score("python", ScoreStatus.OK, 0.0),
        Score("python", ScoreStatus.UNAVAILABLE, None, "the index is being built"),
    ]


async def test_an_async_function_keeps_one_event_loop() -> None:
    async with scorer("score_async") as scored:
        assert [single.value for single in await scored.score(builders.group(0, ("a", "b", "c")))] == [1.0, 1.0, 1.0]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_bug_in_the_function_makes_the_reward_unknown_not_0(lenient: FunctionScorer) -> None:
    texts = ("raise", "exit", "die", "text", "nan", "list", "none")
    scored = [(await lenient.score(builders.group(0, (text,))))[0] for text in texts]
    assert [single.status for single in scored] == [ScoreStatus.UNAVAILABLE] * 7
    here = _line("def score(")
    assert [single.detail for single in scored] == [
        f"ZeroDivisionError: no (scorer_functions.py:{_line('raise ZeroDivisionError')})",
        f"SystemExit: 0 (scorer_functions.py:{_line('sys.exit(0)')})",
        f"two processes died while they computed it: {FUNCTIONS}:score",
        f"TypeError: expected a number or a Result from the function, found str (scorer_functions.py:{here})",
        f"ValueError: expected a finite value from the function, found nan (scorer_functions.py:{here})",
        f"TypeError: expected a number or a Result from the function, found list (scorer_functions.py:{here})",
        f"TypeError: expected a number or a Result from the function, found NoneType (scorer_functions.py:{here})",
    ]


def _line(code: str) -> int:
    """Return the 1-based line number of ``code`` in the user's module."""
    lines = Path(scorer_functions.__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if code in line)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_sample_without_a_score_costs_no_other_sample_its_own(lenient: FunctionScorer) -> None:
    scored = await lenient.score(builders.group(0, ("raise", "46", "unknown", "47")))
    assert [single.value for single in scored] == [None, 1.0, None, 0.0]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_group_is_trained_without_the_sample_on_which_the_function_fails(lenient: FunctionScorer) -> None:
    scoring = Scoring([lenient], Expression("", ["python"]), Status(), redo=Backoff(0.001, 0.001))
    made = await scoring(builders.group(0, ("raise", "46", "47")), last=True)
    assert [sample.text for sample in made.group.samples] == ["46", "47"]
    assert made.rewards.tolist() == [1.0, 0.0]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_bug_is_worth_0_where_the_user_says_so(strict: FunctionScorer) -> None:
    assert await strict.score(builders.group(0, ("raise",))) == [
        Score(
            "python",
            ScoreStatus.CRASHED,
            0.0,
            f"ZeroDivisionError: no (scorer_functions.py:{_line('raise ZeroDivisionError')})",
        )
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_late_function_is_killed_with_what_it_started_and_the_next_sample_is_scored(
    strict: FunctionScorer, tmp_path: Path
) -> None:
    late, well = await strict.score(builders.group(0, (f"hang {tmp_path}", "46")))
    assert late == Score("python", ScoreStatus.TIMEOUT, 0.0, f"no answer within 2 s (timeout_s) from {FUNCTIONS}:score")
    assert well.value == 1.0
    if (child := tmp_path / "child").exists() and (
        pid := child.read_text()
    ):  # it may have been killed before it wrote this
        await until(lambda: not is_alive(int(pid)))


async def test_the_function_sees_no_variable_but_those_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK__BUS__URL", "redis://:secret@host")
    monkeypatch.setenv("MY_INDEX", "/data")
    async with scorer(environment=["MY_INDEX"]) as scored:
        seen = await scored.score(builders.group(0, ("see PENSTOCK__BUS__URL", "see MY_INDEX")))
    assert [single.value for single in seen] == [0.0, 1.0]


async def test_a_function_that_is_not_there_stops_the_start() -> None:
    wrong = FunctionScorer(PythonScorer(kind="python", function="no_such_module:score"))
    with pytest.raises(SettingsError) as caught:
        await wrong.start()
    await wrong.close()
    assert "of scorer 'python': ModuleNotFoundError: No module named 'no_such_module'" in str(caught.value)


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (f"{FUNCTIONS}:nothing", AttributeError, "module 'tests.support.scorer_functions' has no attribute 'nothing'"),
        (f"{FUNCTIONS}:NUMBER", ValueError, "tests.support.scorer_functions:NUMBER is no function but int"),
        ("nobody", ValueError, "no entry point 'nobody' in the group 'penstock.scorers'"),
    ],
)
def test_what_names_no_function_cannot_be_loaded(function: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        load(function)


def test_a_function_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mine-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[penstock.scorers]\nmine = {FUNCTIONS}:score\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load("mine") is scorer_functions.score


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

    scored = FunctionScorer(PythonScorer.model_validate(tomllib.loads(settings[1])))
    group = builders.group(0, ("Because 12 and 34 are 46.", "x" * 81, "  "))
    group = dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, extra={"limit": 40}))
    try:
        await scored.start()
        assert [(single.status.value, single.value) for single in await scored.score(group)] == [
            ("ok", 1.0),
            ("ok", 0.0),
            ("wrong_format", 0.0),
        ]
    finally:
        await scored.close()
