"""The kinds of tests: what runs in the sandbox, and the verdict, which is decided outside.

::

    test.job(program, …) ──▶ executor ──▶ Execution ──▶ test.problem(execution, tolerance) ──▶ "" or what is wrong
                                                                 └── or a call for a clean interpreter, which returns the same

``job`` contains no expected output.
"""

import ast
import contextlib
import dataclasses
import json
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.services.reward.executor.inside import comparison, plain_data
from penstock.services.reward.scorers.code import asserts, program_results
from penstock.services.reward.scorers.code.asserts import SplitAssert
from penstock.services.reward.scorers.code.program_results import Elsewhere
from penstock.shared.bus.messages import Json
from penstock.shared.executor.protocol import Call, Execution, Job, Limits

COMPARING = "from inside.comparison import holds, matches"
"""Program of a clean interpreter."""
_SOLUTION = re.compile(r"^class Solution\b", re.MULTILINE)
_SHOWN = 60
_WRONG = (ArithmeticError, LookupError, TypeError, ValueError, RecursionError, MemoryError)


class Test(Protocol):
    @property
    def function(self) -> str:
        """The function under test; empty: the whole program."""

    def job(self, program: str, profile: str, limits: Limits) -> Job:
        """Return the job to run."""

    def problem(self, execution: Execution, tolerance: float) -> str | Call:
        """Return "" for a correct execution, what is wrong, or the call of :data:`COMPARING` that returns it."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramTest:
    """Run a program with standard input and compare its standard output (:func:`program_results.same_text`)."""

    stdin: str
    expected: str
    same: Callable[[str, str, float], bool] = program_results.same_text
    function: str = ""

    def job(self, program: str, profile: str, limits: Limits) -> Job:
        return Job(program, profile, stdin=self.stdin, limits=limits)

    def problem(self, execution: Execution, tolerance: float) -> str:
        try:
            right = self.same(self.expected, execution.stdout, tolerance)
        except _WRONG as error:
            return f"the output cannot be compared ({type(error).__name__})"
        return "" if right else _differs(self.expected, execution.stdout)


@dataclasses.dataclass(frozen=True, slots=True)
class CallTest:
    """Call a function with JSON and compare its JSON result; tuples count as lists.

    ``function`` is a method of ``Solution`` if the program has that class and the dataset names none. ``wrapped``: an
    expected list of one element also stands for that element (APPS, TACO).
    """

    function: str
    arguments: tuple[Json, ...]
    expected: Json
    wrapped: bool = False

    def job(self, program: str, profile: str, limits: Limits) -> Job:
        is_method = "." not in self.function and _SOLUTION.search(program) is not None
        function = f"Solution.{self.function}" if is_method else self.function
        return Job(program, profile, calls=(Call(function, self.arguments),), limits=limits)

    def problem(self, execution: Execution, tolerance: float) -> str | Call:
        try:
            value = program_results.read(execution.values[0])
            right = any(comparison.equal(expected, value, tolerance) for expected in self._accepted)
        except Elsewhere:
            accepted: list[Json] = [json.dumps(plain_data.tagged(value, "the test")) for value in self._accepted]
            return Call("matches", (execution.values[0], accepted, tolerance))
        except _WRONG as error:
            return f"the result cannot be compared ({type(error).__name__})"
        return "" if right else _differs(self.expected, value)

    @property
    def _accepted(self) -> list[Json]:
        is_wrapped = self.wrapped and isinstance(self.expected, list) and len(self.expected) == 1
        return [self.expected, *self.expected] if is_wrapped and isinstance(self.expected, list) else [self.expected]


@dataclasses.dataclass(frozen=True, slots=True)
class AssertTest:
    split: SplitAssert
    given: tuple[str, ...] = ()
    """Precomputed values of ``given``, as tagged JSON text."""

    @property
    def function(self) -> str:
        return self.split.function

    def job(self, program: str, profile: str, limits: Limits) -> Job:
        calls = tuple(Call(self.split.function, expression=call) for call in self.split.calls)
        return Job(program, profile, calls=calls, limits=limits)

    def problem(self, execution: Execution, tolerance: float) -> str | Call:
        results = {asserts.call_name(place): text for place, text in enumerate(execution.values)}
        texts = results | {asserts.given_name(place): text for place, text in enumerate(self.given)}
        if self.split.is_equation and sum(map(len, texts.values())) <= program_results.LONGEST:
            with contextlib.suppress(Elsewhere):
                return self._unequal(texts, tolerance)
        return Call("holds", (ast.unparse(self.split.check), dict(texts), tolerance))

    def _unequal(self, texts: Mapping[str, str], tolerance: float) -> str:
        check = self.split.check
        assert isinstance(check, ast.Compare)
        try:
            names = {name: program_results.rebuilt(program_results.read(text)) for name, text in texts.items()}
            left, right = (
                names[side.id] if isinstance(side, ast.Name) else ast.literal_eval(side)
                for side in (check.left, *check.comparators)
            )
            are_equal = comparison.equal(left, right, tolerance)
        except _WRONG as error:
            return f"{self._shown} ended in {type(error).__name__}"
        return "" if are_equal else f"{self._shown} does not hold for {_short(list(names.values()))}"

    @property
    def _shown(self) -> str:
        check = ast.unparse(self.split.check)
        return check if len(check) <= _SHOWN else f"{check[:_SHOWN]}…"


def _differs(expected: Json, actual: Json) -> str:
    return f"expected {_short(expected)}, found {_short(actual)}"


def _short(value: object) -> str:
    """Return its beginning, in constant time."""
    try:
        text = json.dumps(value[: _SHOWN + 1]) if isinstance(value, str) else ascii(reprlib.repr(value))[1:-1]
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a number of more than 4,300 digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
