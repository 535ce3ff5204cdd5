"""Batch figures that need no model, and the trainer's Prometheus metrics."""

import contextlib
import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import psutil
import torch
from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge, Histogram

from services.trainer.batch.staleness import lag_steps
from shared.bus.messages import Experience, FinishReason, PolicyVersion
from shared.model.flops import peak_tflops

STEP = Gauge("penstock_trainer_step", "Committed optimizer steps.")
VERSION = Gauge("penstock_trainer_policy_version", "Newest published policy version.")
SAMPLES = PrometheusCounter("penstock_trainer_samples_total", "Samples trained on.")
TOKENS = PrometheusCounter("penstock_trainer_tokens_total", "Generated tokens trained on.")
LEFT = PrometheusCounter("penstock_trainer_groups_untrained_total", "Groups that left untrained.", ["reason"])
for _reason in ("stale", "fenced", "no_signal", "nonfinite", "requeued", "buried"):
    LEFT.labels(_reason)  # export 0, so that the first increase shows
CHECKPOINTS_FAILED = PrometheusCounter(
    "penstock_trainer_checkpoint_failures_total", "Checkpoints that storage refused; the one before stays."
)
STORE_BYTES = PrometheusCounter(
    "penstock_trainer_checkpoint_upload_bytes_total", "Bytes of checkpoints sent to object storage."
)
STORE_SECONDS = Histogram(
    "penstock_trainer_checkpoint_upload_seconds", "Seconds to copy a checkpoint to object storage, beside training.", buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
)  # fmt: skip
STORE_FAILURES = PrometheusCounter(
    "penstock_trainer_checkpoint_upload_failures_total",
    "Attempts to copy a checkpoint that object storage ended; each is made again.",
)
STORED_STEP = Gauge("penstock_trainer_stored_checkpoint_step", "Step of the newest checkpoint in object storage.")
STORED_AT = Gauge(
    "penstock_trainer_stored_checkpoint_timestamp_seconds",
    "When the newest checkpoint in object storage became whole, in Unix time; 0: none yet.",
)
UNSTORED = Gauge(
    "penstock_trainer_checkpoint_unstored_seconds",
    "For how long a checkpoint newer than those in object storage has waited to be whole there; 0: none does.",
)
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
    "clip_low_fraction": Gauge("penstock_trainer_clip_low_ratio", "Share of tokens clipped at the lower bound."),
    "clip_high_fraction": Gauge("penstock_trainer_clip_high_ratio", "Share of tokens clipped at the upper bound."),
    "masked_fraction": Gauge("penstock_trainer_masked_ratio", "Share of tokens that a correction took out."),
    "ess": Gauge("penstock_trainer_effective_sample_ratio", "Effective sample size of the tokens, as a share."),
    "ratio_max": Gauge("penstock_trainer_importance_ratio_max", "Largest ratio of policy to behavior of a token."),
    "reference_kl": Gauge("penstock_trainer_reference_kl_nats", "Mean KL of the policy to the reference per token."),
    "kl_coefficient": Gauge("penstock_trainer_kl_coefficient", "What a nat away from the reference costs."),
    "updates": Gauge("penstock_trainer_updates", "Optimizer updates of the last step."),
    "micro_batch_splits": Gauge(
        "penstock_trainer_micro_batch_splits", "Forward passes of the last step that did not fit and were cut in two."
    ),
    "dropped_out_of_memory": Gauge(
        "penstock_trainer_out_of_memory_samples", "Samples of the last step left out, as they do not fit alone."
    ),
    "value_loss": Gauge("penstock_trainer_value_loss", "The critic's loss of the last step."),
    "explained_variance": Gauge("penstock_trainer_explained_variance", "Share of returns that the critic foresaw."),
    "critic_grad_norm": Gauge("penstock_trainer_critic_grad_norm", "The critic's gradient norm before clipping."),
    "preference_accuracy": Gauge("penstock_trainer_preference_ratio", "Share of pairs that the policy orders right."),
    "preference_margin": Gauge("penstock_trainer_preference_margin", "Mean reward margin of the last step's pairs."),
    "grad_norm": Gauge("penstock_trainer_grad_norm", "Global gradient norm before clipping."),
    "learning_rate": Gauge("penstock_trainer_learning_rate", "Learning rate of the last step."),
    "truncated_fraction": Gauge("penstock_trainer_truncated_ratio", "Share of samples cut at the length limit."),
    "zero_std_groups": Gauge("penstock_trainer_zero_std_groups", "Groups of the last step without reward spread."),
    "tokens_per_s": Gauge("penstock_trainer_tokens_per_second", "Generated tokens trained on per second."),
    "samples_per_s": Gauge("penstock_trainer_samples_per_second", "Samples trained on per second."),
    "memory_bytes": Gauge("penstock_trainer_memory_bytes", "Memory of rank 0: on the GPU at its peak, else resident."),
    "mfu": Gauge(
        "penstock_trainer_flops_utilisation_ratio", "Share of the GPU's peak that forward, backward and update used."
    ),
    "model_tflops_per_s": Gauge("penstock_trainer_model_tflops_per_second", "Model TFLOP/s of a rank in those phases."),
    "step_s": Gauge("penstock_trainer_step_seconds", "Seconds from the commit before to the last one."),
}

GRAD_NORM_LIMIT = Gauge("penstock_trainer_grad_norm_limit", "Norm that gradients are scaled down to.")


class Phases:
    """Seconds and memory of a step by phase, on the training thread.

    Memory is a GPU's peak in the phase, else what is resident at its end.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._memory: dict[str, float] = {}
        self._device = device or torch.device("cpu")
        self._peak_bytes = 0.0

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the body's wall time to ``phase``, and its memory; phases do not nest."""
        self._note()
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started_s
            self._memory[phase] = max(self._memory.get(phase, 0.0), self._note())

    def _note(self) -> float:
        used_bytes = memory_bytes(self._device)
        self._peak_bytes = max(self._peak_bytes, used_bytes)
        return used_bytes

    def take(self) -> dict[str, float]:
        """Return the seconds so far and start again."""
        seconds, self.seconds = self.seconds, defaultdict(float)
        return dict(seconds)

    def take_memory(self) -> dict[str, float]:
        """Return bytes since the last call: ``memory_bytes``, and ``memory_<phase>_bytes``."""
        self._note()
        figures = {"memory_bytes": self._peak_bytes if self._device.type == "cuda" else memory_bytes(self._device)}
        figures |= {f"memory_{phase}_bytes": nbytes for phase, nbytes in self._memory.items()}
        self._memory, self._peak_bytes = {}, 0.0
        return figures


@dataclasses.dataclass(frozen=True, slots=True)
class BatchFigures:
    """Figures of a batch that need no model."""

    metrics: dict[str, float]
    lag_counts: Counter[int]
    samples: int
    tokens: int


def batch_figures(
    batch: Sequence[Experience], step: int, steps_of_versions: Mapping[PolicyVersion, int]
) -> BatchFigures:
    """Return the figures of a batch trained after ``step`` steps."""
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
        **_scorer_means(batch),
        **_lenient_shares(batch),
    }
    return BatchFigures(metrics, lags, len(samples), tokens)


def _scorer_means(batch: Sequence[Experience]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for sample in (sample for experience in batch for sample in experience.scores):
        for score in sample.scores:
            if score.value is not None:
                values.setdefault(score.scorer, []).append(score.value)
    return {f"scorer_mean_{name}": float(np.mean(scorer_values)) for name, scorer_values in sorted(values.items())}


def _lenient_shares(batch: Sequence[Experience]) -> dict[str, float]:
    scores = [score for experience in batch for sample in experience.scores for score in sample.scores]
    shares = {
        name: float(np.mean([bool(score.lenient) for score in scores if score.scorer == name]))
        for name in sorted({score.scorer for score in scores if score.lenient})
    }
    return {f"lenient_share_{name}": share for name, share in shares.items()}


def memory_bytes(device: torch.device) -> float:
    """Return this rank's peak GPU memory since the last call, or resident memory on CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return float(peak)
    return float(psutil.Process().memory_info().rss)


def utilisation(flops: float, seconds: float, peak_flops: float, device: torch.device) -> dict[str, float]:
    """Return a rank's speed, and its share of the device's peak (``peak_flops`` in TFLOP/s; 0: by device name) if
    known.

    ``flops`` are of forward and backward passes; ``seconds`` include the update.
    """
    reached = flops / max(seconds, 1e-9) / 1e12
    if not peak_flops and device.type == "cuda":
        peak_flops = peak_tflops(torch.cuda.get_device_name(device))
    figures = {"model_tflops_per_s": reached}
    return figures | ({"mfu": reached / peak_flops} if peak_flops else {})


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
