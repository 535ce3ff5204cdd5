"""Trainer dashboard: updates, off-policy measures and step costs."""

from deploy.dashboards.board import Board, Panel, Query, Row, quantiles, rate


def _gauge(title: str, description: str, unit: str, *metrics: tuple[str, str]) -> Panel:
    return Panel(
        title, description, unit, tuple(Query(f"penstock_trainer_{name}<>", legend) for name, legend in metrics)
    )


_UPDATE = Row(
    "The update",
    (
        _gauge("Loss", "The policy loss. With policy gradients it says little, but it should stay bounded.", "short", ("loss", "loss")),
        _gauge("Gradient norm", "Global norm before clipping (trainer.max_grad_norm). Spikes above many times its median are explosions.", "short", ("grad_norm", "policy"), ("grad_norm_limit", "clipped to")),
        _gauge("Learning rate", "Of the last step.", "short", ("learning_rate", "learning rate")),
        _gauge("Reward", "Mean, spread and extremes of the last step's rewards.", "short", ("reward_mean", "mean"), ("reward_std", "standard deviation"), ("reward_max", "max"), ("reward_min", "min")),
        _gauge("Groups without signal", "Groups of a step whose samples all had one reward: nothing is learned from them.", "short", ("zero_std_groups", "groups")),
        _gauge("Share of groups with signal", "Of the groups of a step and those that dynamic sampling dropped before it: what data.curriculum raises.", "percentunit", ("signal_ratio", "with signal")),
        _gauge("Cut samples", "Share of samples that reached the length limit.", "percentunit", ("truncated_ratio", "cut")),
    ),
)  # fmt: skip

_OFF_POLICY = Row(
    "How far off policy",
    (
        Panel("Lag", "Steps between a sample's oldest token and its use.", "suffix: steps", quantiles("penstock_trainer_lag_steps")),
        _gauge("KL to the behavior policy", "Mean over tokens, and the largest.", "suffix: nats", ("kl_mean_nats", "mean"), ("kl_max_nats", "max")),
        _gauge("Clipped tokens", "Share of tokens whose importance ratio was clipped, by side, or masked by a correction.", "percentunit", ("clip_low_ratio", "low"), ("clip_high_ratio", "high"), ("masked_ratio", "masked")),
        _gauge("Effective samples", "Effective sample size of the importance weights, as a share. 1 is on policy.", "percentunit", ("effective_sample_ratio", "ESS")),
        _gauge("Largest importance ratio", "Of policy to behavior, of any token.", "short", ("importance_ratio_max", "max")),
        Panel("Groups dropped without training", "By reason: stale (over max_lag), fenced (of a revoked version), no_signal, filtered, nonfinite, requeued, buried.", "ops",
              (rate("penstock_trainer_groups_untrained_total", "reason"),)),
        _gauge("KL to the reference", "Mean per token, where the algorithm has a reference.", "suffix: nats", ("reference_kl_nats", "reference")),
    ),
)  # fmt: skip

_COST = Row(
    "What a step costs",
    (
        _gauge("Time of a step", "From one commit to the next.", "s", ("step_seconds", "step")),
        Panel("Phases", "Median seconds of each phase of a step.", "s",
              (Query("histogram_quantile(0.5, sum by (le, phase) (rate(penstock_trainer_phase_seconds_bucket<>[$__rate_interval])))", "{{phase}}"),)),
        _gauge("Tokens per second", "Generated tokens trained on, as of the last step.", "short", ("tokens_per_second", "trained")),
        _gauge("Memory", "Of rank 0: the GPU's peak, else what is resident.", "bytes", ("memory_bytes", "rank 0")),
        _gauge("Utilisation", "Share of the GPU's peak FLOP/s that forward, backward and update reached; only on GPUs that are known.", "percentunit", ("flops_utilisation_ratio", "MFU")),
        _gauge("Model TFLOP/s", "What a rank reached in those phases.", "short", ("model_tflops_per_second", "TFLOP/s")),
        _gauge("Forward passes that were split", "Because they did not fit in memory; and samples skipped because they do not fit into memory alone.", "short", ("micro_batch_splits", "cut"), ("out_of_memory_samples", "left out")),
        _gauge("Imbalance of experts", "With trainer.expert_parallel: tokens of the busiest expert by the mean, on average over layers. Ranks wait for the busiest.", "short", ("expert_imbalance", "busiest / mean")),
        _gauge("Replayed routes", "With trainer.router_replay: share of a step's tokens that went to the experts that a replica recorded.", "percentunit", ("replayed_ratio", "replayed")),
        Panel("Checkpoints refused", "Checkpoints that storage refused, in an hour. The previous one is kept.", "short", (Query("increase(penstock_trainer_checkpoint_failures_total<>[1h])", "refused"),)),
        _gauge("Checkpoint that is not stored", "With object storage (trainer.store): for how long the newest checkpoint has waited to be whole there; 0: nothing waits.", "s", ("checkpoint_unstored_seconds", "waiting")),
        Panel("Sent to object storage", "Bytes of checkpoints per second, with trainer.store.", "Bps", (rate("penstock_trainer_checkpoint_upload_bytes_total"),)),
    ),
)  # fmt: skip

_OTHER = Row(
    "Critic and preferences",
    (
        _gauge("Critic", "Its loss, and the explained variance of returns; only with a critic.", "short", ("value_loss", "loss"), ("explained_variance", "explained variance")),
        _gauge("Preferences", "Share of pairs that the policy orders right, and their mean reward margin; only with DPO.", "short", ("preference_ratio", "right"), ("preference_margin", "margin")),
    ),
)  # fmt: skip

BOARD = Board(
    "trainer",
    "Penstock / Trainer",
    "The update, how far off policy its data is, and what a step costs.",
    (_UPDATE, _OFF_POLICY, _COST, _OTHER),
)
