"""What a resumed run must have in common with the run that it continues.

A checkpoint holds weights, the optimizer's state as it was split over ranks, and a random state; the journal holds batches that are trained again
exactly as they were. What these depend on cannot change: it would fail to load, or load as something else.
"""

from collections.abc import Mapping

from shared.errors import SettingsError
from shared.settings import Settings
from shared.settings.section import Section

FIXED = (
    "run.id",
    "run.seed",
    "policy.model",
    "policy.tokenizer",
    "policy.dtype",
    "policy.lora",
    "algorithm.advantage",
    "algorithm.critic.model",
    "trainer.ranks",
    "trainer.nodes",
    "trainer.zero_stage",
    "trainer.optimizer",
    "trainer.offload",
    "trainer.deepspeed",
)
"""Settings, and tables of settings, that need a new run."""


def check_unchanged(before: Settings, after: Settings, sources: Mapping[str, str]) -> None:
    """Raise SettingsError where a setting of ``FIXED`` is another than the run was started with.

    Args:
        before: the run's settings.
        after: those of the resume, resolved in the same way.
        sources: where each overridden setting has its value from, in words.
    """
    for key in FIXED:
        old, new = _value(before, key), _value(after, key)
        if old != new:
            source = next((source for name, source in sources.items() if f"{name}.".startswith(f"{key}.")), "")
            raise SettingsError(
                f"expected {key} = {_shown(old)}, with which the run was started, found {_shown(new)}"
                f"{f' ({source})' if source else ''}: leave it out, or start a new run, which may begin with what `penstock export` writes"
            )


def _value(settings: Settings, key: str) -> object:
    found: object = settings
    for name in key.split("."):
        found = getattr(found, name)
    return found


def _shown(value: object) -> str:
    return str(value.model_dump(exclude_defaults=True)) if isinstance(value, Section) else repr(value)
