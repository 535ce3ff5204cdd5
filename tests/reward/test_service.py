"""The reward service on a real Valkey."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import REGISTRY

from penstock.services.reward.scorers.scorer import Scorer, unavailable, valued
from penstock.services.reward.scoring import Scoring
from penstock.services.reward.service import make_scoring, work
from penstock.shared.backoff import Backoff
from penstock.shared.bus.bus import Bus, Delivery
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, Purpose, RolloutGroup, Score, ScoreStatus
from penstock.shared.bus.stores.replicas.cordon import Cordon
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.stores.replicas.run_secret import RunSecret
from penstock.shared.bus.streams import EVAL_RESULTS, EVAL_ROLLOUTS, EXPERIENCE, ROLLOUTS, Stream
from penstock.shared.bus.worker import Patience, Worker
from penstock.shared.errors import PermanentError, SettingsError, TemporaryError
from penstock.shared.expression import Expression
from penstock.shared.process.service import INVALID_SETTINGS, Context
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings
from tests.conftest import PATIENCE_S, Server, until
from tests.support import builders
from tests.support.raw_redis import raw

ROOT = Path(__file__).parents[2]


class Stub:
    def __init__(self, name: str, say: Callable[[RolloutGroup], list[Score]]) -> None:
        self.name = name
        self._say = say
        self.asked = 0

    async def start(self) -> None:
        pass

    async def score(self, group: RolloutGroup) -> list[Score]:
        self.asked += 1
        return self._say(group)

    async def close(self) -> None:
        pass


def always(name: str, value: float) -> Stub:
    return Stub(name, lambda group: [valued(name, ScoreStatus.OK, value) for _ in group.samples])


def down(name: str) -> Stub:
    return Stub(name, lambda group: [unavailable(name, "no answer from the judge") for _ in group.samples])


def scoring(*scorers: Scorer, expression: str = "", status: Status | None = None) -> Scoring:
    names = [scorer.name for scorer in scorers]
    return Scoring(scorers, Expression(expression, names), status or Status(), redo=Backoff(0.001, 0.001))


async def put(bus: Bus, group: RolloutGroup, stream: Stream = ROLLOUTS) -> None:
    await bus.append(stream, {"id": str(group.prompt.group_id), "data": wire.encode(group)})


async def take(bus: Bus, stream: Stream, count: int) -> list[Delivery[Experience]]:
    deliveries: list[Delivery[Experience]] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(deliveries) < count:
            deliveries += await bus.read(stream, Experience, "test", count, block_s=0.2)
    return deliveries


@contextlib.asynccontextmanager
async def working(bus: Bus, handler: Scoring, max_attempts: int = 5) -> AsyncIterator[None]:
    patience = Patience(claim_after_s=PATIENCE_S, max_attempts=max_attempts, retry_s=0.01, drain_s=5.0)
    last = functools.partial(handler, last=True)
    worker = Worker(bus, "reward-0", ROLLOUTS, RolloutGroup, EXPERIENCE, handler, 4, patience, last=last)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as running:
        running.create_task(worker.run(stop))
        yield
        stop.set()


async def test_every_sample_gets_every_scorers_word_and_one_reward() -> None:
    settings = Settings.model_validate(
        {
            "reward": {
                "expression": "0.75 * answer + 0.25 * format",
                "scorers": [
                    {"kind": "answer", "mode": "numeric", "extract": "last_number"},
                    {"kind": "format", "pattern": "[0-9]+"},
                ],
            }
        }
    )
    experience = await make_scoring(settings, Status())(builders.group(0, ("46", "= 46", "47", "none")))
    assert experience.rewards.tolist() == [1.0, 0.75, 0.25, 0.0]
    assert experience.rewards.dtype == np.float32
    assert [(score.scorer, score.status.value, score.value) for score in experience.scores[1].scores] == [
        ("answer", "ok", 1.0),
        ("format", "wrong_format", 0.0),
    ]
    assert experience.scores[3].scores[0].status is ScoreStatus.WRONG_FORMAT
    assert experience.score_s > 0


async def test_answers_are_scored_without_their_reasoning_and_forms_with_it() -> None:
    texts = (
        "<think>\nFirst, 12 plus 34.\n</think>\n<answer>\\boxed{46}</answer>",
        "<think>\nIs it \\boxed{46}?",
        "<think>\\boxed{46}, no</think>\n<answer>\\boxed{47}</answer>",
        "<think>\\boxed{47}, no</think>\n<answer>\\boxed{46}</answer>",
        "\\boxed{46}",
    )
    reward = {
        "scorers": [
            {"kind": "answer", "mode": "numeric", "extract": "boxed"},
            {"kind": "format", "tags": ["think", "answer"], "nothing_outside": True},
        ],
    }
    group = builders.group(0, texts)
    experience = await make_scoring(Settings.model_validate({"reward": reward}), Status())(group)
    values = [[score.value for score in scores.scores] for scores in experience.scores]
    assert values == [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.0]]
    assert experience.scores[1].scores[0].status is ScoreStatus.WRONG_FORMAT
    assert [sample.text for sample in experience.group.samples] == list(texts), "what is recorded is whole"
    unseparated = {"reward": {**reward, "reasoning": "none"}}
    experience = await make_scoring(Settings.model_validate(unseparated), Status())(group)
    assert [scores.scores[0].value for scores in experience.scores] == [1.0, 1.0, 0.0, 1.0, 1.0]


async def test_all_scorers_of_a_group_run_at_once() -> None:
    meeting = asyncio.Barrier(2)

    class Waiting(Stub):
        async def score(self, group: RolloutGroup) -> list[Score]:
            await meeting.wait()  # passes only if the other scorer is called concurrently
            return await super().score(group)

    first, second = (Waiting(name, lambda group: [valued("x", ScoreStatus.OK, 1.0)] * 2) for name in ("a", "b"))
    async with asyncio.timeout(PATIENCE_S):
        await scoring(first, second, expression="1")(builders.group(0))


async def test_a_group_that_a_scorer_cannot_judge_is_tried_again_and_then_buried_never_worth_nothing(bus: Bus) -> None:
    judge, status = down("judge"), Status(state="working")
    await put(bus, builders.group(3))
    async with working(bus, scoring(always("answer", 1.0), judge, status=status), max_attempts=3):
        await until(lambda: _length_is(bus, ROLLOUTS.dead, 1))
    assert judge.asked == 3
    assert await bus.length(EXPERIENCE) == 0
    assert await bus.length(ROLLOUTS) == 0
    ((_, fields),) = await raw(bus).xrange(bus.keys.of(ROLLOUTS.dead))
    assert b"scorer 'judge' unavailable: no answer from the judge" in fields[b"reason"]
    assert status.state == "degraded"
    assert status.last_error == "scorer 'judge': no answer from the judge"


async def test_a_scorer_that_comes_back_scores_the_sample_that_waited_and_the_service_is_whole_again(bus: Bus) -> None:
    status = Status(state="working")
    states: list[tuple[str, int]] = []

    def say(group: RolloutGroup) -> list[Score]:
        states.append((status.state, len(group.samples)))
        if len(states) == 1:
            return [valued("judge", ScoreStatus.OK, 1.0), unavailable("judge", "busy")]
        return [unavailable("judge", "busy") if len(states) == 2 else valued("judge", ScoreStatus.OK, 0.5)]

    await put(bus, builders.group(3))
    async with working(bus, scoring(Stub("judge", say), status=status)):
        (delivery,) = await take(bus, EXPERIENCE, 1)
    assert states == [("working", 2), ("degraded", 1), ("degraded", 1)]
    assert (status.state, status.last_error) == ("working", "")
    assert delivery.message().rewards.tolist() == [1.0, 0.5]


def refuses(*texts: str) -> Stub:
    """A judge that never has a score for some completions."""

    def say(group: RolloutGroup) -> list[Score]:
        return [
            unavailable("judge", "busy")
            if sample.text in texts
            else valued("judge", ScoreStatus.OK, float(sample.text))
            for sample in group.samples
        ]

    return Stub("judge", say)


async def test_a_sample_that_no_attempt_scores_is_left_out_of_its_group_and_not_generated_again(bus: Bus) -> None:
    judge = refuses("2")
    await put(bus, builders.group(3, ("1", "2", "3", "4")))
    async with working(bus, scoring(judge), max_attempts=3):
        (delivery,) = await take(bus, EXPERIENCE, 1)
    experience = delivery.message()
    assert [sample.text for sample in experience.group.samples] == ["1", "3", "4"]
    assert experience.rewards.tolist() == [1.0, 3.0, 4.0]
    assert experience.group.prompt.sampling.samples == 4
    assert judge.asked == 15, "in each of three attempts once for all, and four times for the one that is missing"
    assert (await bus.length(ROLLOUTS), await bus.length(ROLLOUTS.dead)) == (0, 0)


@pytest.mark.parametrize(("missing", "kept"), [("2", "345"), ("23", "")])
async def test_half_of_a_group_is_half_of_what_its_prompt_asks_for_whatever_was_lost_before(
    missing: str, kept: str
) -> None:
    group = builders.group(3, tuple("012345"))
    scored = scoring(refuses(*missing))(dataclasses.replace(group, samples=group.samples[2:]), last=True)
    if kept:
        assert "".join(sample.text for sample in (await scored).group.samples) == kept
    else:
        with pytest.raises(TemporaryError, match="scorer 'judge' unavailable: busy"):
            await scored


@pytest.mark.parametrize(
    ("missing", "last", "purpose", "kept"),
    [
        ("4", True, Purpose.TRAIN, ["1", "2", "3"]),
        ("34", True, Purpose.TRAIN, ["1", "2"]),
        ("234", True, Purpose.TRAIN, None),
        ("4", False, Purpose.TRAIN, None),
        ("4", True, Purpose.EVALUATE, None),
    ],
)
async def test_samples_are_left_out_only_of_training_groups_at_their_last_attempt_and_at_most_half(
    missing: str, last: bool, purpose: Purpose, kept: list[str] | None
) -> None:
    group = builders.group(3, ("1", "2", "3", "4"))
    group = dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, purpose=purpose))
    scored = scoring(refuses(*missing))(group, last=last)
    if kept is None:
        with pytest.raises(TemporaryError, match="scorer 'judge' unavailable: busy"):
            await scored
    else:
        assert [sample.text for sample in (await scored).group.samples] == kept


async def test_a_group_that_can_never_be_scored_is_buried_at_once_with_the_setting_to_change(bus: Bus) -> None:
    group = builders.group(3)
    await put(bus, dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, answer=None)))
    await put(bus, builders.group(4))
    async with working(bus, make_scoring(Settings(), Status())):
        (delivery,) = await take(bus, EXPERIENCE, 1)
        await until(lambda: _length_is(bus, ROLLOUTS.dead, 1))
    assert delivery.group_id == "4"
    ((_, fields),) = await raw(bus).xrange(bus.keys.of(ROLLOUTS.dead))
    assert fields[b"attempts"] == b"1"
    assert fields[b"reason"].endswith(b"it is empty: change data.answer_field")


async def test_a_reward_that_is_no_finite_number_buries_its_group() -> None:
    with pytest.raises(PermanentError, match="expected a finite reward"):
        await scoring(always("answer", 0.0), expression="1 / answer")(builders.group(0))


async def test_a_group_without_samples_can_never_be_scored() -> None:
    with pytest.raises(PermanentError, match="expected samples of train"):
        await scoring(always("answer", 0.0))(dataclasses.replace(builders.group(0), samples=()))


async def test_a_scorer_that_raises_does_not_break_off_the_others() -> None:
    def fail(group: RolloutGroup) -> list[Score]:
        raise TemporaryError("not now")

    other = always("answer", 1.0)
    with pytest.raises(TemporaryError, match="not now"):
        await scoring(Stub("judge", fail), other)(builders.group(0))
    assert other.asked == 1


async def test_rollouts_of_the_run_and_of_its_evaluations_end_each_where_they_belong(bus: Bus) -> None:
    settings = Settings.model_validate({"reward": {"scorers": [{"kind": "answer", "mode": "exact"}]}})
    held_out = builders.group(0, ("46",))
    held_out = dataclasses.replace(held_out, prompt=dataclasses.replace(held_out.prompt, purpose=Purpose.EVALUATE))
    for group_id in range(5):
        await put(bus, builders.group(group_id, ("46", "47")))
    await put(bus, held_out, EVAL_ROLLOUTS)
    context = Context(
        settings,
        "reward",
        "reward-0",
        bus,
        Status(),
        asyncio.Event(),
        Live(bus, settings),
        Cordon(bus, "reward-0", lambda: None),
        RunSecret(bus),
    )
    async with asyncio.TaskGroup() as running:
        running.create_task(work(context, make_scoring(settings, context.status)))
        trained = await take(bus, EXPERIENCE, 5)
        (evaluated,) = await take(bus, EVAL_RESULTS, 1)
        context.stop.set()
    assert sorted(delivery.group_id for delivery in trained) == ["0", "1", "2", "3", "4"]
    assert all(delivery.message().rewards.tolist() == [1.0, 0.0] for delivery in trained)
    assert evaluated.message().group.prompt.purpose is Purpose.EVALUATE
    assert context.status.values == {"groups_scored": 6.0, "samples_scored": 11.0}
    assert [await bus.length(stream) for stream in (ROLLOUTS, EVAL_ROLLOUTS)] == [0, 0]


def test_a_format_without_rules_is_a_sentence() -> None:
    with pytest.raises(SettingsError, match="scorer 'format' has no rule"):
        make_scoring(Settings.model_validate({"reward": {"scorers": [{"kind": "format"}]}}), Status())


def _start(config: Path, flags: Sequence[str] = ()) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "penstock.services.reward",
        "--config",
        str(config),
        "--replica",
        "reward-0",
        *flags,
    ]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def _wait(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=PATIENCE_S)[1]
    finally:
        process.kill()


async def test_the_service_scores_what_comes_and_stops_in_order(bus: Bus, server: Server, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f"[run]\nid = {json.dumps(bus.run_id)}\n[bus]\nurl = {json.dumps(server.url)}\n")
    await put(bus, builders.group(3, ("46", "x = 46", "x = 47")))
    process = _start(config)
    try:
        (delivery,) = await take(bus, EXPERIENCE, 1)
        await until(lambda: _beats_as(bus, "reward-0", "working"))
    finally:
        process.send_signal(signal.SIGTERM)
        output = await asyncio.to_thread(_wait, process)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    assert delivery.message().rewards.tolist() == [1.0, 1.0, 0.0]
    assert await heartbeats(bus) == []


async def test_a_bus_that_is_away_is_no_wrong_setting_which_would_end_the_run(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[run]\nid = "x"\n[bus]\nurl = "unix:///nonexistent.sock"\n[internal]\nstart_wait_s = 1.0\n')
    process = _start(config, [])
    output = await asyncio.to_thread(_wait, process)
    assert process.returncode == 2
    assert "penstock reward: the Redis or Valkey server did not answer within 1 s" in output


async def test_a_wrong_expression_stops_the_start_with_one_sentence_and_the_code_that_no_restart_changes(
    tmp_path: Path,
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[run]\nid = "x"\n[bus]\nurl = "unix:///nonexistent.sock"\n')
    process = _start(config, ["--reward.expression", "answer ** 2"])
    output = await asyncio.to_thread(_wait, process)
    assert process.returncode == INVALID_SETTINGS
    assert output.startswith(f"penstock reward: {config}: expected names of scorers, numbers, + - * /")
    assert output.endswith("change reward.expression (reward.expression is set by flag --reward.expression)\n")
    assert output.count("\n") == 1


def test_the_service_loads_neither_a_model_library_nor_a_web_framework() -> None:
    script = "import sys, penstock.services.reward.service; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "fastapi", "sympy", "math_verify", "deepspeed"}
    assert heavy.isdisjoint(loaded.stdout.split())


async def _beats_as(bus: Bus, replica: str, state: str) -> bool:
    return [(beat.service, beat.replica, beat.state) for beat in await heartbeats(bus)] == [("reward", replica, state)]


async def _length_is(bus: Bus, stream: Stream, length: int) -> bool:
    return await bus.length(stream) == length


async def test_only_the_scorers_that_a_problem_names_are_asked() -> None:
    answer, code = always("answer", 1.0), always("code", 0.25)
    handler = scoring(answer, code, expression="first(code, answer)")

    def naming(*names: str) -> RolloutGroup:
        group = builders.group(0)
        return dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, scorers=names))

    assert (await handler(naming())).rewards.tolist() == [0.25, 0.25]
    experience = await handler(naming("answer"))
    assert experience.rewards.tolist() == [1.0, 1.0]
    assert [score.scorer for score in experience.scores[0].scores] == ["answer"]
    assert (answer.asked, code.asked) == (2, 1)
    with pytest.raises(
        PermanentError, match=r"expected scorers of this run \(answer, code\) for train\.jsonl:1, found 'judge'"
    ):
        await handler(naming("answer", "judge"))


async def test_what_each_scorer_says_is_a_metric() -> None:
    def measured(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    # The registry is per process, so these names are unique to this test.
    await scoring(always("metric_half", 0.5), always("metric_whole", 1.0))(builders.group(0))
    assert measured("penstock_reward_samples_scored_total", scorer="metric_half", status="ok") == 2.0
    assert measured("penstock_reward_value_sum", scorer="metric_half") == 1.0
    assert measured("penstock_reward_value_sum", scorer="metric_whole") == 2.0
