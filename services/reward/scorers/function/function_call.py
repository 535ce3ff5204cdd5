"""Call the user's function, sample by sample: the program of a scorer process.

::

    question   {"group": a RolloutGroup of one sample, MessagePack in base64}
    answer     {"status": "ok", "value": 0.5, "detail": ""}       value null: unknown
               {"error": "ZeroDivisionError: … (mine.py:7)"}      raised, or an invalid result

Async functions share one event loop, so that their clients stay usable.
"""

import asyncio
import base64
import inspect
import math
import numbers
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias, cast

from penstock.services.reward.scorers.scorer import Result
from penstock.services.reward.subprocess_pool import child
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Prompt, RolloutGroup, Sample, ScoreStatus

ENTRY_POINTS = "penstock.scorers"
_LONGEST_DETAIL = 1_000
_LONGEST_LINE = 140
"""Characters kept of an error's first line, to leave room for its location."""
_HERE = Path(__file__).resolve().parent
_LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))
Function: TypeAlias = Callable[[Sample, Prompt], "float | Result | Awaitable[float | Result]"]


def load(name: str) -> Function:
    """Return the function named by ``package.module:function`` or an entry point. Raises ValueError or its import's
    error.
    """
    target = load_object(name)
    if not callable(target):
        raise ValueError(f"{name} is no function but {type(target).__name__}")
    return cast(Function, target)


def load_object(name: str) -> Any:
    """Return what ``package.module:object`` or an entry point names. Raises ValueError or its import's error."""
    if ":" in name:
        return pkgutil.resolve_name(name)
    entries = tuple(metadata.entry_points(group=ENTRY_POINTS, name=name))
    if not entries:
        raise ValueError(f"no entry point {name!r} in the group {ENTRY_POINTS!r}")
    return entries[0].load()


def as_result(returned: object) -> Result:
    """Raises TypeError: neither a number nor a Result; ValueError: not finite."""
    if isinstance(returned, numbers.Real):
        returned = Result(float(returned))
    if not isinstance(returned, Result):
        raise TypeError(f"expected a number or a Result from the function, found {type(returned).__name__}")
    if returned.value is not None and not math.isfinite(returned.value):
        raise ValueError(f"expected a finite value from the function, found {returned.value}")
    return returned


def describe(error: BaseException, function: Function) -> str:
    """Return an error's type, first line, and place in the user's code.

    >>> describe(ZeroDivisionError("division by zero"), mine)    # doctest: +SKIP
    'ZeroDivisionError: division by zero (mine.py:7)'
    """
    line = (str(error).strip().splitlines() or [""])[0][:_LONGEST_LINE]
    said = f"{type(error).__name__}: {line}" if line else type(error).__name__
    place = _place(error) or _definition(function)
    return f"{said} ({place})" if place else said


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not Path(frame.filename).resolve().is_relative_to(_HERE)]
    own = [frame for frame in theirs if not _is_library(frame.filename)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def _is_library(file: str) -> bool:
    return file.startswith("<") or any(Path(file).resolve().is_relative_to(folder) for folder in _LIBRARIES)


def _definition(function: Function) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else ""


def _prepare() -> child.Answerer:
    function = load(sys.argv[1])
    runner = asyncio.Runner()

    async def awaited(result: Awaitable[float | Result]) -> float | Result:
        return await result

    def answer(question: dict[str, Any]) -> dict[str, object]:
        group = wire.decode(base64.b64decode(question["group"]), RolloutGroup)
        try:
            returned = function(group.samples[0], group.prompt)
            result = as_result(runner.run(awaited(returned)) if inspect.isawaitable(returned) else returned)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the edge: whatever the user's function raises)
            return {"error": describe(error, function)}
        status = ScoreStatus.UNAVAILABLE if result.value is None else ScoreStatus(result.status)
        value = None if result.value is None else float(result.value)
        return {"status": status.value, "value": value, "detail": str(result.detail)[:_LONGEST_DETAIL]}

    return answer


if __name__ == "__main__":
    child.serve(_prepare, parent=int(sys.argv[2]))
