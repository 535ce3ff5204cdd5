"""What a step measures, and the Prometheus metrics of the trainer. Sums over tokens are reduced over ranks."""

import contextlib
import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import psutil
import torch
import torch.distributed as dist
from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge, Histogram
from torch import Tensor

from services.trainer.staleness import lag_steps
from shared.messages import Experience, FinishReason, PolicyVersion

STEP = Gauge("penstock_trainer_step", "Committed optimizer steps.")
VERSION = Gauge("penstock_trainer_policy_version", "Newest published policy version.")
SAMPLES = PrometheusCounter("penstock_trainer_samples_total", "Samples trained on.")
TOKENS = PrometheusCounter("penstock_trainer_tokens_total", "Generated tokens trained on.")
LEFT = PrometheusCounter("penstock_trainer_groups_untrained_total", "Groups that left untrained.", ["reason"])
LAG = Histogram("penstock_trainer_lag_steps", "Lag of each sample when used.", buckets=(0, 1, 2, 3, 4, 6, 8, 16, 32))
PHASE = Histogram(
    "penstock_trainer_phase_seconds", "Seconds of each phase of a step.", ["phase"], buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
)  # fmt: skip
GAUGES = {
    "loss": Gauge("penstock_trainer_loss", "Policy loss of the last step."),
    "reward_mean": Gauge("penstock_trainer_reward_mean", "Mean reward of the last step's samples."),
    "reward_std": Gauge("penstock_trainer_reward_std", "Standard deviation of the last step's rewards."),
    "reward_max": Gauge("penstock_trainer_reward_max", "Largest reward of the last step."),
    "reward_min": Gauge("penstock_trainer_reward_min", "Smallest reward of the last step."),
    "kl_mean": Gauge("penstock_trainer_kl_mean_nats", "Mean k3 estimate of KL(behavior || policy) per token."),
    "kl_max": Gauge("penstock_trainer_kl_max_nats", "Largest k3 estimate of KL(behavior || policy) of a token."),
    "entropy": Gauge("penstock_trainer_entropy_nats", "Mean entropy of the policy per token."),
    "clip_fraction": Gauge("penstock_trainer_clip_ratio", "Share of tokens whose importance ratio was clipped."),
    "grad_norm": Gauge("penstock_trainer_grad_norm", "Global gradient norm before clipping."),
    "learning_rate": Gauge("penstock_trainer_learning_rate", "Learning rate of the last step."),
    "truncated_fraction": Gauge("penstock_trainer_truncated_ratio", "Share of samples cut at the length limit."),
    "zero_std_groups": Gauge("penstock_trainer_zero_std_groups", "Groups of the last step without reward spread."),
    "tokens_per_s": Gauge("penstock_trainer_tokens_per_second", "Generated tokens trained on per second."),
    "samples_per_s": Gauge("penstock_trainer_samples_per_second", "Samples trained on per second."),
    "memory_bytes": Gauge("penstock_trainer_memory_bytes", "Memory of rank 0: on the GPU at its peak, else resident."),
    "step_s": Gauge("penstock_trainer_step_seconds", "Seconds from the commit before to the last one."),
}


class Phases:
    """Seconds of a step by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the body's wall time to ``phase``."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started_s

    def take(self) -> dict[str, float]:
        """Return the seconds so far and start again."""
        seconds, self.seconds = self.seconds, defaultdict(float)
        return dict(seconds)


class TokenSums:
    """Sums over a step's trained tokens on this rank: loss, KL, entropy, clipped; and the largest KL."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._largest_kl = torch.zeros(1, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, kl_N: Tensor, entropy_N: Tensor, clipped_N: Tensor) -> None:
        """Add a micro-batch; ``loss`` is its part of the step's loss."""
        parts = (loss.detach(), kl_N.sum(), entropy_N.sum(), clipped_N.sum())
        self._sums += torch.stack([part.double() for part in parts])
        if kl_N.numel():
            self._largest_kl = torch.maximum(self._largest_kl, kl_N.max().double())

    def over_ranks(self, tokens: int) -> dict[str, float]:
        """Return the step's figures; every rank calls it."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._largest_kl, op=dist.ReduceOp.MAX)
        loss, kl, entropy, clipped = self._sums.tolist()
        return {
            "loss": loss,
            "kl_mean": kl / tokens,
            "kl_max": float(self._largest_kl),
            "entropy": entropy / tokens,
            "clip_fraction": clipped / tokens,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class BatchFigures:
    """What the batch itself tells: no model needed."""

    metrics: dict[str, float]
    lag_counts: Counter[int]
    samples: int
    tokens: int


def batch_figures(
    batch: Sequence[Experience], step: int, steps_of_versions: Mapping[PolicyVersion, int]
) -> BatchFigures:
    """Return the figures of a batch that is trained at ``step`` committed steps."""
    rewards = np.concatenate([experience.rewards for experience in batch])
    samples = [sample for experience in batch for sample in experience.group.samples]
    lags: Counter[int] = Counter()
    for experience in batch:
        lags[lag_steps(experience.group, step, steps_of_versions)] += len(experience.group.samples)
    tokens = sum(len(sample.token_ids) for sample in samples)
    metrics = {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_max": float(rewards.max()),
        "reward_min": float(rewards.min()),
        "lag_mean": sum(lag * count for lag, count in lags.items()) / len(samples),
        "lag_max": float(max(lags)),
        "response_tokens_mean": tokens / len(samples),
        "truncated_fraction": sum(s.finish_reason is FinishReason.LENGTH for s in samples) / len(samples),
        "zero_std_groups": float(sum(float(experience.rewards.std()) == 0.0 for experience in batch)),
        "generate_s_mean": float(np.mean([e.group.finished_at_s - e.group.started_at_s for e in batch])),
        "score_s_mean": float(np.mean([experience.score_s for experience in batch])),
    }
    return BatchFigures(metrics, lags, len(samples), tokens)


def memory_bytes(device: torch.device) -> float:
    """Return the peak of this rank's GPU memory since the last call, or its resident memory on CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return float(peak)
    return float(psutil.Process().memory_info().rss)


def export_metrics(step: int, version: int, figures: BatchFigures, metrics: Mapping[str, float]) -> None:
    """Set the Prometheus metrics of a committed step."""
    STEP.set(step)
    VERSION.set(version)
    SAMPLES.inc(figures.samples)
    TOKENS.inc(figures.tokens)
    for lag, count in figures.lag_counts.items():
        for _ in range(count):
            LAG.observe(lag)
    for name, gauge in GAUGES.items():
        if name in metrics:
            gauge.set(metrics[name])
    for name, value in metrics.items():
        if name.startswith("phase_"):
            PHASE.labels(name.removeprefix("phase_").removesuffix("_s")).observe(value)
