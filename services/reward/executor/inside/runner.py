"""Run one program inside a confined process, and report. The last thing that this process does.

::

    standard input, output     the program's own
    report (descriptor 3)      ready            once the process is confined, before the program's first line
                               value <JSON>     one a call that returned plain data
                               error <text>     why it ended, for people

The program shares this process and may write any of these lines itself, except the ``ready`` that is there before it. So a
value is only what the program claims to return; whether it is right is judged elsewhere. Likewise the exit statuses.
"""

import atexit
import builtins
import io
import json
import os
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from typing import Any, NoReturn

REPORT = 3
ERROR, OUT_OF_MEMORY = 1, 113
_DETAIL = 300
_SCALARS = frozenset((bool, int, float, str, type(None)))


class NotPlain(Exception):
    """A call returned what JSON cannot say exactly."""


def run(code: str, calls: Sequence[dict[str, Any]]) -> NoReturn:
    """Run the program, or its calls, and end the process."""
    os.write(REPORT, b"ready\n")
    _open_streams()
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # site's: programs end by them, and there is no site here
    status = 0
    try:
        if calls:
            _call(code, calls)
        else:
            exec(_compiled(code), _module("__main__"))
        threading._shutdown()  # type: ignore[attr-defined]  # wait for threads, as the interpreter does
    except BaseException as error:  # noqa: BLE001 (the edge of the process)
        status = _told(error)
    _leave(status)


def _open_streams() -> None:
    """New ones: those of the warm interpreter are closed."""
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8", errors="replace"
    )
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", errors="replace"
    )


def _compiled(code: str) -> types.CodeType:
    return compile(code, "program.py", "exec", dont_inherit=True)


def _module(name: str) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return vars(module)


def _call(code: str, calls: Sequence[dict[str, Any]]) -> None:
    names = _module("program")
    exec(_compiled(code), names)
    for call in calls:
        value = _resolved(names, call["function"])(*call["arguments"], **call["keywords"])
        text = json.dumps(_plain(value, call["function"]))
        _report(b"value " + text.encode())


def _resolved(names: dict[str, Any], dotted: str) -> Any:
    """Return a function, or a method of an object that is made for it (``Solution.add``)."""
    first, *rest = dotted.split(".")
    if first not in names:
        raise NameError(f"the program defines no {first!r}")
    found = names[first]
    for name in rest:
        found = getattr(found() if isinstance(found, type) else found, name)
    return found


def _plain(value: Any, where: str) -> Any:
    """Return ``value`` in the types that JSON has, exactly; a tuple as a list."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is list or kind is tuple:
        return [_plain(item, where) for item in value]
    if kind is dict:
        found = {_key(key, where): _plain(item, where) for key, item in value.items()}
        if len(found) == len(value):
            return found
    raise NotPlain(f"{where} returned {kind.__name__}, expected None, bool, int, float, str, list, tuple or dict")


def _key(key: Any, where: str) -> str:
    if type(key) is str:
        return key
    if type(key) not in _SCALARS:
        raise NotPlain(f"{where} returned a dict with a key of {type(key).__name__}, expected str or a number")
    return json.dumps(key)


def _told(error: BaseException) -> int:
    """Report why the program ended; return the exit status."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        _report_error(f"SystemExit: {error.code}")
        return ERROR
    if isinstance(error, MemoryError):
        del error
        _report_error("MemoryError")
        return OUT_OF_MEMORY
    try:
        _report_error(traceback.format_exception_only(type(error), error)[-1])
    except BaseException:  # noqa: BLE001 (its own __str__ may raise)
        _report_error(type(error).__name__)
    return ERROR


def _report_error(text: str) -> None:
    line = " ".join(text.split())[:_DETAIL]
    _report(b"error " + line.encode(errors="replace"))


def _report(line: bytes) -> None:
    data = memoryview(line + b"\n")
    while data:
        data = data[os.write(REPORT, data) :]


def _leave(status: int) -> NoReturn:
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 (standard output may be full, closed or replaced)
        status = status or _told(error)
    os._exit(status)
