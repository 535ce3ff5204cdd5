"""Penstock's Python API (docs/python-api.md), and the types of users' own scorers (docs/rewards.md).

::

    run = penstock.Run("my-run.toml").start()
    for step in run.steps():
        print(step.step, step.metrics["reward_mean"])
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.run import Run, RunFailed, Step
    from penstock.services.client.policy import Completion, Policy
    from penstock.services.reward.scorers.scorer import Result
    from penstock.shared.bus.messages import Prompt, Sample, ScoreStatus
    from penstock.shared.errors import PenstockError, SettingsError

__all__ = [
    "Completion",
    "PenstockError",
    "Policy",
    "Prompt",
    "Result",
    "Run",
    "RunFailed",
    "Sample",
    "ScoreStatus",
    "SettingsError",
    "Step",
]

_HOMES = {
    "Completion": "penstock.services.client.policy",
    "Policy": "penstock.services.client.policy",
    "Prompt": "penstock.shared.bus.messages",
    "Result": "penstock.services.reward.scorers.scorer",
    "Run": "penstock.run",
    "RunFailed": "penstock.run",
    "Sample": "penstock.shared.bus.messages",
    "ScoreStatus": "penstock.shared.bus.messages",
    "Step": "penstock.run",
    "PenstockError": "penstock.shared.errors",
    "SettingsError": "penstock.shared.errors",
}


def __getattr__(name: str) -> object:
    """Import on first use: services import this package too, and need none of it."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
