"""Batch figures that need no model, and the trainer's Prometheus metrics."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge, Histogram

from penstock.services.trainer.batch.staleness import are_long, trained_lags
from penstock.shared.bus.messages import Ended, Experience, FinishReason, PolicyVersion, Purpose, Sample
from penstock.shared.bus.transcripts import tally

_MOST_REPORTED = 64
"""Metrics of environments in a step."""
_UNNAMED = re.compile(r"[^\w./-]")
"""What trackers, or the bus, may not take in a name."""

STEP = Gauge("penstock_trainer_step", "Committed optimizer steps.")
VERSION = Gauge("penstock_trainer_policy_version", "Newest published policy version.")
SAMPLES = PrometheusCounter("penstock_trainer_samples_total", "Samples trained on.")
TOKENS = PrometheusCounter("penstock_trainer_tokens_total", "Generated tokens trained on.")
LEFT = PrometheusCounter("penstock_trainer_groups_untrained_total", "Groups dropped without training.", ["reason"])
for _reason in ("stale", "fenced", "too_long", "no_signal", "filtered", "nonfinite", "requeued", "buried"):
    LEFT.labels(_reason)  # export 0, so that the first increase shows
CHECKPOINTS_FAILED = PrometheusCounter(
    "penstock_trainer_checkpoint_failures_total", "Checkpoints that storage refused; the previous one is kept."
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
    "When the newest checkpoint in object storage became whole, in Unix time; 0: no checkpoint yet.",
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
    "masked_fraction": Gauge("penstock_trainer_masked_ratio", "Share of tokens that a correction masked."),
    "ess": Gauge("penstock_trainer_effective_sample_ratio", "Effective sample size of the tokens, as a share."),
    "ratio_max": Gauge("penstock_trainer_importance_ratio_max", "Largest ratio of policy to behavior of a token."),
    "reference_kl": Gauge("penstock_trainer_reference_kl_nats", "Mean KL of the policy to the reference per token."),
    "kl_coefficient": Gauge("penstock_trainer_kl_coefficient", "Coefficient of the KL penalty to the reference."),
    "updates": Gauge("penstock_trainer_updates", "Optimizer updates of the last step."),
    "expert_imbalance": Gauge(
        "penstock_trainer_expert_imbalance",
        "Tokens of the busiest expert by the mean, on average over layers, where ranks share experts.",
    ),
    "replayed_fraction": Gauge(
        "penstock_trainer_replayed_ratio",
        "Share of a step's tokens that went to the experts that a replica recorded, with trainer.router_replay.",
    ),
    "routed_live": Gauge(
        "penstock_trainer_routed_live_samples",
        "Samples of the last step, or turns of episodes, whose experts were not recorded or are lost, with trainer.router_replay.",
    ),
    "micro_batch_splits": Gauge(
        "penstock_trainer_micro_batch_splits",
        "Forward passes of the last step that did not fit into memory and were split in two.",
    ),
    "dropped_out_of_memory": Gauge(
        "penstock_trainer_out_of_memory_samples",
        "Samples of the last step skipped because they do not fit into memory alone.",
    ),
    "value_loss": Gauge("penstock_trainer_value_loss", "The critic's loss of the last step."),
    "explained_variance": Gauge("penstock_trainer_explained_variance", "Explained variance of the critic's returns."),
    "critic_grad_norm": Gauge("penstock_trainer_critic_grad_norm", "The critic's gradient norm before clipping."),
    "preference_accuracy": Gauge("penstock_trainer_preference_ratio", "Share of pairs that the policy orders right."),
    "preference_margin": Gauge("penstock_trainer_preference_margin", "Mean reward margin of the last step's pairs."),
    "grad_norm": Gauge("penstock_trainer_grad_norm", "Global gradient norm before clipping."),
    "learning_rate": Gauge("penstock_trainer_learning_rate", "Learning rate of the last step."),
    "too_long_samples": Gauge(
        "penstock_trainer_too_long_samples", "Samples of the last step's groups that fit no forward pass, not trained."
    ),
    "truncated_fraction": Gauge("penstock_trainer_truncated_ratio", "Share of samples cut at the length limit."),
    "demonstrations": Gauge(
        "penstock_trainer_demonstrations", "Demonstrations of the last step, trained beside samples of the policy."
    ),
    "zero_std_groups": Gauge("penstock_trainer_zero_std_groups", "Groups of the last step without reward spread."),
    "signal_fraction": Gauge(
        "penstock_trainer_signal_ratio",
        "Share of groups with reward spread, of those trained or dropped for lack of it.",
    ),
    "tokens_per_s": Gauge("penstock_trainer_tokens_per_second", "Generated tokens trained on per second."),
    "samples_per_s": Gauge("penstock_trainer_samples_per_second", "Samples trained on per second."),
    "memory_bytes": Gauge("penstock_trainer_memory_bytes", "Memory of rank 0: on the GPU at its peak, else resident."),
    "mfu": Gauge(
        "penstock_trainer_flops_utilisation_ratio", "Share of the GPU's peak that forward, backward and update used."
    ),
    "model_tflops_per_s": Gauge("penstock_trainer_model_tflops_per_second", "Model TFLOP/s of a rank in those phases."),
    "step_s": Gauge("penstock_trainer_step_seconds", "Seconds between the last two commits."),
}

GRAD_NORM_LIMIT = Gauge("penstock_trainer_grad_norm_limit", "Norm that gradients are scaled down to.")


@dataclasses.dataclass(frozen=True, slots=True)
class BatchFigures:
    metrics: dict[str, float]
    lag_counts: Counter[int]
    samples: int
    tokens: int


def batch_figures(
    batch: Sequence[Experience],
    step: int,
    steps_of_versions: Mapping[PolicyVersion, int],
    contexts: Sequence[int] = (),
    *,
    most_tokens: int,
) -> BatchFigures:
    """Return the figures of a batch trained after ``step`` steps; ``contexts`` as in its command.

    Samples of more than ``most_tokens``, with their prompts, were not trained for that.
    """
    samples = [sample for experience in batch for sample in experience.group.samples]
    contexts, first = contexts or (0,) * len(samples), 0
    lags: Counter[int] = Counter()
    for group in (experience.group for experience in batch):
        end = first + len(group.samples)
        lags.update(trained_lags(group, step, steps_of_versions, contexts[first:end]))
        first = end
    lengths = [sample.sampled_tokens for sample in samples]
    whole = [context for context, length in zip(contexts, lengths, strict=True) if context == length]
    long = sum(sum(are_long(experience.group, most_tokens)) for experience in batch)
    metrics = {
        **_reward_figures([each for each in batch if each.group.prompt.purpose is not Purpose.DEMONSTRATE]),
        "lag_mean": sum(lag * count for lag, count in lags.items()) / lags.total(),
        "lag_max": float(max(lags)),
        "stale_samples": float(len(whole) - long),
        "too_long_samples": float(long),
        "masked_tokens": float(sum(contexts) - sum(whole)),
        "unscored_samples": float(sum(e.group.prompt.sampling.samples - len(e.group.samples) for e in batch)),
        "response_tokens_mean": sum(lengths) / len(samples),
        "truncated_fraction": sum(s.finish_reason is FinishReason.LENGTH for s in samples) / len(samples),
        "generate_s_mean": float(np.mean([e.group.finished_at_s - e.group.started_at_s for e in batch])),
        "score_s_mean": float(np.mean([experience.score_s for experience in batch])),
        **_scorer_means(batch),
        **_episode_figures([sample for sample in samples if len(sample.segments)]),
        **_lenient_shares(batch),
    }
    return BatchFigures(metrics, lags, lags.total(), sum(lengths) - sum(contexts))


def mixed_figures(
    batch: Sequence[Experience],
    step: int,
    steps_of_versions: Mapping[PolicyVersion, int],
    contexts: Sequence[int] = (),
    *,
    most_tokens: int,
) -> BatchFigures:
    """Return :func:`batch_figures` of the groups that a policy generated; samples and tokens are of all."""
    drawn, shown, kept, first = [], [], list[int](), 0
    for experience in batch:
        end = first + len(experience.group.samples)
        if experience.group.prompt.purpose is Purpose.DEMONSTRATE:
            shown.append(experience)
        else:
            drawn.append(experience)
            kept += contexts[first:end]
        first = end
    figures = BatchFigures({}, Counter(), 0, 0)
    if drawn:
        figures = batch_figures(drawn, step, steps_of_versions, kept, most_tokens=most_tokens)
    samples = [sample for experience in shown for sample in experience.group.samples]
    return BatchFigures(
        {**figures.metrics, "demonstrations": float(len(shown))},
        figures.lag_counts,
        figures.samples + len(samples),
        figures.tokens + sum(sample.sampled_tokens for sample in samples),
    )


def _reward_figures(scored: Sequence[Experience]) -> dict[str, float]:
    if not scored:
        return {}
    rewards = np.concatenate([experience.rewards for experience in scored])
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_max": float(rewards.max()),
        "reward_min": float(rewards.min()),
        "zero_std_groups": float(sum(bool(np.ptp(experience.rewards) == 0.0) for experience in scored)),
    }


def signal_fraction(metrics: Mapping[str, float], groups: int) -> dict[str, float]:
    """Return the share with signal of a step's generated groups and of those that dynamic sampling dropped before it.

    ``groups`` of the step include its demonstrations, which have no rewards.

    >>> signal_fraction({"zero_std_groups": 2.0, "dropped_no_signal": 2.0, "demonstrations": 4.0}, 12)
    {'signal_fraction': 0.6}
    """
    if "zero_std_groups" not in metrics:
        return {}
    generated = groups - metrics.get("demonstrations", 0.0)
    return {"signal_fraction": (generated - metrics["zero_std_groups"]) / (generated + metrics["dropped_no_signal"])}


def _scorer_means(batch: Sequence[Experience]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for sample in (sample for experience in batch for sample in experience.scores):
        for score in sample.scores:
            if score.value is not None:
                values.setdefault(score.scorer, []).append(score.value)
            for part, value in score.parts.items():
                values.setdefault(f"{score.scorer}.{part}", []).append(value)
    return {f"scorer_mean_{name}": float(np.mean(scorer_values)) for name, scorer_values in sorted(values.items())}


def _episode_figures(episodes: Sequence[Sample]) -> dict[str, float]:
    if not episodes:
        return {}
    tallies, reported = [tally(episode) for episode in episodes], dict[str, list[float]]()
    for each in tallies:
        for name, value in each.metrics.items():
            reported.setdefault(_UNNAMED.sub("_", name), []).append(value)
    given = [len(episode.token_ids) - episode.sampled_tokens for episode in episodes]
    return {
        "episode_turns_mean": float(np.mean([episode.segments[:, 2].sum() for episode in episodes])),
        "episode_calls_mean": float(np.mean([each.calls for each in tallies])),
        "episode_given_tokens_mean": float(np.mean(given)),
        "episode_wait_s_mean": float(np.mean([each.waited_s for each in tallies])),
        **{
            f"ended_{end.value}": float(np.mean([episode.ended is end for episode in episodes])) for end in Ended if end
        },
        **{f"environment_mean_{name}": float(np.mean(reported[name])) for name in sorted(reported)[:_MOST_REPORTED]},
    }


def _lenient_shares(batch: Sequence[Experience]) -> dict[str, float]:
    scores = [score for experience in batch for sample in experience.scores for score in sample.scores]
    shares = {
        name: float(np.mean([bool(score.lenient) for score in scores if score.scorer == name]))
        for name in sorted({score.scorer for score in scores if score.lenient})
    }
    return {f"lenient_share_{name}": share for name, share in shares.items()}


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
