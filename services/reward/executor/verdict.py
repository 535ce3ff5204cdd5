"""Map a wait status to an outcome.

Programs control their exit status and report, but every outcome that they can forge is worth nothing, and
``sandbox_error`` cannot be forged.
"""

import dataclasses
import math
import signal

from penstock.services.reward.executor.inside.runner import OUT_OF_MEMORY
from penstock.shared.executor.protocol import Limits, Outcome

_SPENT = 0.5
"""A kill that was not ours counts as the CPU limit's above this share: the kernel counts ticks, rusage is exact, and on
a busy host they differ by a fifth.
"""
_DETAIL_BYTES = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    status: int
    """Exit status; negative: the signal."""
    wall_s: float
    cpu_s: float
    peak_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramReport:
    """Content of the report pipe; only ``started`` is trustworthy."""

    started: bool
    values: tuple[str, ...]
    error: str


def read_report(data: bytes, calls: int) -> ProgramReport:
    """Parse a report up to the first invalid line, and one value beyond ``calls``.

    Values stay unparsed and lines are limited, so that a program cannot burden the supervisor.
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


def outcome_of(
    ended: Ended, report: ProgramReport, limits: Limits, calls: int, killed: tuple[Outcome, str] | None
) -> tuple[Outcome, str]:
    """Return the outcome and one line for people. ``calls``: number of requested calls. ``killed``: why the supervisor
    killed it, if it did; what the host held up is its fault only if it had the CPU time of its limit.
    """
    if not report.started:
        return Outcome.SANDBOX_ERROR, report.error or f"the program could not be started: {_how(ended.status)}"
    if killed is not None and killed[0] is Outcome.SANDBOX_ERROR and ended.cpu_s >= limits.wall_s:
        return Outcome.TIMEOUT, killed[1]
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
