"""The rules of learning that ``[algorithm]`` chooses from, and what each takes of it.

Each *choice* (the loss, the advantage, …) has options, and each option lists the settings that it takes. A setting that
some option of a choice takes and the chosen one does not is refused, by one sentence for all of them.

A new loss is an entry in :data:`LOSSES`, with its settings in :class:`RuleSettings`, and its formula in
``services/trainer/algorithm/rules/<its name>.py``. These are two files because every process reads settings, most of them
without torch, and ``shared`` imports no service.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from penstock.shared.settings.section import Section, shown


class KlSettings(Section):
    """A penalty on the distance to the reference: the initial policy, frozen."""

    coefficient: NonNegativeFloat = Field(default=0.0)
    """Cost of a nat; 0: no penalty, and no reference is held."""
    estimator: Literal["k1", "k2", "k3"] = Field(default="k3")
    """Estimator per token. `k2` and `k3` are added to the loss of each token. `k1` is subtracted from the reward: of each
    token for gae and reinforce_pp, else summed over the sample before the group is compared."""

    @property
    def in_reward(self) -> bool:
        return self.coefficient > 0 and self.estimator == "k1"

    @property
    def in_loss(self) -> bool:
        return self.coefficient > 0 and self.estimator != "k1"


class CriticSettings(Section):
    """The critic that advantage = "gae" needs: a language model's trunk with one output per token."""

    model: str = Field(default="")
    """Initial weights of the critic, as policy.model; empty: those of policy.model."""
    learning_rate: NonNegativeFloat = Field(default=1e-5)
    """Learning rate of its AdamW, constant after trainer.warmup_steps."""
    warmup_steps: NonNegativeInt = Field(default=0)
    """Steps at the start in which only the critic learns."""
    decay: Annotated[float, Field(ge=0, le=1)] = Field(default=0.95)
    """Decay λ of generalized advantages; lower: less variance, more trust in the critic."""


Below1 = Annotated[float, Field(gt=0, lt=1)]
Over1 = Annotated[float, Field(gt=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class RuleSettings(Section):
    """What the update rules take."""

    loss: str = Field(default="clip")
    """Loss: PPO's clipped ratio per token, the same per sequence (gspo), a clipped weight (cispo), plain policy
    gradient, preferences (dpo), demonstrations (cross_entropy), or your own function, `package.module:function`."""
    clip: tuple[Below1, PositiveFloat] | tuple[Below1, PositiveFloat, Over1] = Field(default=(0.2, 0.2))
    """[low, high]: the ratio is clipped at 1 − low for negative advantages, and at 1 + high for positive ones (clip,
    gspo). For cispo, high is the largest weight − 1. A third number, more than 1, bounds the ratio for negative
    advantages (dual clip; clip)."""
    proximal: Literal["behavior", "recomputed", "log_linear"] = Field(default="behavior")
    """Where the clipped ratio starts: behavior logprobs, those before this step (one more forward pass), or an
    interpolation by lag."""
    correction: Literal[
        "ratio", "none", "ignored", "token_tis", "sequence_tis", "token_mask", "sequence_mask", "geometric_mask"
    ] = Field(default="ratio")
    """For samples of another policy: the loss's own ratio to behavior logprobs (`ratio`), a weight truncated at the end
    of correction_band, or a mask of what is outside the band. `ignored`: none although samples may be off-policy."""
    correction_band: tuple[NonNegativeFloat, PositiveFloat] = Field(default=(0.5, 2.0))
    """Ratios that count, [low, high]: weights are truncated at high; masks drop what is outside."""
    aggregation: Literal["token", "sequence", "constant"] = Field(default="token")
    """Policy loss of a batch: the mean over its tokens, over its samples' means, or the sum over samples ×
    max_new_tokens."""
    advantage: str = Field(default="grpo")
    """How rewards become advantages: within the group (grpo divides by its deviation, dr_grpo does not, rloo leaves the
    sample itself out, maxrl divides by the mean), over the batch (reinforce_pp), by a critic (gae), or by your own
    `package.module:function`. none: distillation alone."""
    credit: Literal["episode", "turns"] = Field(default="episode")
    """An advantage is of the whole `episode`, or of each of its `turns`, by the rewards from it on (with advantage =
    "rloo")."""
    discount: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0)
    """With credit = "turns": what a reward counts one turn before."""
    overlong: tuple[Share, NonNegativeFloat] = Field(default=(0.0, 1.0))
    """[share of sampling.max_new_tokens over which a long sample's reward falls linearly, penalty at the full
    length]; a share of 0: length has no cost."""
    epochs: Annotated[int, Field(ge=1, le=8)] = Field(default=1)
    """Passes over a batch."""
    minibatches: Annotated[int, Field(ge=1)] = Field(default=1)
    """Optimizer updates per epoch, each on its share of the groups."""
    entropy_bonus: NonNegativeFloat = Field(default=0.0)
    """Coefficient of the policy's entropy (nats per token) in the objective."""
    dpo_beta: PositiveFloat = Field(default=0.1)
    """With loss = "dpo": how strongly the reference holds the policy."""
    distillation: NonNegativeFloat = Field(default=0.0)
    """Weight of (log teacher − log policy), which is added to each token's advantage; 0: no teacher."""
    distillation_skew: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Compare with (1 − skew) × teacher + skew × policy, which bounds what a token costs that the teacher finds
    impossible. 0: the teacher alone."""
    distillation_top_k: int = Field(default=0, ge=0, le=64)
    """The teacher's most probable tokens at each position, over which the KL is added to the loss instead of an
    advantage. 0: only the sampled token's logprob."""
    imitation: NonNegativeFloat = Field(default=0.0)
    """Weight of the loss of demonstrations: those datasets of data.path of which every row has a completion. 0:
    completions are columns like any other."""
    kl: KlSettings = Field(default=KlSettings())
    """A penalty on the distance to the reference."""
    reference: Literal["trainer", "reward"] = Field(default="trainer")
    """Where the frozen initial policy is, if needed: on every rank of the `trainer` (free with policy.lora), or in the
    `reward` service."""
    critic: CriticSettings = Field(default=CriticSettings())
    """The critic that advantage = "gae" needs."""

    @property
    def updates(self) -> int:
        """Optimizer updates of a step."""
        return self.epochs * self.minibatches


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One option of a choice."""

    takes: frozenset[str] = frozenset()
    """Settings, or parts of them by index, that change something with it."""
    because: str = ""
    """Why it takes no others."""
    check: Callable[[RuleSettings], str] = lambda _: ""
    """Returns what is wrong among those that it takes, and what to change; "": nothing is."""


def _corrects_once(settings: RuleSettings) -> str:
    start = f'with algorithm.loss = "{settings.loss}"'
    if settings.proximal == "behavior" and settings.correction != "ratio":
        advice = (
            'the ratio starts from behavior logprobs, which corrects it: set algorithm.correction = "ratio", or '
            'algorithm.proximal = "recomputed"'
        )
        return f'expected algorithm.correction = "ratio" {start}, found "{settings.correction}": {advice}'
    if settings.proximal != "behavior" and settings.correction == "ratio":
        return (
            f'expected a correction of its own {start} and proximal = "{settings.proximal}", found "ratio": the ratio starts '
            'from proximal logprobs and corrects nothing: set algorithm.correction = "token_tis"'
        )
    return ""


def _has_weights(settings: RuleSettings) -> str:
    if settings.correction == "ratio":
        return (
            'expected a correction of its own with algorithm.loss = "policy_gradient", which has no ratio, found "ratio": set '
            'algorithm.correction = "token_tis"'
        )
    if settings.correction == "none" and settings.updates > 1:
        return (
            "expected a correction where a batch is used for several updates, but it is turned off: set algorithm.correction "
            '= "token_tis", or algorithm.epochs and algorithm.minibatches to 1'
        )
    return ""


def _corrects_nothing(settings: RuleSettings) -> str:
    if settings.correction != "none":
        return (
            'expected algorithm.correction = "none" with algorithm.loss = "dpo", which has no ratio, found '
            f'"{settings.correction}": change it, or set algorithm.preset = "dpo"'
        )
    return ""


def _is_bounded(settings: RuleSettings) -> str:
    if settings.aggregation == "constant":
        return (
            'expected another algorithm.aggregation than "constant" with algorithm.loss = "cross_entropy", as max_new_tokens '
            "bounds no demonstration: leave it out"
        )
    return ""


def _learns_from_teacher(settings: RuleSettings) -> str:
    if not settings.distillation:
        return (
            'expected algorithm.distillation > 0 with algorithm.advantage = "none", where the teacher alone is learned from, '
            "found 0: change one of them"
        )
    return _reads_no_penalty(settings)


def _reads_no_penalty(settings: RuleSettings) -> str:
    if settings.kl.in_reward:
        because = "reads no rewards" if settings.advantage == "none" else "reads rewards of at least 0"
        return (
            'expected another algorithm.kl.estimator than "k1", which is subtracted from rewards, with algorithm.advantage = '
            f'"{settings.advantage}", which {because}: change one of them'
        )
    return ""


def _has_one_bound(settings: RuleSettings) -> str:
    if settings.distillation_skew and settings.distillation_top_k:
        return (
            "expected algorithm.distillation_skew = 0 with algorithm.distillation_top_k, which has no term to bound, found "
            f"{settings.distillation_skew:g}: change one of them"
        )
    return ""


_OF_REWARDS = frozenset({"overlong"})
_OF_SAMPLES = frozenset(
    {"advantage", "aggregation", "correction", "credit", "dynamic_sampling", "entropy_bonus", "filter", "imitation",
     "kl.coefficient", "overlong"}
)  # fmt: skip
_OF_RATIO = _OF_SAMPLES | {"proximal"}
OWN = "package.module:function"
"""The option of a choice that is a function of the user's own."""

LOSSES: Mapping[str, Rule] = {
    "clip": Rule(_OF_RATIO | {"clip.0", "clip.1", "clip.2", "distillation"}, check=_corrects_once),
    "gspo": Rule(_OF_RATIO | {"clip.0", "clip.1"}, "whose ratio is of whole sequences", _corrects_once),
    "cispo": Rule(_OF_RATIO | {"clip.1", "distillation"}, "whose weights have no lower bound", _corrects_once),
    "policy_gradient": Rule(_OF_SAMPLES | {"distillation"}, "which has nothing to clip", _has_weights),
    "dpo": Rule(
        frozenset({"correction", "dpo_beta", "dynamic_sampling", "entropy_bonus", "filter", "overlong"}),
        "which has no ratio and no advantages, and whose reference holds the policy by algorithm.dpo_beta",
        _corrects_nothing,
    ),
    "cross_entropy": Rule(frozenset({"aggregation"}), "which has no rewards and no behavior logprobs", _is_bounded),
    OWN: Rule(_OF_RATIO, "which is your own function", _corrects_once),
}
ADVANTAGES: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("grpo", "dr_grpo", "reinforce_pp_baseline", OWN),
        Rule(
            _OF_REWARDS | {"dynamic_sampling", "distillation"}, "whose baseline is not the mean of the other episodes"
        ),
    ),
    "rloo": Rule(_OF_REWARDS | {"credit", "dynamic_sampling", "distillation"}),
    "maxrl": Rule(
        frozenset({"dynamic_sampling", "distillation"}),
        "which divides by the mean of rewards that must be at least 0, and this makes them negative",
        _reads_no_penalty,
    ),
    "reinforce_pp": Rule(_OF_REWARDS | {"distillation"}, "which learns from groups with equal rewards too"),
    "gae": Rule(
        _OF_REWARDS | {f"critic.{name}" for name in CriticSettings.model_fields},
        "which learns from groups with equal rewards, and from values instead of a teacher",
    ),
    "none": Rule(frozenset({"distillation"}), "which reads no rewards", _learns_from_teacher),
}
_TRUNCATES = Rule(frozenset({"correction_band.1"}), "which has no lower bound")
_MASKS = Rule(frozenset({"correction_band.0", "correction_band.1"}))
CORRECTIONS: Mapping[str, Rule] = {
    **dict.fromkeys(("ratio", "none", "ignored"), Rule(because="which has no weights")),
    **dict.fromkeys(("token_tis", "sequence_tis"), _TRUNCATES),
    **dict.fromkeys(("token_mask", "sequence_mask", "geometric_mask"), _MASKS),
}
PENALTIES: Mapping[str, Rule] = {"on": Rule(frozenset({"kl.estimator"})), "0": Rule()}
TEACHERS: Mapping[str, Rule] = {
    "on": Rule(frozenset({"distillation_skew", "distillation_top_k"}), "which gives groups with equal rewards a signal", _has_one_bound),
    "0": Rule(frozenset({"dynamic_sampling"})),
}  # fmt: skip
CHOICES: Mapping[str, Mapping[str, Rule]] = {
    "loss": LOSSES,
    "advantage": ADVANTAGES,
    "correction": CORRECTIONS,
    "credit": {"episode": Rule(), "turns": Rule(frozenset({"discount"}))},
    "kl.coefficient": PENALTIES,
    "distillation": TEACHERS,
}
_READ_BY_THE_LOSS_ALONE = frozenset({"aggregation", "clip", "correction_band"})
"""A preset may set them for another loss than the chosen one."""


def refusal(settings: RuleSettings, preset: RuleSettings) -> str:
    """Return what a chosen rule does not take or finds wrong, and what to change; "" if nothing is.

    ``preset`` has the values of the chosen preset.
    """
    plain, rules = type(settings).model_construct(), list(_chosen(settings))
    for choice, option, rule in rules:
        for name in sorted(_owned(choice) - rule.takes):
            value, known = at(settings, name), [at(plain, name)]
            if name.partition(".")[0] in _READ_BY_THE_LOSS_ALONE:
                known.append(at(preset, name))
            if value not in known:
                return _left_out(name, value, choice, option, rule)
    return next(filter(None, (rule.check(settings) for _, _, rule in rules)), "")


def at(table: Any, name: str) -> Any:
    """Return a setting by its path within the table, or a part of it by its index; None: it has no such part.

    >>> at(RuleSettings(), "clip.0"), at(RuleSettings(), "clip.2"), at(RuleSettings(), "kl.estimator")
    (0.2, None, 'k3')
    """
    for key in name.split("."):
        is_part = key.isdigit()
        table = table[int(key)] if is_part and int(key) < len(table) else None if is_part else getattr(table, key)
    return table


def _chosen(settings: RuleSettings) -> Iterator[tuple[str, str, Rule]]:
    for choice, options in CHOICES.items():
        value = at(settings, choice)
        if isinstance(value, float):
            yield choice, f"{value:g}", options["on" if value else "0"]
        else:
            yield choice, shown(value), options[OWN if ":" in value else value]


def _owned(choice: str) -> frozenset[str]:
    return frozenset().union(*(rule.takes for rule in CHOICES[choice].values()))


def _left_out(name: str, value: object, choice: str, option: str, rule: Rule) -> str:
    takers = [shown(other) if other != "on" else "above 0" for other, of in CHOICES[choice].items() if name in of.takes]
    because = f", {rule.because}" if rule.because else ""
    return (
        f"expected algorithm.{name} to be left out with algorithm.{choice} = {option}{because}, found {shown(value)}: change one "
        f"of them; it is for algorithm.{choice} {' or '.join(takers)}"
    )
