"""The ``[algorithm]`` table: the batches of a step, and the update rule as a preset's name and what is set otherwise.

A preset is a table of overrides of the defaults; a key that is given explicitly wins over it. ``rules.py`` has what each
rule takes.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from penstock.shared.settings.guards import LIMITS
from penstock.shared.settings.rollout import EpisodesSettings
from penstock.shared.settings.rules import ADVANTAGES, LOSSES, OWN, RuleSettings, at, refusal
from penstock.shared.settings.section import Section, shown

Preset = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "dapo", "gspo", "cispo", "ppo",
    "tis", "icepop", "decoupled_ppo", "a3po", "reinforce", "dpo",
]  # fmt: skip

_RECOMPUTED: dict[str, Any] = {"proximal": "recomputed", "correction": "token_tis"}

PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "constant"},
    "rloo": {
        "advantage": "rloo", "loss": "policy_gradient", "correction": "token_tis", "aggregation": "constant",
    },
    "reinforce_pp": {"advantage": "reinforce_pp"},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline"},
    "maxrl": {"advantage": "maxrl"},
    "dapo": {"clip": (0.2, 0.28), "dynamic_sampling": True, "overlong": (0.2, 1.0)},
    "gspo": {"loss": "gspo", "clip": (3e-4, 4e-4), "aggregation": "sequence"},
    "cispo": {"loss": "cispo", "clip": (0.2, 4.0)},
    "ppo": {"advantage": "gae"},
    "tis": _RECOMPUTED,
    "icepop": {"proximal": "recomputed", "correction": "token_mask", "correction_band": (0.5, 5.0)},
    "decoupled_ppo": {**_RECOMPUTED, "minibatches": 2},
    "a3po": {"proximal": "log_linear", "correction": "token_tis", "minibatches": 2},
    "reinforce": {"advantage": "dr_grpo", "loss": "policy_gradient", "correction": "token_tis"},
    "dpo": {"loss": "dpo", "correction": "none", "dynamic_sampling": True},
}  # fmt: skip
"""What each preset sets; everything else stays at its default."""


class BatchSettings(Section):
    """Which groups a step trains."""

    preset: Preset = Field(default="grpo")
    """Algorithm: a set of values for the settings below. Values that you set take precedence."""
    groups_per_step: PositiveInt = Field(default=32)
    """Groups per optimizer step, each of sampling.group_size samples."""
    max_lag: NonNegativeInt = Field(default=1)
    """Maximum lag of a sample, in steps; 0: synchronous. (max_lag + 1) × groups_per_step groups are in flight."""
    on_stale: Literal["drop", "requeue", "mask", "wait"] = Field(default="drop")
    """A sample with a token over max_lag is not trained (`drop`), is generated again (`requeue`), or is trained after
    its last such token (`mask`). `wait`: a step waits up to ten minutes for groups admitted earlier. Default: `drop`; with
    sampling.max_new_tokens of 8,192 or more `mask`, as long samples are stale first, unless whole samples are compared."""
    dynamic_sampling: bool = Field(default=False)
    """Whether groups with equal rewards are dropped on arrival (`dropped:no_signal`) and replaced."""
    filter: str = Field(default="")
    """Your own function, `package.module:function`, that returns whether a group is trained; others are replaced.
    Empty: all groups."""


class AlgorithmSettings(RuleSettings, BatchSettings):
    """The update rule."""

    @model_validator(mode="before")
    @classmethod
    def _overlay(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        overrides = {str(name): table for name, table in PRESETS.items()}
        return {**overrides.get(str(values.get("preset", "grpo")), {}), **values}

    @field_validator("advantage", "loss", "filter")
    @classmethod
    def _known(cls, name: str, info: ValidationInfo) -> str:
        names = [
            known
            for known in {"loss": LOSSES, "advantage": ADVANTAGES}.get(info.field_name or "", {"": ""})
            if known != OWN
        ]
        if name not in names and re.fullmatch(r"[\w.]+:[\w.]+", name) is None:
            raise ValueError(
                f"expected {', '.join(map(repr, names))} or an import path '{OWN}', found {name!r}: change "
                f"algorithm.{info.field_name}"
            )
        return name

    @model_validator(mode="after")
    def _agree(self) -> "AlgorithmSettings":
        preset = AlgorithmSettings.model_construct(**PRESETS[self.preset])
        for problem in (refusal(self, preset), self._of_parts(), self._unread(preset), self._uncorrected()):
            if problem:
                raise ValueError(problem)
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether something is compared with the frozen initial policy."""
        return self.kl.coefficient > 0 or self.loss == "dpo"

    @property
    def reference_travels(self) -> bool:
        """Whether every group comes to the trainer with its reference logprobs."""
        return self.needs_reference and self.reference == "reward"

    @property
    def needs_critic(self) -> bool:
        """Whether the trainer holds a critic."""
        return self.advantage == "gae"

    @property
    def compares_whole_samples(self) -> bool:
        """Whether a group can be trained only if all tokens of all its samples count."""
        by_group = self.advantage in ("grpo", "dr_grpo", "rloo", "maxrl") or ":" in self.advantage
        return self.loss == "dpo" or (self.kl.in_reward and by_group)

    def _of_parts(self) -> str:
        """Return what is wrong among the settings of every rule, and what to change, or nothing."""
        if self.on_stale == "mask" and self.compares_whole_samples:
            because = (
                'loss = "dpo"' if self.loss == "dpo" else f'kl.estimator = "k1" and advantage = "{self.advantage}"'
            )
            return (
                f'expected another algorithm.on_stale than "mask" with {because}, which compares whole samples, masked '
                'tokens included: set algorithm.on_stale = "wait", "requeue" or "drop"'
            )
        if self.groups_per_step % self.minibatches:
            return (
                f"expected algorithm.groups_per_step to be a multiple of minibatches, found {self.groups_per_step} and "
                f"{self.minibatches}: change one of them"
            )
        low, high = self.correction_band
        if not low <= 1 <= high:
            return (
                f"expected algorithm.correction_band to contain the ratio 1, found [{low:g}, {high:g}]: change "
                "algorithm.correction_band"
            )
        return ""

    def _unread(self, preset: RuleSettings) -> str:
        """Return that a setting was changed which changes nothing beside others than its rule's, or nothing."""
        plain = AlgorithmSettings.model_construct()
        for name, is_read, others in self._readers():
            value = at(self, name)
            if not is_read and value not in (at(plain, name), at(preset, name)):
                return (
                    f"expected algorithm.{name} to be left out with {others}, found {shown(value)}, which has no effect: change one "
                    "of them"
                )
        return ""

    def _readers(self) -> Iterator[tuple[str, bool, str]]:
        """Yield a setting (or a part, by its index), whether it changes anything, and beside what it would not."""
        several = self.updates > 1
        for name in ("loss", "clip") if self.loss in ("clip", "gspo", "cispo") else ():
            yield (
                name, several or self.proximal != "recomputed",
                'algorithm.proximal = "recomputed" and one update a step (algorithm.minibatches), in which the ratio is 1',
            )  # fmt: skip
            yield (
                name, self.max_lag > 0 or self.proximal != "log_linear",
                'algorithm.proximal = "log_linear" and algorithm.max_lag = 0, where the ratio is 1',
            )  # fmt: skip
        yield "reference", self.needs_reference, 'algorithm.kl.coefficient = 0 and another algorithm.loss than "dpo"'
        yield "overlong.1", self.overlong[0] > 0, "a share of 0 in algorithm.overlong"
        yield "overlong.0", self.overlong[1] > 0, "a penalty of 0 in algorithm.overlong"

    def _uncorrected(self) -> str:
        if self.max_lag == 0 or self.correction != "none" or self.loss == "dpo":
            return ""
        return (
            f'expected an off-policy correction with algorithm.max_lag = {self.max_lag}, found correction = "none": set '
            'algorithm.correction ("ratio", or "token_tis" with a recomputed proximal), or algorithm.max_lag = 0; '
            'algorithm.correction = "ignored" runs without one'
        )


_LONG_TOKENS = 8_192
_TOKEN_S = 0.05
"""Seconds in which a busy replica draws a token of each sample."""
_DEADLINES = (
    ("evaluation", "timeout_s", 600.0),
    ("episodes", "deadline_s", 1800.0),
    ("internal", "stale_wait_s", 600.0),
)


def follow_length(values: Any) -> Any:
    """Return a run's tables with defaults that suit completions of sampling.max_new_tokens, where these are long: deadlines
    that they can meet, and ``mask`` for stale ones.
    """
    tables = values if isinstance(values, dict) else {}
    try:
        longest = int(tables["sampling"]["max_new_tokens"])
    except (KeyError, TypeError, ValueError):
        return values
    defaults: dict[str, dict[str, Any]] = {
        table: {name: longest * _TOKEN_S} for table, name, least_s in _DEADLINES if longest * _TOKEN_S > least_s
    }
    algorithm, guards = tables.get("algorithm", {}), tables.get("guards", {})
    if longest >= _LONG_TOKENS and isinstance(algorithm, dict) and _may_mask(algorithm):
        defaults["algorithm"] = {"on_stale": "mask"}
    limits = guards.get("limits", {}) if isinstance(guards, dict) else None
    if longest * _TOKEN_S > LIMITS["stalled"] and isinstance(limits, dict):
        tables = {**tables, "guards": {**guards, "limits": {"stalled": longest * _TOKEN_S, **limits}}}
    if not _plays(tables.get("episodes")):
        defaults.pop("episodes", None)
    given = {table: tables.get(table, {}) for table in defaults}
    return {**tables, **{table: {**defaults[table], **own} for table, own in given.items() if isinstance(own, dict)}}


def _plays(episodes: object) -> bool:
    """Whether a run has episodes, of which each turn may be that long."""
    try:
        return EpisodesSettings.model_validate(episodes or {}).is_on
    except ValidationError:  # reported with all others
        return False


def _may_mask(algorithm: dict[str, Any]) -> bool:
    try:
        return not AlgorithmSettings.model_validate({**algorithm, "on_stale": "drop"}).compares_whole_samples
    except ValidationError:  # reported with all others
        return False
