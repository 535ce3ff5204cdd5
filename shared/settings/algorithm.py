"""The ``[algorithm]`` table: the update rule as a preset's name and what is set otherwise.

A preset is a table of overrides of the defaults below; a key that is given explicitly wins over it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from shared.settings.section import Section, shown

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


class KlSettings(Section):
    """A penalty on the distance to the reference: the initial policy, frozen."""

    coefficient: NonNegativeFloat = Field(default=0.0)
    """Cost of a nat; 0: no penalty, and no reference is held."""
    estimator: Literal["k1", "k2", "k3"] = Field(default="k3")
    """Estimator per token. In a reward: k1. In a loss: k2 or k3; k1 is refused there, as its gradient is noise around
    0."""
    where: Literal["loss", "reward"] = Field(default="loss")
    """Added to the `loss` of each token, or subtracted from the `reward` (of each token for gae and reinforce_pp,
    else summed over the sample before the group is compared)."""
    target: NonNegativeFloat = Field(default=0.0)
    """Mean KL per token (nats) to which the coefficient is steered; 0: the coefficient is fixed."""


class CriticSettings(Section):
    """The critic that advantage = "gae" needs: a language model's trunk with one output per token."""

    model: str = Field(default="")
    """Initial weights of the critic, as policy.model; empty: those of policy.model."""
    learning_rate: NonNegativeFloat = Field(default=1e-5)
    """Learning rate of its AdamW, constant after trainer.warmup_steps."""
    clip: NonNegativeFloat = Field(default=0.2)
    """Largest change of a value in one step; 0: no limit."""
    warmup_steps: NonNegativeInt = Field(default=0)
    """Steps at the start in which only the critic learns."""
    discount: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0)
    """Discount γ of a reward per token."""
    decay: Annotated[float, Field(ge=0, le=1)] = Field(default=0.95)
    """Decay λ of generalized advantages. 1: returns minus values; lower: less variance, more trust in the critic."""


ADVANTAGES = ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "reinforce_pp_baseline", "gae", "none")
LOSSES = ("clip", "gspo", "cispo", "policy_gradient", "dpo", "cross_entropy")
Clip = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class AlgorithmSettings(Section):
    """The update rule."""

    preset: Preset = Field(default="grpo")
    """Algorithm: a set of values for the settings below. Values that you set take precedence."""
    groups_per_step: PositiveInt = Field(default=32)
    """Groups per optimizer step, each of sampling.group_size samples."""
    max_lag: NonNegativeInt = Field(default=1)
    """Maximum lag of a sample, in steps; 0: synchronous. At most (max_lag + 1) × groups_per_step groups are in
    flight."""
    on_stale: Literal["drop", "requeue", "mask", "wait"] = Field(default="drop")
    """What happens to a sample with a token over max_lag: it is not trained (`drop`), it is generated again
    (`requeue`), or its tokens up to the last one over max_lag are not trained (`mask`). All three train long
    completions less often than short ones. `wait`: a step waits up to wait_s for groups admitted before those of its
    batch, so that they are not overtaken; later stale samples are dropped."""
    wait_s: PositiveFloat = Field(default=600.0)
    """Longest wait of a step for earlier groups with on_stale = "wait", in seconds."""
    advantage: str = Field(default="grpo")
    """How rewards become advantages: within the group (grpo divides by its deviation, dr_grpo does not, rloo leaves
    the sample itself out, maxrl divides by the mean of rewards that are at least 0), over the batch (reinforce_pp), by
    a critic (gae), or by your own function of a group's rewards, `package.module:function`. none: rewards are not
    learned from, only distillation."""
    credit: Literal["episode", "turns"] = Field(default="episode")
    """What an advantage is of: the whole `episode`, or each of its `turns`, by the rewards from it on, less the mean of
    those of the group's other episodes from the same turn on (with advantage = "rloo", which does so for one turn)."""
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """With credit = "turns": what a reward counts one turn before."""
    distillation: NonNegativeFloat = Field(default=0.0)
    """Weight of the teacher: this times (log teacher − log policy) is added to the advantage of each token; 0: no
    teacher."""
    distillation_skew: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the policy itself in what it is compared with, (1 − skew) × teacher + skew × policy: bounds what a token
    costs that the teacher finds impossible. 0: the teacher alone."""
    distillation_top_k: int = Field(default=0, ge=0, le=64)
    """How many of its most probable tokens a teacher gives at each position: instead of an advantage, distillation times
    the KL from teacher to policy over these tokens and all others together is added to the loss. 0: only the logprob of
    the sampled token."""
    imitation: NonNegativeFloat = Field(default=0.0)
    """Weight of the loss of demonstrations, trained in the same steps as problems: those datasets of data.path of which
    every row has a completion. The loss of a step is that of its samples plus this times the mean cross-entropy of its
    demonstrations, each over its own count. 0: completions are columns like any other."""
    loss: str = Field(default="clip")
    """Loss: PPO's clipped ratio per token, the same per sequence (gspo), a clipped weight (cispo), plain policy
    gradient, preferences between a group's best and worst sample or, with data.rejected_field, the two of a row (dpo),
    or your own function of the tokens' logprobs and advantages, `package.module:function`. cross_entropy: nothing is
    generated, the data are demonstrations."""
    clip: tuple[Clip, PositiveFloat] = Field(default=(0.2, 0.2))
    """[low, high]: the ratio is clipped at 1 − low where the advantage is negative, and at 1 + high where it is
    positive (clip, gspo). For cispo, high is the largest weight − 1."""
    dual_clip: NonNegativeFloat = Field(default=0.0)
    """Bound of the ratio where the advantage is negative, with loss = "clip"; more than 1, or 0: no bound."""
    correction: Literal[
        "ratio", "none", "ignored", "token_tis", "sequence_tis", "token_mask", "sequence_mask", "geometric_mask"
    ] = Field(default="ratio")
    """Correction for samples of another policy: the loss's own ratio to behavior logprobs (`ratio`), a weight
    truncated at the end of correction_band (per token or sequence), or a mask that drops tokens or sequences
    outside the band. `ignored`: no correction although samples may be off-policy, to see its effect."""
    correction_band: tuple[NonNegativeFloat, PositiveFloat] = Field(default=(0.5, 2.0))
    """Ratios that count, [low, high]: weights are truncated at high; masks drop what is outside."""
    proximal: Literal["behavior", "recomputed", "log_linear"] = Field(default="behavior")
    """Where the clipped ratio starts: behavior logprobs, those of the weights before this step (one more forward
    pass), or an interpolation of behavior and policy by lag."""
    aggregation: Literal["token", "sequence", "constant"] = Field(default="token")
    """Policy loss of a batch: the mean over its tokens, over its samples' means, or the sum over samples ×
    max_new_tokens. KL and entropy bonus are means over tokens."""
    entropy_bonus: NonNegativeFloat = Field(default=0.0)
    """Coefficient of the policy's entropy (nats per token) in the objective."""
    epochs: Annotated[int, Field(ge=1, le=8)] = Field(default=1)
    """Passes over a batch."""
    minibatches: Annotated[int, Field(ge=1)] = Field(default=1)
    """Optimizer updates per epoch, each on its share of the groups (drawn by run.seed and the step)."""
    dynamic_sampling: bool = Field(default=False)
    """Whether groups with equal rewards are dropped on arrival (`dropped:no_signal`) and replaced."""
    filter: str = Field(default="")
    """Your own function of a group, `package.module:function`, that returns whether it is trained; others are dropped
    on arrival (`dropped:filtered`) and replaced. Empty: all groups."""
    overlong: tuple[Share, NonNegativeFloat] = Field(default=(0.0, 1.0))
    """[share of sampling.max_new_tokens over which a long sample's reward falls linearly, penalty at the full
    length]; a share of 0: length has no cost."""
    dpo_beta: PositiveFloat = Field(default=0.1)
    """With loss = "dpo": how strongly the reference holds the policy."""
    kl: KlSettings = Field(default=KlSettings())
    """A penalty on the distance to the reference."""
    reference: Literal["trainer", "reward"] = Field(default="trainer")
    """Where the frozen initial policy is, if it is needed: on every rank of the `trainer` (free with policy.lora), or
    in the `reward` service, whose logprobs travel with each group."""
    critic: CriticSettings = Field(default=CriticSettings())
    """The critic that advantage = "gae" needs."""

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
        names = {"loss": LOSSES, "advantage": ADVANTAGES}.get(info.field_name or "", ("",))
        if name not in names and re.fullmatch(r"[\w.]+:[\w.]+", name) is None:
            raise ValueError(
                f"expected {', '.join(map(repr, names))} or an import path 'package.module:function', found {name!r}: change "
                f"algorithm.{info.field_name}"
            )
        return name

    @model_validator(mode="after")
    def _agree(self) -> "AlgorithmSettings":
        for problem in (self._contradiction(), self._uncorrected()):
            if problem:
                raise ValueError(problem)
        return self

    @property
    def is_supervised(self) -> bool:
        """Whether the run trains demonstrations alone: nothing is generated or scored."""
        return self.loss == "cross_entropy"

    @property
    def is_mixed(self) -> bool:
        """Whether demonstrations are trained beside samples of the policy."""
        return self.imitation > 0

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
        return self.advantage == "gae" and self.loss != "dpo"

    @property
    def compares_whole_samples(self) -> bool:
        """Whether a group can be trained only if all tokens of all its samples count."""
        penalised = self.kl.where == "reward" and self.kl.coefficient > 0
        by_group = self.advantage in ("grpo", "dr_grpo", "rloo", "maxrl") or ":" in self.advantage
        return self.loss == "dpo" or (penalised and by_group)

    def _contradiction(self) -> str:
        """Return what is wrong and what to change, or nothing."""
        by_loss = {
            "policy_gradient": self._of_policy_gradient, "dpo": self._of_dpo, "cross_entropy": self._of_demonstrations,
        }  # fmt: skip
        return by_loss.get(self.loss, self._of_ratio)() or self._of_teacher() or self._of_parts() or self._unread()

    def _of_ratio(self) -> str:
        start = f'with algorithm.loss = "{self.loss}"'
        if self.proximal == "behavior" and self.correction != "ratio":
            advice = (
                'the ratio starts from behavior logprobs, which corrects it: set algorithm.correction = "ratio", or '
                'algorithm.proximal = "recomputed"'
            )
            return f'expected algorithm.correction = "ratio" {start}, found "{self.correction}": {advice}'
        if self.proximal != "behavior" and self.correction == "ratio":
            advice = (
                'the ratio starts from proximal logprobs and corrects nothing: set algorithm.correction = "token_tis"'
            )
            return f'expected a correction of its own {start} and proximal = "{self.proximal}", found "ratio": {advice}'
        if self.dual_clip and (self.loss != "clip" or self.dual_clip <= 1):
            return (
                f'expected algorithm.dual_clip = 0, or over 1 with loss = "clip", found {self.dual_clip} {start}: '
                "change algorithm.dual_clip"
            )
        return ""

    def _of_policy_gradient(self) -> str:
        if self.correction == "ratio":
            return (
                'expected a correction of its own with algorithm.loss = "policy_gradient", which has no ratio, found '
                '"ratio": set algorithm.correction = "token_tis"'
            )
        if self.proximal != "behavior" or self.dual_clip:
            return (
                'expected nothing to clip with algorithm.loss = "policy_gradient", found proximal or dual_clip: '
                "leave them out"
            )
        if self.correction == "none" and self.epochs * self.minibatches > 1:
            return (
                "expected a correction where a batch is used for several updates, but it is turned off: set "
                "algorithm.correction "
                '= "token_tis", or algorithm.epochs and algorithm.minibatches to 1'
            )
        return ""

    def _of_dpo(self) -> str:
        if self.imitation:
            return (
                'expected algorithm.imitation = 0 with algorithm.loss = "dpo", which is over pairs of samples, found '
                f"{self.imitation:g}: change one of them"
            )
        expected = {"correction": "none", "proximal": "behavior", "advantage": "grpo", "dual_clip": 0.0}
        for name, value in expected.items():
            if getattr(self, name) != value:
                return (
                    f'expected algorithm.{name} = {shown(value)} with algorithm.loss = "dpo", which has no ratio and no '
                    f'advantages, found {shown(getattr(self, name))}: change it, or set algorithm.preset = "dpo"'
                )
        if self.kl.coefficient:
            return (
                'expected algorithm.kl.coefficient = 0 with algorithm.loss = "dpo", found '
                f"{self.kl.coefficient}: the reference holds the policy by algorithm.dpo_beta; change that"
            )
        return ""

    def _of_demonstrations(self) -> str:
        """Only what changes the cross-entropy of demonstrations, which have no rewards and were drawn by no policy."""
        plain = AlgorithmSettings()
        names = (
            "advantage",
            "dual_clip",
            "correction",
            "proximal",
            "entropy_bonus",
            "dynamic_sampling",
            "filter",
            "overlong",
            "kl",
            "imitation",
        )
        for name in names:
            value, expected = getattr(self, name), getattr(plain, name)
            if value != expected:
                return (
                    f'expected algorithm.{name} to be left at its default with algorithm.loss = "cross_entropy", which has no rewards '
                    f"and no behavior logprobs, found {shown(value)}: leave it out, or choose another algorithm.preset"
                )
        return ""

    def _of_teacher(self) -> str:
        if self.advantage == "none" and (not self.distillation or (self.kl.coefficient and self.kl.where == "reward")):
            return (
                'expected algorithm.distillation > 0, and no KL in the reward, with algorithm.advantage = "none", where the teacher alone is '
                "learned from: change one of them"
            )
        if not self.distillation:
            for name in ("distillation_skew", "distillation_top_k"):
                if getattr(self, name):
                    return f"expected algorithm.distillation > 0 with algorithm.{name}, found 0: change one of them"
            return ""
        if self.distillation_skew and self.distillation_top_k:
            return (
                "expected algorithm.distillation_skew = 0 with algorithm.distillation_top_k, which has no term to bound, found "
                f"{self.distillation_skew:g}: change one of them"
            )
        if self.loss not in ("clip", "cispo", "policy_gradient") or self.advantage == "gae" or self.dynamic_sampling:
            return (
                'expected algorithm.loss "clip", "cispo" or "policy_gradient", an advantage other than "gae" and dynamic_sampling = false '
                f'with algorithm.distillation, found "{self.loss}", "{self.advantage}" and {self.dynamic_sampling}: change one of them'
            )
        return ""

    def _unread(self) -> str:
        """Return that a setting was changed which nothing reads beside the others, or nothing."""
        plain, preset = AlgorithmSettings.model_construct(), AlgorithmSettings.model_construct(**PRESETS[self.preset])
        for name, is_read, others in self._readers():
            value = _at(self, name)
            if not is_read and value not in (_at(plain, name), _at(preset, name)):
                return (
                    f"expected algorithm.{name} to be left out with {others}, found {shown(value)}, which has no effect: change one "
                    "of them"
                )
        return ""

    def _readers(self) -> Iterator[tuple[str, bool, str]]:
        """Yield a setting (or a part, by its index), whether it changes anything, and beside what it would not."""
        several = self.epochs * self.minibatches > 1
        clips = self.loss in ("clip", "gspo", "cispo")
        yield "clip", clips or self.is_supervised, f'algorithm.loss = "{self.loss}", which does not clip'
        yield "clip.0", self.loss != "cispo", 'algorithm.loss = "cispo", whose weights have no lower bound'
        for name in ("loss", "clip", "dual_clip") if clips else ():
            yield (
                name, several or self.proximal != "recomputed",
                'algorithm.proximal = "recomputed" and one update a step (algorithm.minibatches), in which the ratio is 1',
            )  # fmt: skip
            yield (
                name, self.max_lag > 0 or self.proximal != "log_linear",
                'algorithm.proximal = "log_linear" and algorithm.max_lag = 0, where the ratio is 1',
            )  # fmt: skip
        weighs = self.correction not in ("ratio", "none", "ignored")
        yield "correction_band", weighs, f'algorithm.correction = "{self.correction}", which has no weights'
        masks = self.correction.endswith("_mask") or not weighs
        yield "correction_band.0", masks, f'algorithm.correction = "{self.correction}", which has no lower bound'
        yield "aggregation", self.loss != "dpo", 'algorithm.loss = "dpo", whose mean is over pairs'
        bounded = not self.is_supervised or self.aggregation != "constant"
        yield "aggregation", bounded, 'algorithm.loss = "cross_entropy", as max_new_tokens bounds no demonstration'
        yield (
            "dpo_beta",
            self.loss == "dpo",
            'another algorithm.loss than "dpo" (a KL penalty is algorithm.kl.coefficient)',
        )
        for name in ("kl.estimator", "kl.where"):
            yield name, self.kl.coefficient > 0, "algorithm.kl.coefficient = 0"
        yield "reference", self.needs_reference, 'algorithm.kl.coefficient = 0 and another algorithm.loss than "dpo"'
        for name in CriticSettings.model_fields:
            yield f"critic.{name}", self.needs_critic, 'another algorithm.advantage than "gae"'
        yield "critic.clip", several, "one update a step (algorithm.minibatches), in which no value has changed yet"
        yield "discount", self.credit == "turns", 'algorithm.credit = "episode"'
        yield "wait_s", self.on_stale == "wait", 'another algorithm.on_stale than "wait"'
        yield "overlong", self.advantage != "none", 'algorithm.advantage = "none", which reads no rewards'
        yield "overlong.1", self.overlong[0] > 0, "a share of 0 in algorithm.overlong"
        yield "overlong.0", self.overlong[1] > 0, "a penalty of 0 in algorithm.overlong"

    def _of_parts(self) -> str:
        if self.dynamic_sampling and self.advantage in ("gae", "reinforce_pp") and self.loss != "dpo":
            return (
                f'expected algorithm.dynamic_sampling = false with advantage = "{self.advantage}", which learns from '
                "groups with equal rewards too, found true: change one of them"
            )
        if self.on_stale == "mask" and self.compares_whole_samples:
            because = (
                'loss = "dpo"' if self.loss == "dpo" else f'kl.where = "reward" and advantage = "{self.advantage}"'
            )
            return (
                f'expected another algorithm.on_stale than "mask" with {because}, which compares whole samples, masked '
                'tokens included: set algorithm.on_stale = "wait", "requeue" or "drop"'
            )
        if self.credit == "turns" and (self.advantage != "rloo" or self.loss == "dpo"):
            return (
                'expected algorithm.advantage = "rloo" with algorithm.credit = "turns", whose baseline is the mean of the other '
                f'episodes, found "{self.advantage}" with loss = "{self.loss}": change one of them'
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
        if self.kl.coefficient and self.kl.where == "loss" and self.kl.estimator == "k1":
            return (
                'expected algorithm.kl.estimator "k2" or "k3" with kl.where = "loss", where the gradient of k1 is noise around 0, found '
                '"k1": change algorithm.kl.estimator, or set algorithm.kl.where = "reward"'
            )
        if self.advantage == "maxrl" and (
            min(self.overlong) > 0 or (self.kl.coefficient and self.kl.where == "reward")
        ):
            return (
                'expected no algorithm.overlong and no algorithm.kl.where = "reward" with algorithm.advantage = "maxrl", which divides by '
                "the mean of rewards that must be at least 0, and these make them negative: change one of them"
            )
        if self.kl.target and not self.kl.coefficient:
            return (
                "expected algorithm.kl.coefficient > 0 to start from with kl.target, found 0: set it, such as to 0.01"
            )
        return ""

    def _uncorrected(self) -> str:
        if self.max_lag == 0 or self.correction != "none" or self.loss == "dpo":
            return ""
        return (
            f'expected an off-policy correction with algorithm.max_lag = {self.max_lag}, found correction = "none": set '
            'algorithm.correction ("ratio", or "token_tis" with a recomputed proximal), or algorithm.max_lag = 0; '
            'algorithm.correction = "ignored" runs without one'
        )


def _at(table: Any, name: str) -> Any:
    """Return a setting by its path within the table, or a part of it by its index.

    >>> _at(AlgorithmSettings(), "clip.0"), _at(AlgorithmSettings(), "kl.where")
    (0.2, 'loss')
    """
    for key in name.split("."):
        table = table[int(key)] if key.isdigit() else getattr(table, key)
    return table
