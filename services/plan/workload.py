"""The work of a step: groups, lengths, and the parts of a run that cost memory or time. Built from the run's settings."""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import NormalDist
from typing import Any

from services.plan.shapes import Shape, shape_of
from shared.errors import SettingsError
from shared.settings import Settings
from shared.settings.placement import PlacementSettings

_CHARACTERS_PER_TOKEN = 4
_ROWS = 200
_PROMPT_TOKENS = 256
"""If there is no dataset to look at."""
_MEAN_SHARE = 0.4
"""Of sampling.max_new_tokens, if no lengths are known."""
_SPREAD = 0.6
"""Standard deviation of the logarithm of a length."""
_HALVINGS = 40


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """Completion lengths in tokens: log-normal and cut at ``most``, or a ``sample`` of measured ones."""

    mean: float
    """After the cut."""
    most: int
    spread: float = _SPREAD
    sample: tuple[int, ...] = ()

    def quantiles(self, count: int) -> list[float]:
        places = [(index + 0.5) / count for index in range(count)]
        if self.sample:
            ordered = sorted(self.sample)
            return [float(ordered[int(place * len(ordered))]) for place in places]
        if self.mean >= self.most or not self.spread:
            return [float(min(self.mean, self.most))] * count
        ratios = [math.exp(self.spread * NormalDist().inv_cdf(place)) for place in places]
        median = _median(self, tuple(ratios))
        return [_cut(median * ratio, self.most) for ratio in ratios]


@functools.lru_cache(maxsize=64)
def _median(lengths: Lengths, ratios: Sequence[float]) -> float:
    """Return the median with which lengths of these ratios to it have their mean after the cut."""
    low, high = 0.0, lengths.most / ratios[0]
    for _ in range(_HALVINGS):
        median = (low + high) / 2
        is_short = sum(_cut(median * ratio, lengths.most) for ratio in ratios) < lengths.mean * len(ratios)
        low, high = (median, high) if is_short else (low, median)
    return high


def _cut(length: float, most: int) -> float:
    return min(float(most), max(1.0, length))


@dataclasses.dataclass(frozen=True, slots=True)
class ScoringModel:
    """A frozen model of the reward service."""

    shape: Shape
    weight_bytes: int
    """Per number."""
    has_logits: bool
    """A reference or a teacher, which gives logprobs of tokens; a reward model's output layer is of no size."""

    @property
    def nbytes(self) -> float:
        """Of its weights."""
        embeddings = self.shape.embeddings if self.has_logits else self.shape.vocabulary * self.shape.hidden
        return float(self.weight_bytes * (self.shape.decoder + embeddings))


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """What a run asks for, whatever the hardware."""

    shape: Shape
    weight_bytes: int
    """Per number."""
    groups: int
    group_size: int
    prompt_tokens: int
    """On average."""
    lengths: Lengths
    max_lag: int
    steps: int
    passes: float
    """Forward and backward passes over a batch, the critic's and forward passes of a third each included."""
    critic: Shape | None
    reference: bool
    """A frozen copy of the policy on every rank."""
    lora_rank: int
    scoring: tuple[ScoringModel, ...] = ()
    """On a GPU."""
    scoring_tokens: int = 0
    """Of a forward pass, padding included."""
    scores_in_turns: bool = False
    """Where trainer and replicas take turns, these models do, too; else they have a GPU of their own."""
    unknown: tuple[str, ...] = ()
    """Settings of scoring models without a config.json here."""
    counts_prompts: bool = False
    """Whether prompts were rendered and counted; else their tokens are estimated from characters."""

    @property
    def slots(self) -> int:
        return (self.max_lag + 1) * self.groups

    @property
    def samples(self) -> int:
        """Of one step."""
        return self.groups * self.group_size

    @property
    def step_tokens(self) -> float:
        """Tokens that the trainer computes in a step, a group's prompt once."""
        return self.groups * (self.prompt_tokens + self.group_size * self.lengths.mean)

    @property
    def longest(self) -> int:
        """Of a sequence, in tokens."""
        return self.prompt_tokens + self.lengths.most

    @property
    def policy_bytes(self) -> float:
        """Of one copy of the weights."""
        return float(self.shape.weights * self.weight_bytes)

    @property
    def published_bytes(self) -> float:
        """Of one version: all weights, or the adapter alone."""
        return self.policy_bytes if not self.lora_rank else float(self.trained * self.weight_bytes)

    @property
    def trained(self) -> int:
        """Weights with gradients."""
        shape = self.shape
        return shape.layers * self.lora_rank * shape.linear_sides if self.lora_rank else shape.weights


def snapshots_of(settings: Settings) -> int:
    """Return the copies of the policy that rank 0 keeps on its GPU (services/trainer/rank0/publication.py)."""
    if settings.weights.transport == "file":
        return 0
    return 1 if settings.shared_devices else 2


def workload_of(settings: Settings, model: str = "", lengths: Path | None = None) -> Workload:
    """Return the work that ``settings`` describe, with the shape ``model`` instead of policy.model. Raises
    SettingsError: the model's sizes or the lengths cannot be read.
    """
    algorithm, sampling = settings.algorithm, settings.sampling
    shape = shape_of(model or settings.policy.model)
    reference = algorithm.needs_reference and algorithm.reference == "trainer"
    critic = None
    if algorithm.needs_critic:
        critic = shape_of(algorithm.critic.model) if algorithm.critic.model else shape
    forwards = (algorithm.proximal == "recomputed") + reference
    scoring, unknown = _scoring(settings, shape)
    models = settings.reward.models
    return Workload(
        shape=shape,
        weight_bytes=4 if settings.policy.dtype == "float32" else 2,
        groups=algorithm.groups_per_step,
        group_size=sampling.group_size,
        prompt_tokens=_prompt_tokens(settings),
        lengths=_lengths(lengths, sampling.max_new_tokens),
        max_lag=algorithm.max_lag,
        steps=settings.run.steps,
        passes=algorithm.epochs + forwards / 3 + (critic is not None) * (algorithm.epochs + 1 / 3),
        critic=critic,
        reference=reference and not settings.policy.lora.rank,
        lora_rank=settings.policy.lora.rank,
        scoring=scoring,
        scoring_tokens=models.batch_tokens,
        scores_in_turns=settings.model_copy(update={"placement": PlacementSettings(mode="shared")}).scores_in_turns
        and settings.reward.replicas == 1,
        unknown=unknown,
    )


def _scoring(settings: Settings, policy: Shape) -> tuple[tuple[ScoringModel, ...], tuple[str, ...]]:
    """Return the reward service's models on a GPU, and the settings of those whose sizes cannot be read."""
    reward, algorithm = settings.reward, settings.algorithm
    if settings.model_work.device == "cpu" or not settings.kind.generates:
        return (), ()
    of_policy = 4 if settings.policy.dtype == "float32" else 2
    models = [ScoringModel(policy, of_policy, has_logits=True)] if algorithm.reference_travels else []
    named = [(scorer.model_setting, scorer.model, False) for scorer in reward.scorers if scorer.kind == "model"]
    named += [(f"model of {teacher.setting}", teacher.model, True) for teacher in reward.teachers if not teacher.url]
    unknown = []
    for setting, model, has_logits in named:
        try:
            models.append(ScoringModel(shape_of(model), of_policy if has_logits else 2, has_logits=has_logits))
        except SettingsError:
            unknown.append(setting)
    return tuple(models), tuple(unknown)


def _prompt_tokens(settings: Settings) -> int:
    files = [Path(source) for source in settings.data.sources if source.endswith(".jsonl") and Path(source).is_file()]
    if not files:
        return _PROMPT_TOKENS
    prompts = [
        row.get(settings.data.prompt_field) or row.get("messages") or "" for file in files for row in _rows(file)
    ]
    letters = [len(text if isinstance(text, str) else json.dumps(text)) for text in prompts]
    return max(1, round(sum(letters) / max(1, len(letters)) / _CHARACTERS_PER_TOKEN))


def _lengths(file: Path | None, most: int) -> Lengths:
    if file is None:
        return Lengths(max(1.0, _MEAN_SHARE * most), most)
    sample = tuple(min(most, tokens) for row in _rows(file, 10_000) for tokens in _tokens(row))
    if not sample:
        raise SettingsError(
            f'expected lines with "tokens" or "completions" in {file}, found none: give rollouts.jsonl of a run, or lines '
            'such as {"tokens": 512}'
        )
    return Lengths(sum(sample) / len(sample), most, sample=sample)


def _tokens(row: dict[str, Any]) -> Sequence[int]:
    rows = row.get("completions") or [row]
    return [
        max(1, entry["tokens"]) for entry in rows if isinstance(entry, dict) and isinstance(entry.get("tokens"), int)
    ]


def _rows(path: Path, most: int = _ROWS) -> list[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in islice(file, most) if line.strip()]
    except (OSError, ValueError) as error:
        raise SettingsError(f"expected JSON lines in {path}, found: {error}") from error
    return [row for row in rows if isinstance(row, dict)]
