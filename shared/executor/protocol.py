"""The executor's protocol.

::

    client                                                              executor
      {verb: run, id, code, profile, stdin, calls, limits}       ──▶
                                                               ◀──  {id, outcome, stdout, values, detail, …}    in any order
      {verb: cell, id, session, code, profile, limits}           ──▶
                                                               ◀──  {id, outcome, stdout, …}    after earlier cells of its session
      {verb: cancel, id}, {verb: leave, id: session}             ──▶                                            no answer
                                                               ◀──  {beat: true}    first, then every BEAT_S seconds

It carries no expected output: the client compares. Arguments and values are JSON text inside MessagePack, because JSON
integers are unbounded. A call's value is plain JSON: sequences and iterators become lists, subclasses their base, keys
text.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from penstock.shared.bus.messages import Json
from penstock.shared.errors import PeerError
from penstock.shared.peers.frames import Frame

MIB = 1 << 20
BEAT_S = 5.0
"""Seconds between two signs of life of an executor, however long its queue is."""
MAX_OUTPUT_BYTES = 10 * MIB
"""Output and values, tripled by UTF-8, fit into one frame."""


class Outcome(StrEnum):
    FINISHED = "finished"
    """Exited with status 0 after all calls returned."""
    RUNTIME_ERROR = "runtime_error"
    """Uncaught exception, syntax error, non-zero exit status, its own signal, or a value that is not plain."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    FORBIDDEN = "forbidden"
    """Killed by the kernel at a deadly system call."""
    SANDBOX_ERROR = "sandbox_error"
    """A fault of the executor or host; never a score."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    wall_s: float = 5.0
    cpu_s: float = 5.0
    """Rounded up to whole seconds."""
    memory_bytes: int = 512 * MIB
    """Address space beyond that of the warm interpreter."""
    output_bytes: int = MIB
    """Of standard output, and again of values."""
    file_bytes: int = 16 * MIB
    """Total size of files in its own /tmp."""
    files: int = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of the program's function; ``Solution.f`` means ``Solution().f``."""

    function: str
    arguments: tuple[Json, ...] = ()
    keywords: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    expression: str = ""
    """Python source to evaluate instead; the program must define ``function`` unless it is empty."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One execution: a program with input, or calls in a fresh interpreter after the program ran as a module."""

    code: str
    profile: str = "stdlib"
    stdin: str | None = ""
    calls: tuple[Call, ...] = ()
    """Evaluated in order up to the first failure; ``__name__`` is then not ``__main__``."""
    limits: Limits = Limits()


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """Code of a session, an interpreter that keeps names and files from one cell to the next."""

    session: int
    """Of this connection, with which it ends."""
    code: str
    profile: str = "stdlib"
    limits: Limits = Limits()
    """``wall_s`` and ``output_bytes`` are a cell's, the others the session's, as its first cell says."""


@dataclasses.dataclass(frozen=True, slots=True)
class Execution:
    outcome: Outcome
    stdout: str
    """UTF-8 with replacement characters, at most ``limits.output_bytes``."""
    values: tuple[str, ...]
    """JSON text per call, up to the first without plain data. The program can forge it."""
    detail: str
    """One line for people, which the program can forge."""
    exit_status: int | None
    """As the supervisor saw it; negative: signal; None: it never ran, or its session continues."""
    wall_s: float
    cpu_s: float
    peak_bytes: int
    tier: str


def job_frame(number: int, job: Job) -> Frame:
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
    return text.encode(errors="replace").decode()


def read_job(frame: Frame) -> Job:
    try:
        calls = tuple(_read_call(call) for call in json.loads(frame["calls"]))
        job = Job(frame["code"], frame["profile"], frame["stdin"], calls, Limits(**frame["limits"]))
        sound = isinstance(job.stdin, str | None) and _is_sound(job)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise PeerError(f"expected a job, found other content: {error!r}"[:300]) from error
    if not sound:
        raise PeerError(
            "expected a job's code and profile as text, finite limits above 0 and at most "
            f"{MAX_OUTPUT_BYTES} bytes of output, found other content"
        )
    return job


def _is_sound(asked: Job | Cell) -> bool:
    sound = isinstance(asked.code, str) and isinstance(asked.profile, str)
    sound = sound and all(value > 0 and math.isfinite(value) for value in dataclasses.astuple(asked.limits))
    return sound and asked.limits.output_bytes <= MAX_OUTPUT_BYTES


def cell_frame(number: int, cell: Cell) -> Frame:
    fields = dataclasses.asdict(cell)
    return {**fields, "verb": "cell", "id": number, "code": _text(cell.code)}


def read_cell(frame: Frame) -> Cell:
    try:
        cell = Cell(frame["session"], frame["code"], frame["profile"], Limits(**frame["limits"]))
        sound = isinstance(cell.session, int) and _is_sound(cell)
    except (KeyError, TypeError, ValueError) as error:
        raise PeerError(f"expected a cell, found other content: {error!r}"[:300]) from error
    if not sound:
        raise PeerError("expected a cell's code and profile as text, and finite limits above 0, found other content")
    return cell


def _read_call(call: dict[str, Any]) -> Call:
    return Call(call["function"], tuple(call["arguments"]), call["keywords"], str(call["expression"]))


def execution_frame(number: int, execution: Execution) -> Frame:
    fields = {field.name: getattr(execution, field.name) for field in dataclasses.fields(execution)}
    return fields | {"id": number, "outcome": execution.outcome.value, "values": list(execution.values)}


def read_execution(frame: Frame) -> Execution:
    """Fields of newer executors are ignored. Raises PeerError."""
    try:
        fields = {field.name: frame[field.name] for field in dataclasses.fields(Execution)}
        fields |= {"outcome": Outcome(fields["outcome"]), "values": tuple(map(str, fields["values"]))}
        return Execution(**fields)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise PeerError(f"expected what became of a program, found other content: {error!r}"[:300]) from error
