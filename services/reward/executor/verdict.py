"""From a wait status to an outcome. Pure. A program decides its exit status and what it reports; neither is believed beyond what
it can cost: the outcomes that a program could feign are all worth nothing, and ``sandbox_error`` it cannot feign."""

import dataclasses
import math
import signal

from services.reward.executor.inside.runner import OUT_OF_MEMORY
from services.reward.executor.protocol import Limits, Outcome

_SPENT = 0.5
"""Share of its CPU limit after which a kill that was not ours is the limit's: the kernel counts by ticks, rusage exactly, and on a
busy host they differ by a fifth."""
_DETAIL_BYTES = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """What the supervisor knows of a process that is gone."""

    status: int
    """Exit status; negative: the signal."""
    wall_s: float
    cpu_s: float
    peak_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramReport:
    """What came through the report pipe: ``started`` is ours, the rest is the program's word."""

    started: bool
    values: tuple[str, ...]
    """JSON text, not read here."""
    error: str


def read_report(data: bytes, calls: int) -> ProgramReport:
    """Return the report; reading ends at the first line that is none, and one value after the last of ``calls``.

    Values are not parsed, and no more lines are taken than can matter: a program must not be able to cost the supervisor, which
    serves all of them, more than it costs itself.
    """
    first, *rest = data.split(b"\n", calls + 2)
    started = first == b"ready"
    values: list[str] = []
    for line in rest if started else [first]:
        word, _, text = line.partition(b" ")
        if word == b"error":
            return ProgramReport(
                started, tuple(values), text.partition(b"\n")[0][:_DETAIL_BYTES].decode(errors="replace")
            )
        if word != b"value" or len(values) > calls:
            break
        values.append(text.decode(errors="replace"))
    return ProgramReport(started, tuple(values), "")


def judge(
    ended: Ended, report: ProgramReport, limits: Limits, calls: int, killed: tuple[Outcome, str] | None
) -> tuple[Outcome, str]:
    """Return the outcome and one line for people.

    Args:
        calls: how many calls were asked for.
        killed: why the supervisor killed it, where it did.
    """
    if not report.started:
        return Outcome.SANDBOX_ERROR, report.error or f"the program could not be started: {_how(ended.status)}"
    if killed is not None:
        return killed
    if ended.status == -signal.SIGSYS:
        return Outcome.FORBIDDEN, "killed by the kernel at a forbidden system call"
    spent = ended.cpu_s >= _SPENT * math.ceil(limits.cpu_s)
    if ended.status == -signal.SIGXCPU or (ended.status == -signal.SIGKILL and spent):
        return Outcome.TIMEOUT, f"used {ended.cpu_s:.1f} s of CPU, limit {limits.cpu_s:g} s"
    if ended.status == -signal.SIGKILL:
        return Outcome.SANDBOX_ERROR, "killed by the host, which may be out of memory"
    if ended.status == OUT_OF_MEMORY:
        return Outcome.MEMORY, f"limit {limits.memory_bytes} bytes"
    if ended.status != 0:
        return Outcome.RUNTIME_ERROR, report.error or _how(ended.status)
    if len(report.values) != calls:
        return Outcome.RUNTIME_ERROR, report.error or f"{len(report.values)} of {calls} calls returned"
    return Outcome.FINISHED, ""


def _how(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
