"""The dry run of scorers, and reports of failures before training, during it, and during a hang."""

import asyncio
import contextlib
import dataclasses
import json
import os
from pathlib import Path

import pytest

from penstock.services.reward import rehearsal, service
from penstock.services.reward.failures import Failures
from penstock.services.reward.scorers.function.trl_scorer import TrlFunctions
from penstock.services.reward.scorers.scorer import Scorer, unavailable, valued
from penstock.services.reward.scoring import Scoring
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Event, Prompt, RolloutGroup, Score, ScoreStatus
from penstock.shared.bus.stores.experience.rehearsal import offer
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.streams import EVENTS, ROLLOUTS
from penstock.shared.errors import PermanentError, SettingsError, TemporaryError
from penstock.shared.expression import Expression
from penstock.shared.process.telemetry import Presence, Status
from penstock.shared.settings import Settings
from penstock.shared.settings.rewards.scorers import AnswerScorer, CodeScorer, JudgeScorer, PythonScorer, TrlScorer
from penstock.shared.settings.rewards.scorers import Scorer as ScorerSettings
from tests.conftest import Server, until
from tests.support import builders
from tests.support.raw_redis import raw

PYTHON = PythonScorer(kind="python", name="mine", function="mine:score")
JUDGE = JudgeScorer.model_construct(kind="judge", name="judge")


class Tried:
    """A scorer that records its calls and fails on some completions."""

    def __init__(self, name: str, failing: tuple[str, ...] = (), error: Exception | None = None) -> None:
        self.name = name
        self.asked: list[tuple[str, str]] = []
        self._failing = failing
        self._error = error

    async def start(self) -> None:
        pass

    async def score(self, group: RolloutGroup) -> list[Score]:
        (sample,) = group.samples
        self.asked.append((group.prompt.problem, sample.text))
        if sample.text in self._failing:
            if self._error is not None:
                raise self._error
            return [unavailable(self.name, "KeyError: 'limit' (mine.py:4)")]
        return [valued(self.name, ScoreStatus.OK, 1.0)]

    async def close(self) -> None:
        pass


def prompts(*answers: str | None) -> list[Prompt]:
    return [dataclasses.replace(builders.prompt(index), answer=answer) for index, answer in enumerate(answers)]


async def rehearse(of: ScorerSettings, scorer: Scorer, asked: list[Prompt]) -> Status:
    status = Status()
    await rehearsal.rehearse([(of, scorer)], asked, Failures(status))
    return status


async def test_each_scorer_is_tried_on_each_rows_answer_and_on_a_trivial_completion() -> None:
    scorer = Tried("mine")
    assert (await rehearse(PYTHON, scorer, prompts("46", None))).failures == {}
    assert scorer.asked == [("train.jsonl:1", "46"), ("train.jsonl:1", "0"), ("train.jsonl:2", "0")]


async def test_a_function_of_a_whole_group_is_tried_on_two_completions_so_that_a_short_list_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "group_functions.py").write_text(
        "def one(completions, **_):\n    return [1.0]\n\n\ndef each(completions, **_):\n    return [1.0 for _ in completions]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for function, sentence in (
        ("one", "expected 2 rewards from the function, one per completion, found 1"),
        ("each", ""),
    ):
        trl = TrlScorer(kind="trl", name="trl", functions=(f"group_functions:{function}",))
        scorer = TrlFunctions(trl, "answer", 100)
        try:
            await scorer.start()
            with pytest.raises(SettingsError, match=sentence) if sentence else contextlib.nullcontext():
                assert (await rehearse(trl, scorer, prompts("46"))).failures == {}
        finally:
            await scorer.close()


async def test_a_scorer_that_fails_on_every_row_refuses_the_start_with_cause_rows_and_setting() -> None:
    with pytest.raises(SettingsError) as caught:
        await rehearse(PYTHON, Tried("mine", ("46", "0")), prompts("46", None))
    assert str(caught.value) == (
        "scorer 'mine' failed on every row of its dry run before training (3 completions of train.jsonl:1, train.jsonl:2): "
        "KeyError: 'limit' (mine.py:4). Correct the scorer or the data, or change its table in [[reward.scorers]]"
    )


async def test_a_scorer_that_fails_on_some_completions_begins_and_what_it_failed_on_is_told() -> None:
    status = await rehearse(PYTHON, Tried("mine", ("0",)), prompts("46", "48"))
    (failure,) = status.failures.values()
    assert (failure.part, failure.problem, failure.reason) == (
        "scorer 'mine'",
        "train.jsonl:2",
        "KeyError: 'limit' (mine.py:4)",
    )
    assert (failure.failed, failure.in_a_row) == (2, 0)


async def test_rows_that_a_scorer_can_never_score_refuse_the_start() -> None:
    answer = AnswerScorer(kind="answer", name="answer")
    with pytest.raises(SettingsError, match=r"\(1 completions of train\.jsonl:1\): no number"):
        await rehearse(answer, Tried("answer", ("0",), PermanentError("no number")), prompts(None))


async def test_what_a_scorer_needs_and_is_not_there_yet_does_not_refuse_the_start() -> None:
    code = CodeScorer(kind="code", name="code")
    status = await rehearse(code, Tried("code", ("0",), TemporaryError("no executor")), prompts(None))
    (failure,) = status.failures.values()
    assert (failure.reason, failure.in_a_row) == ("no executor", 1)


async def test_a_judge_is_not_asked_as_that_may_cost_money() -> None:
    judge = Tried("judge", ("46", "0"))
    await rehearse(JUDGE, judge, prompts("46"))
    assert judge.asked == []


async def test_a_function_whose_errors_are_worth_0_is_refused_all_the_same() -> None:
    class Zero(Tried):
        async def score(self, group: RolloutGroup) -> list[Score]:
            return [valued(self.name, ScoreStatus.CRASHED, 0.0, "KeyError: 'limit'")]

    lenient = PYTHON.model_copy(update={"on_error": "zero"})
    with pytest.raises(SettingsError, match="KeyError: 'limit'"):
        await rehearse(lenient, Zero("mine"), prompts("46"))


async def test_a_scorer_that_keeps_failing_late_is_not_tried_on_the_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_ENOUGH_S", 0.0)
    endless = asyncio.Event()

    class Late(Tried):
        async def score(self, group: RolloutGroup) -> list[Score]:
            if self.asked:
                await endless.wait()  # like all of its processes
            return await super().score(group)

    with pytest.raises(SettingsError, match=r"1 completions of train\.jsonl:1"):
        await rehearse(PYTHON, Late("mine", ("46", "0")), prompts("46", "48"))


def answered(asked: list[Prompt], answers: float, trivial: float) -> list[rehearsal.Trial]:
    texts = [(prompt.answer or "", answers) for prompt in asked] + [("0", trivial) for _ in asked]
    return [rehearsal.Trial("train.jsonl:1", text, value) for text, value in texts]


def test_answers_that_earn_no_more_than_a_trivial_one_are_doubted_with_the_setting_to_change() -> None:
    asked, boxed = prompts("46", "48"), AnswerScorer(kind="answer", name="answer", extract="boxed")
    doubted = "scorer 'answer' gives the rows' own answers no more than '0': "
    assert rehearsal.doubt(boxed, answered(asked, 0, 0), asked) == (
        rf"{doubted}completions need \boxed, which the prompts do not ask for: ask by data.user or data.system, or change "
        "extract or mode in its table of [[reward.scorers]]"
    )
    told = [dataclasses.replace(prompt, text=rf"{prompt.text} Answer in \boxed{{}}.") for prompt in asked]
    assert rehearsal.doubt(boxed, answered(told, 0, 0), told) == "", "completions will have boxes"
    others = [dataclasses.replace(prompt, scorers=("mine",)) for prompt in asked]
    assert rehearsal.doubt(boxed, answered(told, 0, 0), [*told, *others]) == "", "it scores no other row"
    assert rehearsal.doubt(boxed, answered(asked, 1, 0), asked) == ""
    assert rehearsal.doubt(boxed, answered(prompts("0"), 1, 1), asked) == "", "a trivial answer is right"
    assert rehearsal.doubt(PYTHON, answered(asked, 0.5, 0.5), asked) == (
        "scorer 'mine' gives the rows' own answers no more than '0': if it compares with them, change the form that it reads, "
        "or data.answer_field"
    )
    assert rehearsal.doubt(CodeScorer(kind="code", name="code"), answered(asked, 0, 0), asked) == ""


async def test_a_replica_that_comes_to_a_run_with_work_does_not_wait_for_rows(bus: Bus) -> None:
    await bus.append(ROLLOUTS, {"id": "1", "data": b""})
    assert await rehearsal.rows(bus, asyncio.Event()) == []
    await offer(bus, prompts("46"))
    assert await rehearsal.rows(bus, asyncio.Event()) == prompts("46")


async def test_the_service_refuses_a_function_that_fails_on_the_data_before_it_is_ready(
    bus: Bus, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_scorer.py").write_text('def score(sample, prompt):\n    return prompt.extra["limit"]\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    await offer(bus, prompts("46"))
    scorers = [{"kind": "python", "name": "mine", "function": "broken_scorer:score"}]
    settings = Settings.model_validate(
        {
            "run": {"id": bus.run_id, "folder": tmp_path},
            "bus": {"url": server.url},
            "reward": {"scorers": scorers},
        }
    )
    with pytest.raises(SettingsError, match=r"KeyError: 'limit' \(broken_scorer\.py:2\)"):
        await service.run(settings, "reward-0")
    names = {event.name: event.detail for _, event in await bus.newest(EVENTS, Event, 9)}
    assert "KeyError: 'limit' (broken_scorer.py:2)" in names["scorer 'mine' failed"]
    assert "failed on every row" in names["scorer refused"]


# ---------------------------------------------------------------- while training goes on


async def test_what_a_scorer_could_not_score_is_counted_with_its_cause_and_row_until_it_works_again() -> None:
    status, scorer = Status(), Tried("mine", ("bad",))
    scoring = Scoring([scorer], Expression("", ["mine"]), status)
    for group_id in (3, 4):
        with pytest.raises(TemporaryError, match=r"KeyError: 'limit' \(mine\.py:4\) \(train\.jsonl:"):
            await scoring(builders.group(group_id, ("bad",)))
    failure = status.failures["scorer 'mine'"]
    assert (failure.problem, failure.failed, failure.in_a_row) == ("train.jsonl:5", 2, 2)
    await scoring(builders.group(5, ("46",)))
    assert (status.failures["scorer 'mine'"].failed, status.failures["scorer 'mine'"].in_a_row) == (2, 0)


async def test_a_row_that_can_never_be_scored_and_a_reward_that_is_no_number_are_told_too() -> None:
    status = Status()
    refusing = Scoring([Tried("mine", ("bad",), PermanentError("no answer"))], Expression("", ["mine"]), status)
    with pytest.raises(PermanentError):
        await refusing(builders.group(0, ("bad",)))
    dividing = Scoring([Tried("mine")], Expression("1 / (mine - mine)", ["mine"]), status)
    with pytest.raises(PermanentError):
        await dividing(builders.group(0, ("46",)))
    assert {part: failure.problem for part, failure in status.failures.items()} == {
        "scorer 'mine'": "train.jsonl:1",
        "reward.expression": "train.jsonl:1",
    }


async def test_a_scorer_that_hangs_is_named_before_its_timeout_and_no_more_once_it_answers() -> None:
    status = Status()
    failures = Failures(status)
    with failures.calling("scorer 'mine'", "train.jsonl:7", silent_s=0.0):
        failures.look()
        (failure,) = status.failures.values()
        assert (failure.problem, failure.failed, failure.in_a_row) == ("train.jsonl:7", 0, 1)
        assert failure.reason.startswith("no answer for 0 s")
    failures.succeeded("scorer 'mine'")
    assert status.failures == {}


async def test_a_scorer_that_is_as_slow_as_ever_is_not_said_to_hang() -> None:
    status = Status()
    failures = Failures(status)
    with failures.calling("judge", "train.jsonl:7"):
        failures.look()
    assert status.failures == {}


async def test_failures_travel_with_the_heartbeat(bus: Bus) -> None:
    status, stop = Status(), asyncio.Event()
    await Failures(status).failed("scorer 'mine'", "train.jsonl:7", "KeyError: 'limit'")
    beating = asyncio.create_task(Presence(bus, "reward", "reward-0", 5.0, status).run(stop))

    async def told() -> bool:
        return [beat.failures for beat in await heartbeats(bus)] == [tuple(status.failures.values())]

    await until(told)
    stop.set()
    await beating
    key = bus.keys.named("service:reward-1")
    old = {**json.loads(await raw(bus).get(bus.keys.named("service:reward-0"))), "replica": "reward-1"}
    del old["failures"]
    await raw(bus).execute_command("SET", key, json.dumps(old))
    await raw(bus).execute_command("SADD", bus.keys.named("services"), "reward-1")
    assert {beat.replica: len(beat.failures) for beat in await heartbeats(bus)} == {"reward-0": 1, "reward-1": 0}
