"""The code scorer and a scripted executor over a real socket: requests, verdicts, and failures."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.services.reward.scorers.code.scorer import CodeTester
from penstock.services.reward.scorers.code.tests import COMPARING
from penstock.services.reward.service import make_scoring
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import RolloutGroup, ScoreStatus
from penstock.shared.bus.streams import EXPERIENCE, ROLLOUTS
from penstock.shared.bus.worker import Patience, Worker
from penstock.shared.errors import PeerError, PermanentError, SettingsError
from penstock.shared.executor.protocol import Execution, Job, Outcome, execution_frame, read_job
from penstock.shared.peers import frames
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings
from penstock.shared.settings.rewards.scorers import CodeScorer
from tests.conftest import PATIENCE_S, until
from tests.support import builders

SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5\n", "output": "9\n"}, {"input": "0 0\n", "output": "0\n"}]
Answer = Callable[[Job], Execution]


class ScriptedExecutor:
    """Answers each job on a Unix socket with a function; ``jobs`` are the received ones."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self.path, self.answer = path, answer
        self.jobs: list[Job] = []

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        writers: list[asyncio.StreamWriter] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            with contextlib.suppress(PeerError, ConnectionError):
                while True:
                    frame = await frames.receive_async(reader)
                    self.jobs.append(read_job(frame))
                    writer.write(frames.pack(execution_frame(frame["id"], self.answer(self.jobs[-1]))))

        server = await asyncio.start_unix_server(serve, self.path)
        try:
            yield
        finally:
            server.close()
            for writer in writers:
                writer.close()
            self.path.unlink(missing_ok=True)


@pytest.fixture
def executor(tmp_path: Path) -> ScriptedExecutor:
    return ScriptedExecutor(tmp_path / "executor.sock", lambda _: finished())


def finished(stdout: str = "", *values: Any) -> Execution:
    return Execution(Outcome.FINISHED, stdout, tuple(map(json.dumps, values)), "", 0, 0.01, 0.01, 1 << 20, "landlock")


def failed(outcome: Outcome, detail: str = "") -> Execution:
    return dataclasses.replace(finished("3\n"), outcome=outcome, detail=detail)


def sums_right_up_to(most: int) -> Answer:
    """Adds two numbers, but wrongly above ``most``."""

    def answer(job: Job) -> Execution:
        a, b = map(int, str(job.stdin).split())
        return finished(f"{a + b}\n" if a + b <= most else "no\n")

    return answer


def group(*texts: str, tests: Any = SUMS, field: str = "tests") -> RolloutGroup:
    made = builders.group(3, texts)
    return dataclasses.replace(made, prompt=dataclasses.replace(made.prompt, extra={field: tests}))


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def scorer(executor: ScriptedExecutor, wait_s: float = 0.0, **changes: Any) -> CodeTester:
    return CodeTester(CodeScorer(kind="code", **changes), executor.address, wait_s=wait_s)


@contextlib.asynccontextmanager
async def scoring(executor: ScriptedExecutor, **changes: Any) -> AsyncIterator[CodeTester]:
    tester = scorer(executor, **changes)
    try:
        async with executor.running():
            yield tester
    finally:
        await tester.close()


async def test_a_program_is_worth_1_where_all_tests_pass_and_runs_no_further_than_the_first_that_fails(
    executor: ScriptedExecutor,
) -> None:
    executor.answer = sums_right_up_to(9)
    async with scoring(executor) as tester:
        (score,) = await tester.score(group(fenced("…")))
        assert (score.status, score.value, score.detail) == (ScoreStatus.OK, 1.0, "landlock: passed all of 3")
        assert [job.stdin for job in executor.jobs] == ["1 2\n", "4 5\n", "0 0\n"]
        executor.answer = sums_right_up_to(3)
        (score,) = await tester.score(group(fenced("…")))
    assert (score.status, score.value) == (ScoreStatus.OK, 0.0)
    assert score.detail == r'landlock: test 2 of 3: wrong_answer: expected "9\n", found "no\n"'
    assert len(executor.jobs) == 3 + 2


async def test_shared_credit_is_the_share_of_tests_passed(executor: ScriptedExecutor) -> None:
    executor.answer = sums_right_up_to(3)
    async with scoring(executor, credit="share") as tester:
        (score,) = await tester.score(group(fenced("…")))
    assert score.value == pytest.approx(2 / 3)
    assert len(executor.jobs) == 3


async def test_what_is_over_its_limits_once_is_not_run_again_even_for_shared_credit(executor: ScriptedExecutor) -> None:
    def answer(job: Job) -> Execution:
        return failed(Outcome.TIMEOUT, "wall 5 s") if job.stdin == "4 5\n" else finished("3\n")

    executor.answer = answer
    async with scoring(executor, credit="share") as tester:
        (score,) = await tester.score(group(fenced("…")))
    assert score.status is ScoreStatus.TIMEOUT
    assert score.value == pytest.approx(1 / 3)
    assert score.detail == "landlock: test 2 of 3: timeout: wall 5 s"
    assert len(executor.jobs) == 2


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome.RUNTIME_ERROR, ScoreStatus.CRASHED),
        (Outcome.TIMEOUT, ScoreStatus.TIMEOUT),
        (Outcome.MEMORY, ScoreStatus.MEMORY),
        (Outcome.OUTPUT_LIMIT, ScoreStatus.OUTPUT_LIMIT),
        (Outcome.FORBIDDEN, ScoreStatus.FORBIDDEN),
    ],
)
async def test_an_execution_that_failed_is_worth_nothing_whatever_it_printed(
    executor: ScriptedExecutor, outcome: Outcome, status: ScoreStatus
) -> None:
    executor.answer = lambda _: failed(outcome, "why")
    async with scoring(executor) as tester:
        (score,) = await tester.score(group(fenced("…")))
    assert (score.status, score.value) == (status, 0.0)
    assert score.detail == f"landlock: test 1 of 3: {outcome.value}: why"


async def test_a_fault_of_the_executor_is_never_a_score(executor: ScriptedExecutor) -> None:
    executor.answer = lambda job: failed(Outcome.SANDBOX_ERROR, "no fork") if job.stdin == "4 5\n" else finished("3")
    async with scoring(executor) as tester:
        (score,) = await tester.score(group(fenced("…")))
    assert (score.status, score.value) == (ScoreStatus.UNAVAILABLE, None)
    assert score.detail == "the executor is at fault: no fork"


@pytest.mark.parametrize(
    ("cpu_s", "status", "value"), [(0.3, ScoreStatus.UNAVAILABLE, None), (4.9, ScoreStatus.TIMEOUT, 0.0)]
)
async def test_a_result_that_a_busy_host_did_not_compare_in_time_is_no_wrong_one(
    executor: ScriptedExecutor, cpu_s: float, status: ScoreStatus, value: float | None
) -> None:
    late = dataclasses.replace(failed(Outcome.TIMEOUT, "ran longer than 5 s"), cpu_s=cpu_s)
    numbers = list(range(10_000))
    executor.answer = lambda job: late if job.code == COMPARING else finished("", numbers)
    tests = [{"input": [], "output": numbers, "fn_name": "f"}]
    async with scoring(executor) as tester:
        (score,) = await tester.score(group(fenced("def f(): return list(range(10_000))"), tests=tests))
    assert (score.status, score.value) == (status, value)
    assert "the result cannot be compared: timeout: ran longer than 5 s" in score.detail


async def test_calls_that_did_not_all_return_are_no_results(executor: ScriptedExecutor) -> None:
    async with scoring(executor) as tester:
        (score,) = await tester.score(group(fenced("exit(0)"), tests=["assert f(1) == 2"]))
    assert (score.status, score.value) == (ScoreStatus.CRASHED, 0.0)


async def test_equal_programs_of_a_group_run_once_and_samples_without_a_program_not_at_all(
    executor: ScriptedExecutor,
) -> None:
    executor.answer = sums_right_up_to(9)
    async with scoring(executor) as tester:
        scores = await tester.score(group(fenced("a"), "nothing", f"Hm.\n{fenced('a')}\nSo.", fenced("b")))
    assert [score.value for score in scores] == [1.0, 0.0, 1.0, 1.0]
    assert scores[1].status is ScoreStatus.WRONG_FORMAT
    assert sorted(job.code for job in executor.jobs) == ["a\n"] * 3 + ["b\n"] * 3


async def test_a_job_holds_the_scorers_limits(executor: ScriptedExecutor) -> None:
    async with scoring(executor, timeout_s=2.5, memory_mib=64, output_kib=4, profile="numpy") as tester:
        await tester.score(group(fenced("…")))
    (job,) = executor.jobs
    assert (job.limits.wall_s, job.limits.cpu_s, job.limits.memory_bytes, job.limits.output_bytes, job.profile) == (
        2.5, 2.5, 64 << 20, 4096, "numpy",
    )  # fmt: skip


async def test_a_tolerance_goes_for_outputs_results_and_asserts(executor: ScriptedExecutor) -> None:
    executor.answer = lambda job: finished("0.3333333\n", *[0.3333333 for _ in job.calls])
    tests = [{"input": "", "output": "0.3333334"}, {"fn_name": "f", "input": [], "output": 0.3333334}]
    async with scoring(executor, tolerance=1e-6) as tester:
        (score,) = await tester.score(group(fenced("…"), tests=[*tests, "assert f() == 0.3333334"]))
    assert score.value == 1.0


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (group("x", field="checks"), "expected tests, found the columns checks"),
        (group("x", tests=["assert f(1"]), "asserts may be calls of one function of the program"),
        (group("x", tests=[{"input": "", "output": "x" * 5000}]), "expected outputs of at most 4 KiB"),
    ],
    ids=["column", "assert", "output"],
)
async def test_a_problem_whose_tests_cannot_be_used_is_refused_with_its_row_and_what_to_change(
    executor: ScriptedExecutor, made: RolloutGroup, sentence: str
) -> None:
    with pytest.raises(PermanentError, match=sentence) as caught:
        await scorer(executor, output_kib=4).score(made)
    assert str(caught.value).startswith("scorer 'code', column 'tests' of train.jsonl:4: ")
    assert str(caught.value).endswith("change the data, or tests_field in [[reward.scorers]]")


def test_without_an_address_the_scorer_refuses_to_start() -> None:
    settings = Settings.model_validate({"reward": {"scorers": [{"kind": "code"}]}})
    with pytest.raises(SettingsError, match=r"set reward\.executor\.address"):
        make_scoring(settings, Status())


async def test_an_executor_that_is_away_leaves_the_score_open_and_the_next_attempt_waits_for_it(
    executor: ScriptedExecutor,
) -> None:
    executor.answer = sums_right_up_to(9)
    tester = scorer(executor, wait_s=PATIENCE_S)
    (score,) = await tester.score(group(fenced("…")))
    assert (score.status, score.value) == (ScoreStatus.UNAVAILABLE, None)
    assert f"could not reach the code executor at {executor.address}: " in score.detail
    waiting = asyncio.create_task(tester.score(group(fenced("…"))))
    async with executor.running():
        (score,) = await asyncio.wait_for(waiting, PATIENCE_S)
    assert score.value == 1.0
    await tester.close()


async def test_while_the_executor_is_away_the_service_is_degraded_and_the_group_stays_on_the_bus(
    executor: ScriptedExecutor, bus: Bus
) -> None:
    executor.answer = sums_right_up_to(9)
    status = Status(state="working")
    settings = Settings.model_validate(
        {"reward": {"executor": {"address": executor.address}, "scorers": [{"kind": "code"}]}}
    )
    handler = make_scoring(settings, status)
    patience = Patience(claim_after_s=PATIENCE_S, max_attempts=3, retry_s=0.01, drain_s=5.0)
    worker = Worker(bus, "reward-0", ROLLOUTS, RolloutGroup, EXPERIENCE, handler, 4, patience)
    stop = asyncio.Event()
    await bus.append(ROLLOUTS, {"id": "3", "data": wire.encode(group(fenced("…")))})
    async with asyncio.TaskGroup() as running:
        running.create_task(worker.run(stop))
        await until(lambda: status.state == "degraded")
        assert status.last_error.startswith("scorer 'code': could not reach the code executor at unix:")
        assert (await bus.length(ROLLOUTS), await bus.length(EXPERIENCE)) == (1, 0)
        async with executor.running():
            await until(lambda: worker.counts.handed_over == 1)
            assert status.state == "working"
            stop.set()
    assert (await bus.length(ROLLOUTS), await bus.length(ROLLOUTS.dead), await bus.length(EXPERIENCE)) == (0, 0, 1)
    await handler.close()


async def test_an_executor_that_goes_away_in_mid_job_leaves_the_group_to_be_tried_again(
    executor: ScriptedExecutor,
) -> None:
    def leave(job: Job) -> Execution:
        raise ConnectionResetError("killed")

    executor.answer = leave
    async with scoring(executor) as tester:
        waiting = asyncio.create_task(tester.score(group(fenced("a"), fenced("b"))))
        await until(lambda: len(executor.jobs) >= 1)
    scores = await asyncio.wait_for(waiting, PATIENCE_S)
    assert [score.status for score in scores] == [ScoreStatus.UNAVAILABLE] * 2
