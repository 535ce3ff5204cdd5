"""The settings of evaluation: which held-out problems are asked when, how their answers count, and what a fall of accuracy leads to.

One dataset: ``evaluation.path``, the set "heldout". Several: ``[[evaluation.sets]]``, each with a name and a path; then ``path``
stays empty. What a set does not say, ``[evaluation]`` says for all of them.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shared.settings.section import Section

ONLY_SET = "heldout"
"""What the set of ``evaluation.path`` is called."""
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$"


class HeldOutSet(Section):
    """Held-out problems, and how they are asked; what is left out is as [evaluation] has it."""

    name: str = Field(default=ONLY_SET, pattern=_NAME)
    """Names it in the ledger, in metrics and in the report."""
    path: Path
    """The problems, as data.path."""
    every_steps: PositiveInt | None = Field(default=None)
    """Evaluate each so many steps, and always before the first and after the last."""
    problems: PositiveInt | None = Field(default=None)
    """How many problems an evaluation between the first and the last takes; those two take all."""
    samples: PositiveInt | None = Field(default=None)
    """Completions of each problem."""
    temperature: NonNegativeFloat | None = Field(default=None)
    """Of sampling; 0: greedy."""
    pass_at: tuple[PositiveInt, ...] | None = Field(default=None)
    """Report pass@k for these k."""
    correct_above: float | None = Field(default=None)
    """A sample with a reward above this counts as correct."""


class GateSettings(Section):
    """What happens when a version's accuracy is really lower than that of a version before it."""

    action: Literal["off", "tell", "rollback"] = Field(default="off")
    """`rollback`: revoke it and take the run back to the newest checkpoint that is known to be good; `tell`: say so in events and a metric."""
    set: str = Field(default="")
    """Whose accuracy counts; empty: that of the first set."""
    against: Literal["best", "last"] = Field(default="best")
    """Compare with the best version that passed, or with the last one."""
    max_fall: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.05)
    """Largest fall of accuracy (0 to 1) that passes. A larger one fails only where the 95 % interval of the fall lies above 0."""
    min_problems: PositiveInt = Field(default=50)
    """An evaluation with fewer answered problems neither passes nor fails."""
    max_rollbacks: NonNegativeInt = Field(default=2)
    """So many rollbacks in a row without a version that passed between them; then the run pauses instead."""


class EvaluationSettings(Section):
    """Held-out problems, asked of the same replicas."""

    path: Path | None = Field(default=None)
    """Held-out problems, as data.path, where there is one set of them; none and no [[evaluation.sets]]: no evaluation."""
    sets: tuple[HeldOutSet, ...] = Field(default=())
    """Several sets; the first is the one that headlines and the gate mean. Instead of evaluation.path."""
    every_steps: PositiveInt = Field(default=20)
    """Evaluate each so many steps, and always before the first and after the last."""
    problems: PositiveInt = Field(default=200)
    """How many problems an evaluation between the first and the last takes; those two take all."""
    samples: PositiveInt = Field(default=1)
    """Completions of each problem; accuracy is the mean share of correct ones."""
    temperature: NonNegativeFloat = Field(default=0.0)
    """Of sampling; 0: greedy, which wants samples = 1."""
    pass_at: tuple[PositiveInt, ...] = Field(default=())
    """Report pass@k for these k, each at most `samples`: the probability that one of k completions is correct."""
    correct_above: float = Field(default=0.5)
    """A sample with a reward above this counts as correct."""
    replicas: PositiveInt = Field(default=1)
    """At most so many replicas keep the evaluated version while the others go on to newer ones; the first and the last
    evaluation, while nothing is trained, take all."""
    timeout_s: PositiveFloat = Field(default=600.0)
    """An evaluation that takes longer reports on the answers that it has, and says so; no replica keeps a version longer."""
    gate: GateSettings = Field(default=GateSettings())
    """What a fall of accuracy leads to."""

    @property
    def held_out(self) -> tuple[HeldOutSet, ...]:
        """Every set with nothing left out, the one that headlines mean first."""
        named = self.sets if self.path is None else (HeldOutSet(path=self.path),)
        return tuple(self._whole(found) for found in named)

    @property
    def gated(self) -> str:
        """The set whose accuracy the gate looks at; empty where there is none."""
        return self.gate.set or next((found.name for found in self.held_out), "")

    def setting_of(self, held_out: HeldOutSet) -> str:
        """Return the setting that says where a set lies, for messages."""
        if self.path is not None:
            return "evaluation.path"
        return f'path of "{held_out.name}" in [[evaluation.sets]]'

    def _whole(self, found: HeldOutSet) -> HeldOutSet:
        names = HeldOutSet.model_fields.keys() - {"name", "path"}
        missing = {name: getattr(self, name) for name in names if getattr(found, name) is None}
        return found.model_copy(update=missing)

    @model_validator(mode="after")
    def _agree(self) -> "EvaluationSettings":
        if self.path is not None and self.sets:
            raise ValueError(
                "expected evaluation.path or [[evaluation.sets]], found both: make the path one of the sets, with a name"
            )
        names = [found.name for found in self.held_out]
        if len(set(names)) != len(names):
            raise ValueError(f"expected sets with different names, found {names}: change name in [[evaluation.sets]]")
        for found in self.held_out:
            _check(found)
        if self.gate.action != "off" and self.gated not in names:
            raise ValueError(
                f'expected the name of a set in evaluation.gate.set, found "{self.gate.set}"; there are {names or "none"}'
            )
        return self


def _check(found: HeldOutSet) -> None:
    samples = found.samples or 1
    if samples > 1 and found.temperature == 0:
        raise ValueError(
            f'expected a temperature above 0 for {samples} samples of each problem in the set "{found.name}", found 0, at '
            "which all of them are equal: raise temperature, or set samples = 1"
        )
    if too_large := [k for k in found.pass_at or () if k > samples]:
        raise ValueError(
            f'expected every k of pass_at to be at most samples = {samples} in the set "{found.name}", found {too_large}: '
            "raise samples, or leave them out"
        )
