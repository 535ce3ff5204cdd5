"""The learning rate as a function of the step alone."""

import math

from penstock.shared.settings import Settings, TrainerSettings


def learning_rate(settings: Settings, step: int, peak: float | None = None) -> float:
    """Return the policy's learning rate, 0 while only the critic learns. ``peak`` is a changed trainer.learning_rate."""
    algorithm, trainer = settings.algorithm, settings.trainer
    if algorithm.needs_critic and step <= algorithm.critic.warmup_steps:
        return 0.0
    return scheduled(trainer, trainer.learning_rate if peak is None else peak, step, settings.run.steps)


def scheduled(settings: TrainerSettings, peak: float, step: int, steps: int) -> float:
    """Linear warm-up, then constant, linear or half-cosine decay to ``final_learning_rate``."""
    if step <= settings.warmup_steps:
        return peak * step / settings.warmup_steps
    if settings.schedule == "constant":
        return peak
    done = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    left = 1.0 - min(1.0, done)
    if settings.schedule == "cosine":
        left = 0.5 * (1.0 - math.cos(math.pi * left))
    return settings.final_learning_rate + (peak - settings.final_learning_rate) * left


def critic_learning_rate(settings: Settings, step: int) -> float:
    """Return the critic's learning rate: the policy's linear warm-up, then constant."""
    rate = settings.algorithm.critic.learning_rate
    warmup = settings.trainer.warmup_steps
    return rate * step / warmup if step <= warmup else rate
