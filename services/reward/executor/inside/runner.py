"""Run one program in a confined process and report its end.

::

    standard input, output     the program's own
    report (descriptor 3)      ready            once confined, before the program's first line
                               value <JSON>     for each call that returned plain data
                               error <text>     why it ended, for people
                               done | raised | memory    after each cell of a session

A session's program reads cells instead, JSON texts of a line each, and reports ``done``, ``raised`` or ``memory`` after each.

The program can forge any line except the first ``ready``, and any exit status.
"""

import ast
import atexit
import builtins
import contextlib
import importlib
import io
import json
import linecache
import os
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from . import plain_data

REPORT = 3
ERROR, OUT_OF_MEMORY = 1, 113
_DETAIL = 300
_PRELUDE_MODULES = """
bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator random re statistics string sys textwrap time typing
""".split()  # noqa: SIM905
_PRELUDE_STARS = ("typing", "collections", "functools", "itertools", "heapq", "bisect", "math")


def prelude() -> dict[str, Any]:
    """Names that the datasets' own harnesses predefine."""
    modules = {name: importlib.import_module(name) for name in _PRELUDE_MODULES}
    names: dict[str, Any] = {"Decimal": modules["decimal"].Decimal, "Fraction": modules["fractions"].Fraction}
    for star in _PRELUDE_STARS:
        module = modules[star]
        names |= {name: getattr(module, name) for name in getattr(module, "__all__", dir(module)) if name[0] != "_"}
    names |= modules  # bisect is the module, not its function of that name
    if "numpy" in sys.modules:
        names |= {"np": sys.modules["numpy"], "numpy": sys.modules["numpy"]}
    return names


def add_prelude() -> None:
    known = vars(builtins)
    known.update({name: value for name, value in prelude().items() if name not in known})


def run(code: str, calls: Sequence[dict[str, Any]]) -> NoReturn:
    os.write(REPORT, b"ready\n")
    _open_streams()
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # defined by site, which is not imported here
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


def serve() -> NoReturn:
    """Run the cells that standard input has, as JSON texts of a line each, in one module, and show each one's last value."""
    cells, nothing = os.fdopen(os.dup(0), "rb"), os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.write(REPORT, b"ready\n")
    _open_streams()
    sys.stderr = sys.__stderr__ = sys.stdout  # type: ignore[assignment, misc]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    names = _module("__main__")
    for number, line in enumerate(cells, 1):
        _report(_run_cell(json.loads(line), f"cell {number}", names))
    os._exit(0)


def _run_cell(code: str, place: str, names: dict[str, Any]) -> bytes:
    linecache.cache[place] = (len(code), None, code.splitlines(keepends=True), place)
    try:
        _show_last(code, place, names)
        word = b"done"
    except SystemExit as error:
        _leave(0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else ERROR)
    except BaseException as error:  # noqa: BLE001 (its own, which the policy reads)
        word = b"memory" if isinstance(error, MemoryError) else b"raised"
        with contextlib.suppress(BaseException):  # its own __str__ may raise
            own = error.__traceback__
            while own is not None and own.tb_frame.f_code.co_filename != place:
                own = own.tb_next
            traceback.print_exception(type(error), error, own, file=sys.stdout)
    with contextlib.suppress(BaseException):  # it may have closed or replaced it
        sys.stdout.flush()
    return word


def _show_last(code: str, place: str, names: dict[str, Any]) -> None:
    tree = ast.parse(code, place)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, place, "exec", dont_inherit=True), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), place, "eval", dont_inherit=True), names)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")


def _open_streams() -> None:
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
        text = json.dumps(_evaluated(names, call) if call["expression"] else _called(names, call))
        _report(b"value " + text.encode())


def _called(names: dict[str, Any], call: dict[str, Any]) -> Any:
    value = _resolved(names, call["function"])(*call["arguments"], **call["keywords"])
    return plain_data.as_json(value, call["function"])


def _evaluated(names: dict[str, Any], call: dict[str, Any]) -> Any:
    """Return an expression's tagged value; a named function must be the program's own."""
    if call["function"]:
        _defined(names, call["function"].partition(".")[0])
    expression = compile(call["expression"], "test.py", "eval", dont_inherit=True)
    return plain_data.tagged(eval(expression, names), call["function"] or "the expression")


def _resolved(names: dict[str, Any], dotted: str) -> Any:
    first, *rest = dotted.split(".")
    target = _defined(names, first)
    for name in rest:
        target = getattr(target() if isinstance(target, type) else target, name)
    return target


def _defined(names: dict[str, Any], name: str) -> Any:
    if name not in names:
        raise NameError(f"the program defines no {name!r}")
    return names[name]


def _told(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (
                (error.code & 0xFF or ERROR) if error.code else 0
            )  # 256 is a failure, although the kernel keeps 8 bits
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
