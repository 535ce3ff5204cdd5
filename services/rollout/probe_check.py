"""Compare a replica's logprobs of the trainer's probe with the trainer's own.

Number types and kernels cause some thousandths of a nat; above ``weights.probe_gap_nats``, importance ratios are wrong.
"""

import logging
import time
from collections.abc import Sequence

import numpy as np
from prometheus_client import Counter, Gauge

from services.rollout.engines.engine import Engine
from shared.bus.bus import Bus
from shared.bus.messages import Float32Array, PolicyRecord, Probe
from shared.bus.stores.replicas.heartbeats import PartFailure
from shared.process.telemetry import WEIGHTS_PROBE, Status, tell

log = logging.getLogger(__name__)

_LAST = 24
"""Last tokens of a long sequence, all beyond the window, which it exceeds by 32."""

PROBE_GAP = Gauge(
    "penstock_rollout_probe_gap_nats", "Mean absolute difference of trainer's and replica's logprobs of the last probe."
)
PROBE_GAP_MAX = Gauge(
    "penstock_rollout_probe_gap_max_nats", "Largest absolute difference of trainer's and replica's logprobs of a token."
)
PROBE_ALARMS = Counter("penstock_rollout_probe_alarms_total", "Probes whose mean gap was above weights.probe_gap_nats.")


class ProbeCheck:
    """Checks an engine with records' probes; a mean gap above ``limit_nats`` raises an alarm."""

    def __init__(self, bus: Bus, engine: Engine, status: Status, replica: str, limit_nats: float) -> None:
        self._bus = bus
        self._status = status
        self._engine = engine
        self._replica = replica
        self._limit_nats = limit_nats

    async def check(self, record: PolicyRecord) -> None:
        """Score ``record``'s probe, if any; the live weights must be the record's. Raises EngineDied."""
        if record.probe is None:
            return
        mean_nats, max_nats = await self._gaps(record.probe)
        PROBE_GAP.set(mean_nats)
        PROBE_GAP_MAX.set(max_nats)
        log.info("probe", extra={"version": record.version, "gap_nats": mean_nats, "gap_max_nats": max_nats})
        if mean_nats <= self._limit_nats:
            self._status.failures.pop(WEIGHTS_PROBE, None)
            return
        PROBE_ALARMS.inc()
        detail = (
            f"expected the trainer's logprobs of version {record.version} within {self._limit_nats} nats on average, found "
            f"a gap of {mean_nats:.4g} (largest {max_nats:.4g}): likely causes are weights that the engine did not load in "
            "full or loaded into the wrong place, another policy.model or policy.dtype than the trainer's, quantization, or "
            "an attention kernel of lower precision; weights.probe_gap_nats sets the limit"
        )
        log.warning("probe gap", extra={"detail": detail})
        in_a_row = 1 + (before.in_a_row if (before := self._status.failures.get(WEIGHTS_PROBE)) else 0)
        failure = PartFailure(WEIGHTS_PROBE, detail, f"version {record.version}", in_a_row, in_a_row, time.time())
        self._status.failures[WEIGHTS_PROBE] = failure
        await tell(self._bus, self._replica, "probe gap", detail, version=int(record.version), gap_nats=mean_nats)

    async def _gaps(self, probe: Probe) -> tuple[float, float]:
        gaps = [
            np.abs(await self._engine.logprobs(token_ids) - trainer_logprobs)
            for token_ids, trainer_logprobs in probe.sequences()
        ]
        return gap_of(gaps)


def gap_of(gaps: Sequence[Float32Array]) -> tuple[float, float]:
    """Return the mean and largest gap (nats) of ``gaps``, per token by sequence.

    The mean is the larger of the short sequences' and the longest one's, given only beyond a window.
    """
    known = [np.nan_to_num(gap, nan=np.inf) for gap in gaps]
    short = min(len(gap) for gap in known)
    parts = [[gap for gap in known if len(gap) == short], [gap[-_LAST:] for gap in known if len(gap) > short]]
    means = [float(np.concatenate(part).mean()) for part in parts if part]
    return max(means), float(np.concatenate(known).max())
