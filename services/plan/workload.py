"""The work of a step: groups, lengths, and the parts of a run that cost memory or time. Built from the run's settings."""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import NormalDist
from typing import Any

from penstock.services.plan.shapes import Shape, shape_of
from penstock.shared.errors import SettingsError
from penstock.shared.model.context import check_rows
from penstock.shared.settings import RunKind, Settings

_CHARACTERS_PER_TOKEN = 4
_ROWS = 200
_PROMPT_TOKENS = 256
"""If there is no dataset to look at."""
_MEAN_SHARE = 0.4
"""Of sampling.max_new_tokens, if no lengths are known."""
_SPREAD = 0.6
"""Standard deviation of the logarithm of a length."""
_HALVINGS = 40
_BLOCK_TOKENS = 16
"""Of vLLM's prefix cache: half of one is read again with each turn."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """Completion lengths in tokens: log-normal and cut at ``most``, or a ``sample`` of measured ones."""

    mean: float
    """After the cut."""
    most: int
    spread: float = _SPREAD
    sample: tuple[int, ...] = ()

    @classmethod
    def of(cls, sample: Sequence[int]) -> "Lengths":
        return cls(sum(sample) / len(sample), max(sample), sample=tuple(sample))

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
class Turns:
    """Several turns of a sample, on average; ``Workload.lengths`` are the tokens that it samples in all of them."""

    turns: float
    given_tokens: float
    """After the prompt: of tools, or an agent."""
    wait_s: float
    """Between all of its turns, for tools or an agent."""
    most_tokens: int
    """That one of its turns samples."""
    has_cache: bool = True
    """Whether a turn finds its history in the replica's prefix cache; else each reads it again."""


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
    uncounted: tuple[str, ...] = ()
    """Models of the reward service on a GPU, by setting: neither their memory nor their time is planned."""
    counts_prompts: bool = False
    """Whether prompts were rendered and counted; else their tokens are estimated from characters."""
    episode: Turns | None = None
    """None: a sample is one completion."""
    replays: bool = False
    """Whether the experts of each token travel (``trainer.router_replay``)."""
    kind: RunKind = RunKind.SAMPLES
    """With demonstrations or pairs, a group is one of them, and ``lengths`` are those of the data, unknown without ``sample``."""

    @property
    def sample_tokens(self) -> float:
        """After the prompt, on average."""
        return self.lengths.mean + (self.episode.given_tokens if self.episode else 0.0)

    @property
    def read_tokens(self) -> float:
        """That replicas read for a group: its prompt once, what is given, and history that they have not cached."""
        if self.episode is None:
            return float(self.prompt_tokens)
        history = self.prompt_tokens + self.sample_tokens / 2
        again = (self.episode.turns - 1) * (_BLOCK_TOKENS / 2 if self.episode.has_cache else history)
        return self.prompt_tokens + self.group_size * (self.episode.given_tokens + again)

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
        return self.groups * (self.prompt_tokens + self.group_size * self.sample_tokens)

    @property
    def longest(self) -> int:
        """Of a sequence, in tokens."""
        return self.prompt_tokens + self.lengths.most + round(self.sample_tokens - self.lengths.mean)

    @property
    def policy_bytes(self) -> float:
        """Of one copy of the weights."""
        return float(self.shape.weights * self.weight_bytes)

    @property
    def published_bytes(self) -> float:
        """Of one version: all weights, or the adapter alone; a supervised run publishes none."""
        if not self.kind.generates:
            return 0.0
        return self.policy_bytes if not self.lora_rank else float(self.trained * self.weight_bytes)

    @property
    def trained(self) -> int:
        """Weights with gradients."""
        shape = self.shape
        return shape.layers * self.lora_rank * shape.linear_sides if self.lora_rank else shape.weights

    @property
    def trained_experts(self) -> int:
        """Those of them that are of experts."""
        return 0 if self.lora_rank else self.shape.expert_weights


def snapshots_of(settings: Settings) -> int:
    """Return the copies of the policy that rank 0 keeps on its GPU (services/trainer/rank0/publication.py)."""
    if settings.weights.transport == "file" or not settings.kind.generates:
        return 0
    return 1 if settings.shared_devices else 2


def workload_of(settings: Settings, model: str = "") -> Workload:
    """Return the work that ``settings`` describe, with the shape ``model`` instead of policy.model. Raises
    SettingsError: the model's sizes cannot be read, or trainer.expert_parallel or sequence_parallel cannot divide it.
    """
    algorithm, sampling = settings.algorithm, settings.sampling
    shape = shape_of(model or settings.policy.model)
    reference = algorithm.needs_reference and algorithm.reference == "trainer"
    critic = None
    if algorithm.needs_critic:
        critic = shape_of(algorithm.critic.model) if algorithm.critic.model else shape
    for of in (shape, critic or shape):
        _check_experts(of, settings.trainer.expert_parallel)
        check_rows(
            settings.trainer.sequence_parallel,
            of.mixer,
            has_dropout=bool(settings.policy.lora.rank and settings.policy.lora.dropout),
        )
    forwards = (algorithm.proximal == "recomputed") + reference
    kind, prompt_tokens, completions = settings.kind, *_estimated(settings)
    lengths = Lengths(max(1.0, _MEAN_SHARE * sampling.max_new_tokens), sampling.max_new_tokens)
    if not kind.generates:
        lengths = Lengths.of(completions) if completions else Lengths(1, 1)
    return Workload(
        shape=shape,
        weight_bytes=4 if settings.policy.dtype == "float32" else 2,
        groups=algorithm.groups_per_step,
        group_size=sampling.group_size if kind.generates else 1 + (kind is RunKind.PAIRS),
        prompt_tokens=prompt_tokens,
        lengths=lengths,
        max_lag=algorithm.max_lag,
        steps=settings.run.steps,
        passes=algorithm.epochs + forwards / 3 + (critic is not None) * (algorithm.epochs + 1 / 3),
        critic=critic,
        reference=reference and not settings.policy.lora.rank,
        lora_rank=settings.policy.lora.rank,
        uncounted=tuple(_scoring_models(settings)),
        replays=settings.trainer.router_replay,
        kind=kind,
    )


def _check_experts(shape: Shape, ranks: int) -> None:
    if ranks > 1 and (not shape.experts or shape.experts % ranks):
        has = (
            f"{shape.experts} in {shape.name}"
            if shape.experts
            else f"{shape.name}, whose experts cannot be divided, or which has none"
        )
        raise SettingsError(
            f"expected a mixture whose experts trainer.expert_parallel = {ranks} divides, found {has}: change it, or leave it out"
        )


def with_turns(work: Workload, settings: Settings, turns: float, given_tokens: float, wait_s: float) -> Workload:
    """Return ``work`` with samples that are episodes of ``turns`` on average, each sampled as one of ``work``.

    Raises:
        SettingsError: episodes of ``settings`` cannot be so.
    """
    if not 1 <= turns <= settings.episodes.max_turns or given_tokens < 0 or wait_s < 0:
        raise SettingsError(
            f"expected 1 to {settings.episodes.max_turns} turns of an episode (episodes.max_turns), and tokens and seconds of at least 0, "
            f"found {turns:g}, {given_tokens:g} and {wait_s:g}"
        )
    contexts = [each for each in (settings.rollout.max_model_len, settings.trainer.row_tokens) if each]
    room = min(contexts) - work.prompt_tokens - round(given_tokens)
    if room < turns:
        raise SettingsError(
            f"expected room for {turns:g} turns in the {min(contexts):,} tokens of rollout.max_model_len and {settings.trainer.row_setting}, "
            f"of which prompts take {work.prompt_tokens:,} and what is given {given_tokens:,.0f}: raise them"
        )
    most = min(room, work.lengths.most * settings.episodes.max_turns)
    lengths = dataclasses.replace(work.lengths, mean=min(turns * work.lengths.mean, most), most=most)
    has_cache = (
        bool(settings.rollout.vllm.arguments.get("enable_prefix_caching", True)) and settings.weights.kv == "keep"
    )
    episode = Turns(turns, given_tokens, wait_s, min(work.lengths.most, most), has_cache)
    return dataclasses.replace(work, lengths=lengths, episode=episode)


def _scoring_models(settings: Settings) -> Iterator[str]:
    if settings.model_work.device == "cpu" or not settings.kind.generates:
        return
    if settings.algorithm.reference_travels:
        yield "algorithm.reference"
    yield from (scorer.model_setting for scorer in settings.reward.scorers if scorer.kind == "model")
    yield from (f"model of {teacher.setting}" for teacher in settings.reward.teachers if not teacher.url)


def _estimated(settings: Settings) -> tuple[int, list[int]]:
    """Return the mean tokens of prompts, and those of each completion in the data, from characters."""
    files = [Path(source) for source in settings.data.sources if source.endswith(".jsonl") and Path(source).is_file()]
    if not files:
        return _PROMPT_TOKENS, []
    data, rows = settings.data, [row for file in files for row in _rows(file)]
    prompts, completions = [row.get(data.prompt_field) or row.get("messages") or "" for row in rows], list[Any]()
    if not settings.kind.generates:
        for at, row in enumerate(rows):
            answers = [row.get(name) or "" for name in (data.completion_field, data.rejected_field) if name]
            if not any(answers) and isinstance(prompts[at], list):  # messages, which end with the completion
                prompts[at], answers = prompts[at][:-1], [prompts[at][-1:]]
            completions += answers
    tokens = sum(map(_tokens, prompts)) / max(1, len(prompts))
    return max(1, round(tokens)), [max(1, round(_tokens(each))) for each in completions]


def _tokens(text: object) -> float:
    return len(text if isinstance(text, str) else json.dumps(text)) / _CHARACTERS_PER_TOKEN


def _rows(path: Path, most: int = _ROWS) -> list[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in islice(file, most) if line.strip()]
    except (OSError, ValueError) as error:
        raise SettingsError(f"expected JSON lines in {path}, found: {error}") from error
    return [row for row in rows if isinstance(row, dict)]
