"""One test of a problem: what is run inside, and whether what came out is right, which is decided out here.

::

    test.job(program, …) ──▶ executor ──▶ Execution ──▶ test.problem(execution, tolerance) ──▶ "" or what is wrong

``job`` holds no expected output, by construction: it is made of inputs alone.
"""

import ast
import dataclasses
import json
import re
from typing import Protocol

from services.reward.code import asserts, plain
from services.reward.code.asserts import SplitAssert
from services.reward.code.evaluation import Evaluator
from services.reward.executor.protocol import Call, Execution, Job, Limits
from shared.messages import Json

_SOLUTION = re.compile(r"^class Solution\b", re.MULTILINE)
_SHOWN = 60


class Test(Protocol):
    """One test."""

    def job(self, program: str, profile: str, limits: Limits) -> Job:
        """Return what is to be run."""

    def problem(self, execution: Execution, tolerance: float) -> str:
        """Return what is wrong with an execution that finished; "" where it is right."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramTest:
    """A program reads standard input and writes standard output (:func:`plain.same_text`)."""

    stdin: str
    expected: str

    def job(self, program: str, profile: str, limits: Limits) -> Job:
        """Return what is to be run."""
        return Job(program, profile, stdin=self.stdin, limits=limits)

    def problem(self, execution: Execution, tolerance: float) -> str:
        """Return what is wrong."""
        right = plain.same_text(self.expected, execution.stdout, tolerance)
        return "" if right else _differs(self.expected, execution.stdout)


@dataclasses.dataclass(frozen=True, slots=True)
class CallTest:
    """A function is called with JSON and returns JSON; a tuple that it returns counts as the list that JSON makes of it.

    ``function`` is a method of ``Solution`` where the program has a class of that name and the dataset names no class.
    ``wrapped``: an expected list of one element stands for that element too, as APPS and TACO write results.
    """

    function: str
    arguments: tuple[Json, ...]
    expected: Json
    wrapped: bool = False

    def job(self, program: str, profile: str, limits: Limits) -> Job:
        """Return what is to be run."""
        is_method = "." not in self.function and _SOLUTION.search(program) is not None
        function = f"Solution.{self.function}" if is_method else self.function
        return Job(program, profile, calls=(Call(function, self.arguments),), limits=limits)

    def problem(self, execution: Execution, tolerance: float) -> str:
        """Return what is wrong."""
        (found,) = execution.values
        accepted = [self.expected]
        if self.wrapped and isinstance(self.expected, list) and len(self.expected) == 1:
            accepted += self.expected
        right = any(plain.equal(expected, found, tolerance) for expected in accepted)
        return "" if right else _differs(self.expected, found)


@dataclasses.dataclass(frozen=True, slots=True)
class AssertTest:
    """An assert, split: its calls run inside, its check does not."""

    split: SplitAssert

    def job(self, program: str, profile: str, limits: Limits) -> Job:
        """Return what is to be run."""
        calls = tuple(Call(f"penstock_{asserts.name(place)}") for place in range(len(self.split.calls)))
        return Job(f"{program}\n{self.split.inside}", profile, calls=calls, limits=limits)

    def problem(self, execution: Execution, tolerance: float) -> str:
        """Return what is wrong."""
        try:
            names = {asserts.name(place): plain.untagged(value) for place, value in enumerate(execution.values)}
            right = bool(Evaluator(names, tolerance)(self.split.check))
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError, MemoryError) as error:
            return f"{self._shown} ended in {type(error).__name__}"
        return "" if right else f"{self._shown} does not hold for {_short(list(names.values()))}"

    @property
    def _shown(self) -> str:
        check = ast.unparse(self.split.check)
        return check if len(check) <= _SHOWN else f"{check[:_SHOWN]}…"


def _differs(expected: Json, found: Json) -> str:
    return f"expected {_short(expected)}, found {_short(found)}"


def _short(value: object) -> str:
    try:
        text = json.dumps(value, default=repr, ensure_ascii=True)
    except (ValueError, TypeError, RecursionError):  # numbers of thousands of digits, data of thousands of levels
        text = f"a large {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
