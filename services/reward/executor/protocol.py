"""What the executor is asked and what it answers. Pure: no I/O, no clock.

::

    client                                                              executor
      {verb: run, id, code, profile, stdin, calls, limits}       ──▶
                                                               ◀──  {id, outcome, stdout, values, detail, …}    in any order
      {verb: cancel, id}                                         ──▶                                            no answer

Nothing here is a score. The expected output of a program never comes here: who asks compares, on plain data.

Arguments and values travel as JSON text inside the MessagePack frame, because JSON's integers have no width. A value stays text
until it is compared, as the program decides how large it is. Of a call it is plain JSON: a tuple, deque, range or iterator comes out
as a list, a subclass as what it is a subclass of, and a key of a dict that is a number, a bool or ``None`` as JSON writes it
(``{1: "a"}`` as ``{"1": "a"}``). Of an expression it is tagged (``inside/plain_data.py``). Anything else fails where it is made, inside.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from shared.bus.messages import Json
from shared.errors import PeerError
from shared.peers.frames import Frame

MIB = 1 << 20
MAX_OUTPUT_BYTES = 10 * MIB
"""Largest ``Limits.output_bytes``: output and values, each byte of which may become three in UTF-8, fit into one frame."""


class Outcome(StrEnum):
    """What happened to one execution."""

    FINISHED = "finished"
    """It exited by itself with status 0, all of its calls returned."""
    RUNTIME_ERROR = "runtime_error"
    """An exception that nobody caught, a syntax error, an exit status but 0, its own signal, a value that is not plain."""
    TIMEOUT = "timeout"
    """Its wall or CPU deadline."""
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    FORBIDDEN = "forbidden"
    """The kernel killed it at a system call that no honest program makes. A call that is refused and survived is not this."""
    SANDBOX_ERROR = "sandbox_error"
    """Our fault or the host's. Never a score."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What one execution may take."""

    wall_s: float = 5.0
    cpu_s: float = 5.0
    """Rounded up to whole seconds: the kernel counts in them."""
    memory_bytes: int = 512 * MIB
    """Address space beyond that of the warm interpreter."""
    output_bytes: int = MIB
    """Of standard output, and again of its values."""
    file_bytes: int = 16 * MIB
    """All that it may write to its own /tmp, where the tier gives it one."""
    files: int = 64
    """How many files and folders it may make there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of a function that the program defines; ``Solution().f`` by its dotted name ``Solution.f``."""

    function: str
    arguments: tuple[Json, ...] = ()
    keywords: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    expression: str = ""
    """Python source that is evaluated instead, among the program's names. The program must define ``function`` unless it is empty."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One execution: a program with its input, or calls in one fresh interpreter after the program ran as a module."""

    code: str
    profile: str = "stdlib"
    """``stdlib`` or ``numpy``."""
    stdin: str | None = ""
    calls: tuple[Call, ...] = ()
    """Evaluated in order, to the first that fails; then ``__name__`` is not ``__main__``."""
    limits: Limits = Limits()


@dataclasses.dataclass(frozen=True, slots=True)
class Execution:
    """What became of a job."""

    outcome: Outcome
    stdout: str
    """UTF-8 with replacement characters, at most ``limits.output_bytes``."""
    values: tuple[str, ...]
    """JSON text for each of its calls in order, up to the first that did not return plain data. The program may have written it itself."""
    detail: str
    """One line for people. The program can write what it likes here: show it, never read it."""
    exit_status: int | None
    """As the supervisor saw it; negative: the signal. None: it never ran."""
    wall_s: float
    cpu_s: float
    peak_bytes: int
    """Most resident memory, the warm interpreter's pages included."""
    tier: str
    """``namespace``, ``landlock`` or ``unsafe``."""


def job_frame(number: int, job: Job) -> Frame:
    """Return the frame that asks for ``job`` under ``number``."""
    return {
        "verb": "run",
        "id": number,
        "code": _text(job.code),
        "profile": job.profile,
        "stdin": _text(job.stdin or ""),
        "calls": json.dumps([dataclasses.asdict(call) for call in job.calls]),
        "limits": dataclasses.asdict(job.limits),
    }


def _text(text: str) -> str:
    """Return what UTF-8 can say of it: a model may write half a surrogate pair."""
    return text.encode(errors="replace").decode()


def read_job(frame: Frame) -> Job:
    """Return the job of a frame.

    Raises:
        PeerError: it holds none.
    """
    try:
        calls = tuple(_read_call(call) for call in json.loads(frame["calls"]))
        job = Job(frame["code"], frame["profile"], frame["stdin"], calls, Limits(**frame["limits"]))
        sound = isinstance(job.code, str) and isinstance(job.profile, str) and isinstance(job.stdin, str | None)
        sound = sound and all(value > 0 and math.isfinite(value) for value in dataclasses.astuple(job.limits))
        sound = sound and job.limits.output_bytes <= MAX_OUTPUT_BYTES
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise PeerError(f"expected a job, found other content: {error!r}"[:300]) from error
    if not sound:
        raise PeerError(
            "expected a job's code and profile as text, finite limits above 0 and at most "
            f"{MAX_OUTPUT_BYTES} bytes of output, found other content"
        )
    return job


def _read_call(call: dict[str, Any]) -> Call:
    return Call(call["function"], tuple(call["arguments"]), call["keywords"], str(call["expression"]))


def execution_frame(number: int, execution: Execution) -> Frame:
    """Return the frame that answers ``number``."""
    fields = {field.name: getattr(execution, field.name) for field in dataclasses.fields(execution)}
    return fields | {"id": number, "outcome": execution.outcome.value, "values": list(execution.values)}


def read_execution(frame: Frame) -> Execution:
    """Return the execution of a frame; fields that a newer executor adds are ignored.

    Raises:
        PeerError: it holds none.
    """
    try:
        fields = {field.name: frame[field.name] for field in dataclasses.fields(Execution)}
        fields |= {"outcome": Outcome(fields["outcome"]), "values": tuple(map(str, fields["values"]))}
        return Execution(**fields)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise PeerError(f"expected what became of a program, found other content: {error!r}"[:300]) from error
