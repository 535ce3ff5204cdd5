"""The child's side of :mod:`pool`.

::

    standard input   a question per line, as JSON object
    standard output  {"ready": true}, or {"ready": false, "error": "…"} and the end; then one JSON object per question

A forked worker answers purely computational questions within ``cpu_s`` seconds of CPU time; if the kernel kills it,
the answer is {"overdue": true} and a new fork takes over. The parent kills a late child, and the kernel kills a child
of a dead parent. Libraries print to standard error and read nothing, so they cannot forge messages.
"""

import gc
import json
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, TextIO, TypeAlias

from penstock.shared.process.parent import confine, take_standard_streams

Answerer: TypeAlias = Callable[[dict[str, Any]], Mapping[str, object]]
_LONGEST_ERROR = 1_000


def serve(
    prepare: Callable[[], Answerer], parent: int, memory_bytes: int | None = None, *, computes: bool = False
) -> None:
    """Answer until standard input ends."""
    confine(parent, memory_bytes)
    questions, output = take_standard_streams()
    try:
        answer = prepare()
    except Exception as error:  # noqa: BLE001 (the edge of the process: whoever started it tells people)
        _write(output, {"ready": False, "error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]})
        return
    _write(output, {"ready": True})
    if not computes:
        _answer_all(questions, output, answer)
        return
    gc.freeze()
    while _worker_is_overdue(questions, output, answer):
        _write(output, {"overdue": True})


def _worker_is_overdue(questions: BinaryIO, output: TextIO, answer: Answerer) -> bool:
    """Answer in a fork; return whether it exceeded its CPU time."""
    template = os.getpid()
    pid = os.fork()
    if pid == 0:
        confine(template, None)
        _answer_all(questions, output, answer)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF


def _answer_all(questions: BinaryIO, output: TextIO, answer: Answerer) -> None:
    with os.fdopen(questions.fileno(), "rb", closefd=False) as lines:
        for line in lines:
            question = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, question.pop("cpu_s", 0.0))
            answered = answer(question)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            _write(output, answered)


def _write(output: TextIO, answer: Mapping[str, object]) -> None:
    print(json.dumps(answer), file=output, flush=True)
