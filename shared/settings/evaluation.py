"""The settings of evaluation; with several sets, each is one value for all sets, or a table by name."""

from typing import Annotated, Literal, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from penstock.shared.dataset_source import DatasetSource
from penstock.shared.settings.rollout import LEAST_TEMPERATURE
from penstock.shared.settings.section import Section

ONLY_SET = "heldout"
"""The name of the set when evaluation.path is one path."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")]
Value = TypeVar("Value")


class HeldOutSet(Section):
    """One set, with the settings that hold for it."""

    name: str = Field(default=ONLY_SET)
    """Names it in the ledger, in metrics and in the report."""
    path: DatasetSource
    """The problems."""
    every_steps: PositiveInt = Field(default=20)
    """Steps between evaluations."""
    problems: PositiveInt = Field(default=200)
    """Problems of an evaluation between the first and the last."""
    samples: PositiveInt = Field(default=1)
    """Completions per problem."""
    temperature: NonNegativeFloat = Field(default=0.0)
    """Of sampling."""
    correct_above: float = Field(default=0.5)
    """A sample with a reward above this counts as correct."""

    @property
    def pass_at(self) -> tuple[int, ...]:
        """The k of which pass@k is reported: powers of two, and all samples."""
        powers = (1 << power for power in range(1, self.samples.bit_length()))
        return tuple(sorted({*powers, self.samples})) if self.samples > 1 else ()


_DEFAULTS = HeldOutSet(path="none")


class GateSettings(Section):
    """What happens when a version's accuracy is significantly lower than that of a version before it."""

    action: Literal["off", "tell", "rollback"] = Field(default="off")
    """`rollback`: revoke the version and return to the newest good checkpoint; `tell`: report it (events, a metric).
    The accuracy of the first set in evaluation.path counts."""
    max_fall: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.05)
    """Largest fall of accuracy (0 to 1) that passes. A larger one fails if its 95 % interval is above 0."""


class EvaluationSettings(Section):
    """Held-out problems, answered by the same replicas. With several sets each value may be a table by set: { aime = 16 }."""

    path: DatasetSource | dict[Name, DatasetSource] | None = Field(default=None)
    """Held-out problems (as data.path), or several sets by name: { aime = "aime.jsonl", … }, the main one first. Empty: no evaluation."""
    every_steps: PositiveInt | dict[str, PositiveInt] = Field(default=_DEFAULTS.every_steps)
    """Steps between evaluations, beside those before the first step and after the last."""
    problems: PositiveInt | dict[str, PositiveInt] = Field(default=_DEFAULTS.problems)
    """Problems of an evaluation; the first and the last one take all."""
    samples: PositiveInt | dict[str, PositiveInt] = Field(default=_DEFAULTS.samples)
    """Completions per problem. Several give pass@k for k = 2, 4, 8, …"""
    temperature: NonNegativeFloat | dict[str, NonNegativeFloat] = Field(default=_DEFAULTS.temperature)
    """Sampling temperature, at least 0.01; 0: greedy, which needs samples = 1."""
    correct_above: float | dict[str, float] = Field(default=_DEFAULTS.correct_above)
    """A sample with a reward above this counts as correct."""
    replicas: PositiveInt = Field(default=1)
    """Replicas that keep the evaluated version; the first and the last evaluation use all."""
    timeout_s: PositiveFloat = Field(default=600.0)
    """Seconds after which an evaluation reports on the answers so far. Default: 600, or 0.05 for each of
    sampling.max_new_tokens."""
    gate: GateSettings = Field(default=GateSettings())
    """What a fall of accuracy leads to."""

    @field_validator("path", mode="before")
    @classmethod
    def _empty_is_none(cls, path: object) -> object:
        return None if path in ("", {}) else path

    @property
    def paths(self) -> dict[str, str]:
        if self.path is None:
            return {}
        return self.path if isinstance(self.path, dict) else {ONLY_SET: self.path}

    @property
    def held_out(self) -> tuple[HeldOutSet, ...]:
        return tuple(
            HeldOutSet(
                name=name,
                path=path,
                every_steps=_of(self.every_steps, name, _DEFAULTS.every_steps),
                problems=_of(self.problems, name, _DEFAULTS.problems),
                samples=_of(self.samples, name, _DEFAULTS.samples),
                temperature=_of(self.temperature, name, _DEFAULTS.temperature),
                correct_above=_of(self.correct_above, name, _DEFAULTS.correct_above),
            )
            for name, path in self.paths.items()
        )

    @property
    def gated(self) -> str:
        """Empty without such a set."""
        return next(iter(self.paths), "")

    def setting_of(self, held_out: HeldOutSet) -> str:
        return f"evaluation.path.{held_out.name}" if isinstance(self.path, dict) else "evaluation.path"

    @model_validator(mode="after")
    def _agree(self) -> "EvaluationSettings":
        for setting in ("every_steps", "problems", "samples", "temperature", "correct_above"):
            value = getattr(self, setting)
            unknown = sorted(value.keys() - self.paths.keys()) if isinstance(value, dict) else []
            if unknown:
                raise ValueError(
                    f"expected the name of a set in evaluation.{setting}, found {unknown[0]!r}; evaluation.path has "
                    f"{', '.join(self.paths) or 'none'}: change one of them"
                )
        for held_out in self.held_out:
            if 0 < held_out.temperature < LEAST_TEMPERATURE:
                raise ValueError(
                    f'expected a temperature of 0 or at least {LEAST_TEMPERATURE} in the set "{held_out.name}", found '
                    f"{held_out.temperature:g}: change evaluation.temperature"
                )
            if held_out.samples > 1 and held_out.temperature == 0:
                raise ValueError(
                    f'expected a temperature above 0 for {held_out.samples} samples of each problem in the set "{held_out.name}", '
                    "found 0, at which all of them are equal: raise evaluation.temperature, or set evaluation.samples = 1"
                )
        if self.gate.action != "off" and not self.paths:
            raise ValueError(
                f'expected a held-out set with evaluation.gate.action = "{self.gate.action}", but there is none: set evaluation.path'
            )
        return self


def _of(value: Value | dict[str, Value], name: str, default: Value) -> Value:
    return value.get(name, default) if isinstance(value, dict) else value
