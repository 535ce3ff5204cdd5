"""The ``[algorithm]`` table: the update rule as a preset's name and what is set otherwise.

A preset is a table of overrides of the defaults below; a key that is given explicitly wins over it. Formulas and papers stand
where they are computed: ``services/trainer/algorithm/advantages.py``, ``losses.py``, ``corrections.py``, ``kl.py``, ``dpo.py``;
docs/algorithms.md says when to use which. Settings that contradict one another are refused, with advice.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

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
    """How much a nat costs; 0: no penalty, and no reference is held."""
    estimator: Literal["k1", "k2", "k3"] = Field(default="k3")
    """Which estimate per token. In a reward: k1. In a loss: k2 or k3, as the gradient of k1 is noise around 0."""
    where: Literal["loss", "reward"] = Field(default="loss")
    """Added to the loss of each token, or taken off the rewards (of each token for gae and reinforce_pp, else summed
    over the sample before the group is compared)."""
    target: NonNegativeFloat = Field(default=0.0)
    """Mean KL per token (nats) that the coefficient is steered to; 0: the coefficient is fixed."""


class CriticSettings(Section):
    """The critic that advantage = "gae" needs: a language model's trunk with one output per token."""

    model: str = Field(default="")
    """Its initial weights, as policy.model; empty: those of policy.model."""
    learning_rate: NonNegativeFloat = Field(default=1e-5)
    """Of its own AdamW; constant after trainer.warmup_steps."""
    clip: NonNegativeFloat = Field(default=0.2)
    """A value moves at most so far in one step; 0: unbounded."""
    warmup_steps: NonNegativeInt = Field(default=0)
    """Steps at the start in which the critic learns and the policy stays as it is."""
    discount: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0)
    """γ: what a reward is worth one token earlier."""
    decay: Annotated[float, Field(ge=0, le=1)] = Field(default=0.95)
    """λ of generalised advantages. 1: returns minus values; lower: less variance, more trust in the critic."""


Clip = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class AlgorithmSettings(Section):
    """The update rule."""

    preset: Preset = Field(default="grpo")
    """A table of overrides of the settings below; what is set explicitly wins. `penstock settings preset` shows them."""
    groups_per_step: PositiveInt = Field(default=32)
    """Groups per step: the batch."""
    max_lag: NonNegativeInt = Field(default=1)
    """Largest lag of a sample, in steps; 0: synchronous. Admission keeps (max_lag + 1) × groups_per_step in flight."""
    on_stale: Literal["drop", "requeue"] = Field(default="drop")
    """A group over max_lag leaves, or goes back to the prompts."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "reinforce_pp_baseline", "gae"] = Field(
        default="grpo"
    )
    """How rewards become advantages: within the group (grpo divides by its deviation, dr_grpo does not, rloo leaves the
    sample itself out, maxrl divides by the mean), over the batch (reinforce_pp), or by a critic (gae)."""
    loss: Literal["clip", "gspo", "cispo", "policy_gradient", "dpo"] = Field(default="clip")
    """What is minimised: PPO's clipped ratio per token, the same per sequence (gspo), a clipped weight (cispo), plain
    policy gradient, or preferences between a group's best and worst (dpo)."""
    clip: tuple[Clip, PositiveFloat] = Field(default=(0.2, 0.2))
    """[low, high]: the ratio is clipped at 1 − low where the advantage is negative and at 1 + high where it is positive (clip, gspo);
    cispo: high is the largest weight − 1."""
    dual_clip: NonNegativeFloat = Field(default=0.0)
    """With loss = "clip", the ratio is also bounded by this where the advantage is negative; over 1, or 0: not."""
    correction: Literal[
        "ratio", "none", "ignored", "token_tis", "sequence_tis", "token_mask", "sequence_mask", "geometric_mask"
    ] = Field(default="ratio")
    """What makes up for behavior being another policy: the loss's own ratio against behavior logprobs (`ratio`), a weight
    truncated at correction_band (per token or sequence), or a band outside of which tokens or sequences count nothing. `ignored`: no correction
    though samples may be off-policy, to see what that does."""
    correction_band: tuple[NonNegativeFloat, PositiveFloat] = Field(default=(0.5, 2.0))
    """The ratios that count: truncation ends at the second number; the masks drop what is outside both."""
    proximal: Literal["behavior", "recomputed", "log_linear"] = Field(default="behavior")
    """What the clipped ratio starts from: behavior logprobs, those of the weights before this step (one more forward
    pass), or an interpolation of behavior and policy by lag."""
    aggregation: Literal["token", "sequence", "constant"] = Field(default="token")
    """A batch's loss: the mean over its tokens, over its samples' means, or the sum over samples × max_new_tokens."""
    entropy_bonus: NonNegativeFloat = Field(default=0.0)
    """Coefficient of the policy's entropy (nats per token), which is added to the objective."""
    epochs: Annotated[int, Field(ge=1, le=8)] = Field(default=1)
    """How often a batch is gone through."""
    minibatches: Annotated[int, Field(ge=1)] = Field(default=1)
    """Optimizer updates per epoch, each on its share of the groups (drawn by run.seed and the step)."""
    dynamic_sampling: bool = Field(default=False)
    """Drop groups whose rewards are all equal when they arrive (`dropped:no_signal`), and have others generated."""
    overlong: tuple[Share, NonNegativeFloat] = Field(default=(0.0, 1.0))
    """[share of sampling.max_new_tokens at whose end a sample's reward falls linearly, penalty at the full length]; a share of 0:
    length costs nothing."""
    dpo_beta: PositiveFloat = Field(default=0.1)
    """With loss = "dpo": how strongly the reference holds the policy."""
    kl: KlSettings = Field(default=KlSettings())
    """A penalty on the distance to the reference."""
    reference: Literal["trainer", "reward"] = Field(default="trainer")
    """Who holds the frozen initial policy, where one is needed: every rank of the `trainer` (with policy.lora it costs
    nothing there), or the `reward` service, whose logprobs travel with each group ([reward.reference])."""
    critic: CriticSettings = Field(default=CriticSettings())
    """The critic that advantage = "gae" needs."""

    @model_validator(mode="before")
    @classmethod
    def _overlay(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        overrides = {str(name): table for name, table in PRESETS.items()}
        return {**overrides.get(str(values.get("preset", "grpo")), {}), **values}

    @model_validator(mode="after")
    def _agree(self) -> "AlgorithmSettings":
        for found in (self._contradiction(), self._uncorrected()):
            if found:
                raise ValueError(found)
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
        return self.advantage == "gae" and self.loss != "dpo"

    def _contradiction(self) -> str:
        """Return what is wrong and what to change, or nothing."""
        by_loss = {"policy_gradient": self._of_policy_gradient, "dpo": self._of_dpo}
        return by_loss.get(self.loss, self._of_ratio)() or self._of_parts()

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
                "expected a correction where a batch is used for several updates, found none: set algorithm.correction "
                '= "token_tis", or algorithm.epochs and algorithm.minibatches to 1'
            )
        return ""

    def _of_dpo(self) -> str:
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

    def _of_parts(self) -> str:
        if self.dynamic_sampling and self.advantage in ("gae", "reinforce_pp") and self.loss != "dpo":
            return (
                f'expected algorithm.dynamic_sampling = false with advantage = "{self.advantage}", which learns from '
                "groups with equal rewards too, found true: change one of them"
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
            'algorithm.correction = "ignored" runs it all the same'
        )
