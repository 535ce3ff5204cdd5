"""The other end of :mod:`pool`: what a killable program does besides its own work.

::

    standard input   one JSON object a line: a question
    standard output  {"ready": true}, or {"ready": false, "error": "…"} and the end; then one JSON object for each question

Whoever started the program kills it when it is late, and the kernel kills it when whoever started it is gone. What the
program's libraries print goes to standard error, and what they read is empty, so that nothing can look like a question or
an answer. It knows no question.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from shared.process.parent import die_with

Answerer: TypeAlias = Callable[[dict[str, Any]], Mapping[str, object]]
_LONGEST_ERROR = 1_000


def serve(prepare: Callable[[], Answerer], parent: int, memory_bytes: int | None) -> None:
    """Answer until standard input ends.

    Args:
        prepare: loads what is slow to load and returns what answers a question.
        parent: the id of the process that started this one.
        memory_bytes: limit of the address space; None: no limit.
    """
    confine(parent, memory_bytes)
    questions = os.fdopen(os.dup(0), "rb")
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    _close_standard_streams()
    try:
        answer = prepare()
    except Exception as error:  # noqa: BLE001 (the edge of the process: whoever started it tells people)
        _write(output, {"ready": False, "error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]})
        return
    _write(output, {"ready": True})
    for line in questions:
        _write(output, answer(json.loads(line)))


def confine(parent: int, memory_bytes: int | None) -> None:
    """Die with the parent, leave Ctrl-C to it, and never take the machine's memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if not die_with(parent, signal.SIGKILL):
        sys.exit(0)


def _close_standard_streams() -> None:
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)


def _write(output: Any, answer: Mapping[str, object]) -> None:
    print(json.dumps(answer), file=output, flush=True)
