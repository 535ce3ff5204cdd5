"""Compare a replica's logprobs of the trainer's probe with the trainer's own.

Number types and kernels cause a gap, whose size depends on model, number type and texts. The trainer therefore sends,
token by token, what rounding changes in its own logprobs (``Probe.noise``), and what its last step changed
(``Probe.change``). Weights are wrong if

====== =================================================================================================
gap    its mean exceeds the limit of the guard ``probe`` × the mean noise, or in a part of a sequence twice that
stale  the gap cancels more than half of the last step's change, beyond chance
====== =================================================================================================

Neither needs an earlier probe, so a replica that joins late, a restart and a rollback are judged like any other.
"""

import dataclasses
import itertools
import logging
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from prometheus_client import Counter, Gauge

from penstock.services.rollout.engines.engine import Engine
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Float32Array, PolicyRecord, Probe
from penstock.shared.bus.stores.replicas.heartbeats import PartFailure
from penstock.shared.process.telemetry import WEIGHTS_PROBE, Status, tell

log = logging.getLogger(__name__)

Float64Array = npt.NDArray[np.float64]

_FLOOR_NATS = 0.002
"""Importance ratios that are off by 0.2 % harm nothing, whatever causes it."""
_PART = 128
"""Tokens of a sequence that are also judged by themselves: a wrong window shows beyond it only, and each of several
engines scores some of the sequences."""
_STALE_SHARE, _STALE_DEVIATIONS = 0.5, 5.0
_CUT = 5.0
"""Times the mean noise."""

PROBE_GAP = Gauge(
    "penstock_rollout_probe_gap_nats", "Mean absolute difference of trainer's and replica's logprobs of the last probe."
)
PROBE_GAP_MAX = Gauge(
    "penstock_rollout_probe_gap_max_nats", "Largest absolute difference of trainer's and replica's logprobs of a token."
)
PROBE_LIMIT = Gauge(
    "penstock_rollout_probe_limit_nats",
    "Mean difference above which the last probe is an alarm (guards.limits.probe).",
)
PROBE_ALARMS = Counter("penstock_rollout_probe_alarms_total", "Probes that found wrong or stale weights.")


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of a probe, in nats."""

    gap: float
    largest: float
    limit: float
    """Of the mean gap."""
    worst_part: float
    """Largest mean gap of a part, over its limit."""
    missing: float
    """Share of the last step's change that the replica lacks; NaN: the change is too small to tell."""

    @property
    def figures(self) -> dict[str, float]:
        """The known ones, for logs and events."""
        figures = {
            "gap_nats": self.gap, "gap_max_nats": self.largest, "limit_nats": self.limit, "worst_part": self.worst_part,
            "missing": self.missing,
        }  # fmt: skip
        return {name: value for name, value in figures.items() if np.isfinite(value)}

    @property
    def problem(self) -> str:
        """What is wrong, or ""."""
        if self.missing > _STALE_SHARE:
            return f"the replica's logprobs lack {self.missing:.0%} of what the last step changed"
        if self.gap > self.limit:
            return f"expected the trainer's logprobs within {self.limit:.2g} nats on average, found a gap of {self.gap:.2g}"
        if self.worst_part > 1:
            return f"expected the trainer's logprobs in every part of the texts, found one {self.worst_part:.1f} times beyond its limit"
        return ""


class ProbeCheck:
    """Checks an engine with records' probes; see :func:`judge`."""

    def __init__(self, bus: Bus, engine: Engine, status: Status, replica: str, margin: float) -> None:
        self._bus = bus
        self._status = status
        self._engine = engine
        self._replica = replica
        self._margin = margin

    async def check(self, record: PolicyRecord) -> None:
        """Score ``record``'s probe, if any; the live weights must be the record's. Raises EngineDied."""
        if record.probe is None:
            return
        scored = [await self._engine.logprobs(token_ids) for token_ids, _ in record.probe.sequences()]
        finding = judge(scored, record.probe, self._margin)
        PROBE_GAP.set(finding.gap)
        PROBE_GAP_MAX.set(finding.largest)
        PROBE_LIMIT.set(finding.limit)
        log.info("probe", extra={"version": record.version, **finding.figures})
        if finding.problem:
            await self._alarm(record, finding)
        else:
            self._status.failures.pop(WEIGHTS_PROBE, None)

    async def _alarm(self, record: PolicyRecord, finding: Finding) -> None:
        PROBE_ALARMS.inc()
        detail = (
            f"version {record.version}: {finding.problem}: likely causes are weights that the engine did not load in full or loaded "
            "into the wrong place, another policy.model or policy.dtype than the trainer's, quantization (rollout.vllm), or "
            "an attention kernel of lower precision; guards.limits.probe sets the limit, as a multiple of what rounding "
            "changes in the trainer's own logprobs"
        )
        log.warning("probe gap", extra={"detail": detail})
        in_a_row = 1 + (before.in_a_row if (before := self._status.failures.get(WEIGHTS_PROBE)) else 0)
        failure = PartFailure(WEIGHTS_PROBE, detail, f"version {record.version}", in_a_row, in_a_row, time.time())
        self._status.failures[WEIGHTS_PROBE] = failure
        await tell(self._bus, self._replica, "probe gap", detail, version=int(record.version), **finding.figures)


def judge(scored: Sequence[Float32Array], probe: Probe, margin: float) -> Finding:
    """Compare a replica's logprobs of ``probe``'s sequences with the trainer's."""
    gap_N = np.nan_to_num(np.concatenate(scored) - probe.logprobs, nan=np.inf).astype(np.float64)
    apart_N, noise_N = np.abs(gap_N), np.abs(probe.noise.astype(np.float64))
    noise = float(noise_N.mean())
    limit = max(_FLOOR_NATS, margin * noise)
    worst = 0.0
    for start, end in _parts(probe):
        of_part = 2 * max(limit, margin * float(noise_N[start:end].mean()))
        worst = max(worst, float(apart_N[start:end].mean()) / of_part)
    return Finding(float(apart_N.mean()), float(apart_N.max()), limit, worst, _missing(gap_N, probe))


def _parts(probe: Probe) -> list[tuple[int, int]]:
    """Return (start, end) of the parts, among the logprobs: of about equal length within a sequence."""
    parts, start = [], 0
    for length in probe.lengths.tolist():
        count = max(1, (length - 1) // _PART)
        ends = [start + (length - 1) * place // count for place in range(count + 1)]
        parts += [(a, b) for a, b in itertools.pairwise(ends) if b > a]
        start = ends[-1]
    return parts


def _missing(gap_N: Float64Array, probe: Probe) -> float:
    """Return the share of the last step's change that the gap cancels; 0 if that may be chance, NaN if nothing can tell.

    The change is the difference of two rounded computations, whose rounding is as large as ``noise``, and independent of
    the gap's; what it adds to the sum of squares is subtracted. Numbers far beyond the noise are cut, so that no token
    decides alone: a mixture's routing may change there.
    """
    if not len(probe.change):
        return np.nan
    most = _CUT * float(np.abs(probe.noise).mean())
    gap_N, change_N, noise_N = (numbers.clip(-most, most) for numbers in (gap_N, probe.change, probe.noise))
    size = float(np.square(change_N).sum() - 2 * np.square(noise_N).sum())
    cancelled_N = -gap_N * change_N
    total, deviation = float(cancelled_N.sum()), float(np.sqrt(np.square(cancelled_N).sum()))
    if size <= 0:
        return np.nan
    return total / size if total > _STALE_DEVIATIONS * deviation else 0.0
