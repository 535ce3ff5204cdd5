"""Score code by running it in the executor and comparing the results here (docs/rewards.md, "Code").

Complex comparisons, and (once per problem) the result-free parts of asserts, run in a clean interpreter. Tests run in
order up to the first failure (``credit = "all"``), or the first that exceeds its limits (``"share"``).
"""

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from enum import StrEnum

from prometheus_client import Counter, Histogram

from penstock.services.reward.scorers.code import program_results
from penstock.services.reward.scorers.code.program import NoProgram, last_block, program_of
from penstock.services.reward.scorers.code.suite import BadTests, read_tests
from penstock.services.reward.scorers.code.tests import COMPARING, AssertTest, ProgramTest, Test
from penstock.services.reward.scorers.scorer import unavailable, valued
from penstock.shared.bus.messages import Prompt, RolloutGroup, Sample, Score, ScoreStatus
from penstock.shared.errors import PermanentError, SettingsError, TemporaryError
from penstock.shared.executor.client import ExecutorClient
from penstock.shared.executor.protocol import MIB, Call, Execution, Job, Limits, Outcome
from penstock.shared.settings.rewards.scorers import CodeScorer
from penstock.shared.tasks import together

log = logging.getLogger(__name__)

TESTS = Counter(
    "penstock_reward_code_tests_total",
    "Tests of programs that were run, by verdict and by the tier that isolated them.",
    ["scorer", "outcome", "tier"],
)
PROGRAMS = Counter(
    "penstock_reward_code_programs_total",
    "Programs of samples: run, the same as another of the group, or missing.",
    ["scorer", "kind"],
)
TEST_SECONDS = Histogram(
    "penstock_reward_code_test_seconds",
    "Wall time that a program took for one test, waiting aside.",
    ["scorer"],
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
)
WAIT_S = 30.0
"""A restarted executor is back sooner."""
_ASK_AGAIN_S = 0.2
_GIVEN = 4096
_CLEAN_BYTES = 256 * MIB
_CLEAN_S = 5.0
"""Minimum memory and time of a clean interpreter."""
_COMPUTED = 0.5
"""Share of its time that a comparison that is too slow has computed; with less, the host held it up."""


class Verdict(StrEnum):
    PASSED = "passed"
    WRONG_ANSWER = "wrong_answer"
    RUNTIME_ERROR = "runtime_error"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    FORBIDDEN = "forbidden"


_STATUS = {
    Verdict.PASSED: ScoreStatus.OK,
    Verdict.WRONG_ANSWER: ScoreStatus.OK,
    Verdict.RUNTIME_ERROR: ScoreStatus.CRASHED,
    Verdict.TIMEOUT: ScoreStatus.TIMEOUT,
    Verdict.MEMORY: ScoreStatus.MEMORY,
    Verdict.OUTPUT_LIMIT: ScoreStatus.OUTPUT_LIMIT,
    Verdict.FORBIDDEN: ScoreStatus.FORBIDDEN,
}
_WITHIN_LIMITS = (Verdict.PASSED, Verdict.WRONG_ANSWER, Verdict.RUNTIME_ERROR)


@dataclasses.dataclass(frozen=True, slots=True)
class _Tested:
    verdict: Verdict
    detail: str
    tier: str


class CodeTester:
    def __init__(self, scorer: CodeScorer, address: str, secret: bytes = b"", wait_s: float = WAIT_S) -> None:
        if not address:
            raise SettingsError(
                f"scorer {scorer.name!r} needs the executor's address: start one (python -m "
                "penstock.services.reward.executor) and set reward.executor.address, or let `penstock up` do both"
            )
        self.name = scorer.name
        self._scorer = scorer
        self._wait_s = wait_s
        self._limits = Limits(
            wall_s=scorer.timeout_s,
            cpu_s=scorer.timeout_s,
            memory_bytes=scorer.memory_mib * MIB,
            output_bytes=scorer.output_kib * 1024,
        )
        self._client = ExecutorClient(address, secret=secret)
        self._away = False
        self._given: dict[tuple[str, ...], tuple[str, ...]] = {}
        """Values of asserts' result-free parts, as tagged JSON text by source."""

    async def start(self) -> None:
        """Do nothing; connects on demand."""

    async def close(self) -> None:
        """Disconnect, which kills our running jobs."""
        await self._client.close()

    async def score(self, group: RolloutGroup) -> list[Score]:
        """Raises PermanentError: the tests are missing or unreadable."""
        tests = self._tests(group.prompt)
        function = tests[0].function.rpartition(".")[2]
        programs = [self._program(sample, function) for sample in group.samples]
        different = list(dict.fromkeys(program for program in programs if isinstance(program, str)))
        self._count(programs, different)
        try:
            tests = await self._prepared(tests, group.prompt)
        except TemporaryError as error:
            return [unavailable(self.name, str(error)) if isinstance(program, str) else program for program in programs]
        values = await together(self._score(program, tests) for program in different)
        scores = dict(zip(different, values, strict=True))
        return [scores[program] if isinstance(program, str) else program for program in programs]

    def _tests(self, prompt: Prompt) -> tuple[Test, ...]:
        field = self._scorer.tests_field
        try:
            if field not in prompt.extra:
                raise BadTests(f"expected tests, found the columns {', '.join(sorted(prompt.extra)) or 'none'}")
            tests = read_tests(prompt.extra[field], prompt.extra.get("entry_point"))
            self._check_outputs(tests)
            self._check_profile(tests)
            if self._scorer.preset == "livecodebench":
                same = program_results.same_text_as_livecodebench
                tests = tuple(
                    dataclasses.replace(test, same=same) if isinstance(test, ProgramTest) else test for test in tests
                )
        except BadTests as error:
            raise self._refusal(prompt, error) from error
        return tests

    def _refusal(self, prompt: Prompt, error: BadTests) -> PermanentError:
        return PermanentError(
            f"scorer {self.name!r}, column {self._scorer.tests_field!r} of {prompt.problem}: {error}: change the data, or tests_field "
            "in [[reward.scorers]]"
        )

    def _check_profile(self, tests: Sequence[Test]) -> None:
        for test in tests:
            if isinstance(test, AssertTest) and test.split.uses_numpy and self._scorer.profile != "numpy":
                raise BadTests(
                    f'expected profile = "numpy" in [[reward.scorers]] for {test.split.source[:80]!r}, found stdlib'
                )

    async def _prepared(self, tests: tuple[Test, ...], prompt: Prompt) -> tuple[Test, ...]:
        """Evaluate the result-free parts of the asserts. Raises PermanentError or TemporaryError."""
        try:
            return tuple([await self._with_given(test) if isinstance(test, AssertTest) else test for test in tests])
        except BadTests as error:
            raise self._refusal(prompt, error) from error

    async def _with_given(self, test: AssertTest) -> AssertTest:
        sources = test.split.given
        if sources and sources not in self._given:
            execution = await self._run(self._clean_job("", *(Call("", expression=source) for source in sources)))
            if execution.outcome is Outcome.TIMEOUT:  # the host may be busy
                raise TemporaryError(f"{test.split.source[:120]!r} could not be evaluated: {execution.detail}")
            if execution.outcome is not Outcome.FINISHED or len(execution.values) != len(sources):
                raise BadTests(
                    f"expected an assert whose parts can be evaluated, found {test.split.source[:120]!r}: {execution.detail}"
                )
            while len(self._given) >= _GIVEN:
                del self._given[next(iter(self._given))]
            self._given[sources] = execution.values
        return dataclasses.replace(test, given=self._given[sources]) if sources else test

    def _clean_job(self, code: str, *calls: Call) -> Job:
        memory_bytes = max(self._limits.memory_bytes, _CLEAN_BYTES)
        seconds = max(self._scorer.timeout_s, _CLEAN_S)
        output_bytes = max(self._limits.output_bytes, MIB)
        limits = dataclasses.replace(
            self._limits, wall_s=seconds, cpu_s=seconds, memory_bytes=memory_bytes, output_bytes=output_bytes
        )
        return Job(code, self._scorer.profile, calls=calls, limits=limits)

    def _check_outputs(self, tests: Sequence[Test]) -> None:
        for test in tests:
            if isinstance(test, ProgramTest) and len(test.expected.encode()) > self._limits.output_bytes:
                raise BadTests(
                    f"expected outputs of at most {self._scorer.output_kib} KiB (output_kib), found one of "
                    f"{len(test.expected.encode())} bytes"
                )

    def _program(self, sample: Sample, function: str) -> str | Score:
        try:
            if self._scorer.preset == "livecodebench":
                return last_block(sample.text)
            return program_of(sample.text, needs_block=self._scorer.needs_block, function=function)
        except NoProgram as error:
            return valued(self.name, ScoreStatus.WRONG_FORMAT, 0.0, str(error))

    def _count(self, programs: Sequence[str | Score], different: Sequence[str]) -> None:
        extracted = sum(isinstance(program, str) for program in programs)
        PROGRAMS.labels(self.name, "run").inc(len(different))
        PROGRAMS.labels(self.name, "repeated").inc(extracted - len(different))
        PROGRAMS.labels(self.name, "missing").inc(len(programs) - extracted)

    async def _score(self, program: str, tests: Sequence[Test]) -> Score:
        done: list[_Tested] = []
        try:
            for test in tests:
                done.append(await self._test(program, test))
                if self._is_enough(done[-1].verdict):
                    break
        except TemporaryError as error:
            return unavailable(self.name, str(error))
        passed = sum(tested.verdict is Verdict.PASSED for tested in done)
        if passed == len(tests):
            return valued(self.name, ScoreStatus.OK, 1.0, f"{done[0].tier}: passed all of {passed}")
        place, failed = next((i, each) for i, each in enumerate(done, 1) if each.verdict is not Verdict.PASSED)
        value = passed / len(tests) if self._scorer.credit == "share" else 0.0
        told = f"{failed.tier}: test {place} of {len(tests)}: {failed.verdict.value}: {failed.detail}"
        return valued(self.name, _STATUS[failed.verdict], value, told)

    def _is_enough(self, verdict: Verdict) -> bool:
        return verdict is not Verdict.PASSED if self._scorer.credit == "all" else verdict not in _WITHIN_LIMITS

    async def _test(self, program: str, test: Test) -> _Tested:
        job = test.job(program, self._scorer.profile, self._limits)
        tested = await self._judge(test, await self._run(job), len(job.calls))
        TESTS.labels(self.name, tested.verdict.value, tested.tier).inc()
        return tested

    async def _judge(self, test: Test, execution: Execution, calls: int) -> _Tested:
        TEST_SECONDS.labels(self.name).observe(execution.wall_s)
        if execution.outcome is not Outcome.FINISHED:
            return _Tested(Verdict(execution.outcome.value), execution.detail, execution.tier)
        if len(execution.values) != calls:
            return _Tested(Verdict.RUNTIME_ERROR, "ended before its calls returned", execution.tier)
        problem = await self._problem(test, execution)
        if isinstance(problem, Call):
            return await self._compared(problem)
        return _Tested(Verdict.WRONG_ANSWER if problem else Verdict.PASSED, problem, execution.tier)

    async def _problem(self, test: Test, execution: Execution) -> str | Call:
        tolerance = self._scorer.tolerance
        if len(execution.stdout) > program_results.LONGEST:
            return await asyncio.to_thread(test.problem, execution, tolerance)
        return test.problem(execution, tolerance)

    async def _compared(self, call: Call) -> _Tested:
        """Compare in a clean interpreter. Raises TemporaryError: also if the host kept it from computing."""
        job = self._clean_job(COMPARING, call)
        compared = await self._run(job)
        if compared.outcome is Outcome.FINISHED and len(compared.values) == 1:
            problem = str(json.loads(compared.values[0]))
            return _Tested(Verdict.WRONG_ANSWER if problem else Verdict.PASSED, problem, compared.tier)
        told = f"the result cannot be compared: {compared.outcome.value}: {compared.detail}"
        if compared.outcome is Outcome.TIMEOUT and compared.cpu_s < _COMPUTED * job.limits.wall_s:
            TESTS.labels(self.name, Outcome.SANDBOX_ERROR.value, compared.tier).inc()
            raise TemporaryError(f"the host is at fault: {told}")
        is_limit = compared.outcome in (Outcome.TIMEOUT, Outcome.MEMORY)
        return _Tested(Verdict(compared.outcome.value) if is_limit else Verdict.WRONG_ANSWER, told, compared.tier)

    async def _run(self, job: Job) -> Execution:
        """Run ``job``. Raises TemporaryError.

        The first group to find the executor unavailable fails at once; later ones wait for it first.
        """
        until_s = time.monotonic() + (self._wait_s if self._away else 0.0)
        while True:
            try:
                execution = await self._client.run(job)
            except TemporaryError:
                self._away = True
                if time.monotonic() >= until_s:
                    raise
                await asyncio.sleep(_ASK_AGAIN_S)
                continue
            self._away = False
            if execution.outcome is Outcome.SANDBOX_ERROR:
                TESTS.labels(self.name, execution.outcome.value, execution.tier).inc()
                raise TemporaryError(f"the executor is at fault: {execution.detail}")
            return execution
