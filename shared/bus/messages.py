"""Messages on the bus and their parts::

    Prompt ──▶ RolloutGroup(prompt, samples) ──▶ Experience(group, rewards) ──▶ PolicyRecord ──▶ PolicyUpdate

Times are Unix seconds, token ids int32, logprobs float32 nats under the sampling distribution (after temperature).
``T``: completion tokens, ``P``: prompt tokens, ``K``: spans.
"""

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.shared.bus.encoding.columns import Joined
from penstock.shared.bus.encoding.validation import FieldLimits
from penstock.shared.bus.encoding.wire import columns, message, record

GroupId = NewType("GroupId", int)
"""Place in the run's order of admission: 0, 1, 2, …; never reused."""
PolicyVersion = NewType("PolicyVersion", int)
"""Number of a set of weights; never reused. 0 is the initial policy."""

MOST_SAMPLES = 65_536
MOST_TEACHER_TOKENS = 64
"""Most probable tokens of a teacher that travel with a position."""
LARGEST_MASS = 1.001
"""Largest sum of probabilities of different tokens: float32 rounds."""
_ID = FieldLimits(0, (1 << 53) - 1)
_INT32 = FieldLimits(0, (1 << 31) - 1)
_NAME = FieldLimits(length=1024)
_TIME = FieldLimits(0.0, 1e11)
_BYTES = FieldLimits(0.0, 1e18)
_LOGPROB = FieldLimits(-80.0, 0.1)
"""Probabilities are at least e⁻⁸⁰; above 0 is rounding."""
_LARGEST = float(np.finfo(np.float32).max)
_ANY_LOGPROB = FieldLimits(-1e6, 0.1)
_DIFFERENCE = FieldLimits(-1e6, 1e6)
_TEACHER_LOGPROB = FieldLimits(-1e6, 0.0)
_TOP_IDS = FieldLimits(0, (1 << 31) - 1, shape=(None, None))
_TOP_LOGPROBS = FieldLimits(-1e6, 0.0, shape=(None, None))

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"
Int32Array: TypeAlias = npt.NDArray[np.int32]
Float32Array: TypeAlias = npt.NDArray[np.float32]


class Purpose(StrEnum):
    """Why a prompt is generated."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    ASK = "ask"
    DEMONSTRATE = "demonstrate"
    """Its sample is of the dataset, not of a policy."""


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"


class ScoreStatus(StrEnum):
    """Outcomes of a scorer. All but ``UNAVAILABLE`` carry a value.

    ``TIMEOUT``, ``CRASHED``, ``MEMORY``, ``OUTPUT_LIMIT``, ``FORBIDDEN``: the *completion* made its check fail.
    ``UNAVAILABLE``: the scorer could not work; the group is retried, then buried, never scored 0.
    """

    OK = "ok"
    WRONG_FORMAT = "wrong_format"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    FORBIDDEN = "forbidden"
    UNAVAILABLE = "unavailable"


@record
@dataclasses.dataclass(frozen=True, slots=True)
class ChatMessage:
    role: Annotated[str, _NAME]
    content: str


@record
@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """Generation parameters. ``temperature`` 0 is greedy."""

    samples: Annotated[int, FieldLimits(1, MOST_SAMPLES)]
    max_new_tokens: Annotated[int, FieldLimits(1, (1 << 31) - 1)]
    temperature: Annotated[float, FieldLimits(0.0, 1e6)]
    top_k: Annotated[int, _INT32] = 0
    """0: all tokens; above 0 with every truncation."""
    top_p: Annotated[float, FieldLimits(0.0, 1.0)] = 1.0
    min_p: Annotated[float, FieldLimits(0.0, 1.0)] = 0.0
    min_new_tokens: Annotated[int, _INT32] = 0
    """Tokens before which no stop token is drawn."""
    stop: Annotated[tuple[str, ...], FieldLimits(length=65_536)] = ()
    """Texts that end a completion, which includes them."""

    @property
    def is_restricted(self) -> bool:
        """Whether some tokens cannot be drawn at some positions."""
        return self.temperature > 0 and (self.top_k > 0 or self.min_new_tokens > 0)


@message("prompt", schema=1)
@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One problem with its reference answer.

    A replica needs at least ``min_version`` before it generates, which bounds the lag.
    """

    group_id: Annotated[GroupId, _ID]
    problem: Annotated[str, FieldLimits(length=65_536)]
    """Dataset place, ``file:line``."""
    sampling: Sampling
    text: str | None = None
    messages: Annotated[tuple[ChatMessage, ...], FieldLimits(length=65_536)] | None = None
    answer: str | None = None
    extra: dict[str, Json] = dataclasses.field(default_factory=dict)
    min_version: Annotated[PolicyVersion, _INT32] = PolicyVersion(0)
    purpose: Purpose = Purpose.TRAIN
    admitted_at_s: Annotated[float, _TIME] = 0.0
    requeues: Annotated[int, _INT32] = 0
    scorers: Annotated[tuple[str, ...], _NAME] = ()
    """Empty: all scorers."""
    sample: Annotated[int, _INT32] | None = None
    """The only sample to generate, by its index in the group; None: all of them."""
    teachers: Annotated[tuple[str, ...], _NAME] = ()
    """By ``data.teacher_field``: the teachers of this problem."""
    row_id: Annotated[str, FieldLimits(length=64)] = ""
    """Digest of the row's question and answer; empty: from an older Penstock."""

    @property
    def stable_id(self) -> str:
        """Names the problem wherever its row is."""
        return self.row_id or self.problem


def _check_samples(arrays: Mapping[str, Joined]) -> None:
    missing = {"token_ids", "behavior_logprobs", "version_spans"} - arrays.keys()
    if missing:
        raise ValueError(f"expected arrays as {', '.join(sorted(missing))}")
    tokens, spans = arrays["token_ids"].lengths, arrays["version_spans"]
    if "support_sizes" in arrays or "support_ids" in arrays:
        _check_supports(arrays["token_ids"], arrays.get("support_sizes"), arrays.get("support_ids"))
    if "teacher_logprobs" in arrays and tokens != arrays["teacher_logprobs"].lengths:
        raise ValueError("expected one teacher logprob a token, found other lengths")
    if "teacher_top_ids" in arrays or "teacher_top_logprobs" in arrays:
        _check_tops(arrays["token_ids"], arrays.get("teacher_top_ids"), arrays.get("teacher_top_logprobs"))
    if tokens != arrays["behavior_logprobs"].lengths:
        raise ValueError("expected one behavior logprob a token, found other lengths")
    if min(tokens) < 1 or min(spans.lengths) < 1:
        raise ValueError("expected at least one token and one version span in each sample, found fewer")
    if not _ascend(spans.joined[:, 0], spans.lengths, tokens):
        raise ValueError(
            "expected version spans that begin at token 0 and ascend below the sample's length, found others"
        )


def _check_supports(tokens: Joined, sizes: Joined | None, ids: Joined | None) -> None:
    """Check that each drawn token was possible."""
    if sizes is None or ids is None or any(n not in (0, t) for n, t in zip(sizes.lengths, tokens.lengths, strict=True)):
        raise ValueError("expected a support of every token, or of none, found others")
    if not any(sizes.lengths) and not any(ids.lengths):
        return
    counts = np.abs(sizes.joined.astype(np.int64))
    sums = np.add.reduceat(np.append(counts, 0), np.cumsum([0, *sizes.lengths[:-1]])) * (np.array(sizes.lengths) > 0)
    if sums.tolist() != ids.lengths:
        raise ValueError("expected as many support ids as the sizes say, found others")
    drawn = np.concatenate(
        [no_ids(), *(part for part, size in zip(tokens.split(), sizes.lengths, strict=True) if size)]
    )
    owner = np.repeat(np.arange(len(counts)), counts)
    hits = np.bincount(owner[ids.joined == drawn[owner]], minlength=len(counts))
    if ((hits > 0) != (sizes.joined > 0))[sizes.joined != 0].any():
        raise ValueError("expected drawn tokens within their support, found others")


def _check_tops(tokens: Joined, ids: Joined | None, logprobs: Joined | None) -> None:
    """Check that each position has as many different tokens, whose probabilities are those of a distribution."""
    if ids is None or logprobs is None or not tokens.lengths == ids.lengths == logprobs.lengths:
        raise ValueError("expected a teacher's most probable tokens and their logprobs at every position, found others")
    if ids.joined.shape != logprobs.joined.shape or not 1 <= ids.joined.shape[1] <= MOST_TEACHER_TOKENS:
        raise ValueError(
            f"expected 1 to {MOST_TEACHER_TOKENS} most probable tokens of a teacher with a logprob each, found "
            f"{ids.joined.shape[1]} with {logprobs.joined.shape[1]}"
        )
    if wrong := no_distribution(ids.joined, logprobs.joined):
        raise ValueError(f"expected a teacher's most probable tokens, found {wrong}")


def no_distribution(ids_NK: Int32Array, logprobs_NK: Float32Array) -> str:  # noqa: N803 (shapes)
    """Return why the rows cannot be tokens of a distribution and their logprobs, or nothing."""
    if (ids_NK[:, 1:] <= ids_NK[:, :-1]).any():
        return "ids that do not ascend"
    largest = float(np.exp(logprobs_NK).sum(1).max(initial=0.0))
    return "" if largest <= LARGEST_MASS else f"probabilities whose sum is {largest:.4g}"


def _ascend(starts: Int32Array, spans: list[int], tokens: list[int]) -> bool:
    """Whether each sample's spans begin at token 0 and ascend."""
    places = iter(starts.tolist())
    for count, length in zip(spans, tokens, strict=True):
        if (place := next(places)) != 0:
            return False
        for _ in range(count - 1):
            before, place = place, next(places)
            if not before < place < length:
                return False
    return True


def no_ids() -> Int32Array:
    """Return an empty array."""
    return np.zeros(0, dtype=np.int32)


def no_logprobs() -> Float32Array:
    """Return an empty array."""
    return np.zeros(0, dtype=np.float32)


@columns(_check_samples)
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One completion with its tokens and behavior logprobs.

    ``version_spans`` (int32, K × 2) has rows (first token, policy version)::

        token_ids          41  9  3 17  2
        version_spans      [[0, 7], [3, 8]]        oldest_version 7, newest_version 8

    With truncated sampling, ``support_sizes`` has the number of tokens that could be drawn at each position, and
    ``support_ids`` these tokens, concatenated. A negative size lists the tokens that could *not* be drawn; 0: all could.
    """

    token_ids: Annotated[Int32Array, _INT32]
    behavior_logprobs: Annotated[Float32Array, _LOGPROB]
    version_spans: Annotated[Int32Array, FieldLimits(0, (1 << 31) - 1, shape=(None, 2))]
    finish_reason: FinishReason
    text: str
    support_sizes: Annotated[Int32Array, FieldLimits(-(1 << 31), (1 << 31) - 1)] = dataclasses.field(
        default_factory=no_ids
    )
    support_ids: Annotated[Int32Array, _INT32] = dataclasses.field(default_factory=no_ids)
    teacher_logprobs: Annotated[Float32Array, _TEACHER_LOGPROB] | None = None
    """Of the tokens, under the problem's teachers, at the sampling temperature; None: the problem has no teacher."""
    teacher_top_ids: Annotated[Int32Array, _TOP_IDS] | None = None
    """The teacher's k most probable tokens at each position (T × k), ascending by id; None: not asked for."""
    teacher_top_logprobs: Annotated[Float32Array, _TOP_LOGPROBS] | None = None
    """Their logprobs (T × k), over the whole vocabulary, at the sampling temperature."""

    @property
    def oldest_version(self) -> PolicyVersion:
        return PolicyVersion(int(self.version_spans[:, 1].min()))

    @property
    def newest_version(self) -> PolicyVersion:
        return PolicyVersion(int(self.version_spans[:, 1].max()))

    @property
    def versions(self) -> frozenset[PolicyVersion]:
        return frozenset(PolicyVersion(int(version)) for version in self.version_spans[:, 1])


@message("rollout_group", schema=1)
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RolloutGroup:
    """All samples of one prompt, unscored."""

    prompt: Prompt
    prompt_token_ids: Annotated[Int32Array, _INT32]
    samples: Annotated[tuple[Sample, ...], FieldLimits(length=MOST_SAMPLES)]
    replica: Annotated[str, _NAME]
    started_at_s: Annotated[float, _TIME]
    finished_at_s: Annotated[float, _TIME]
    places: Annotated[tuple[int, ...], FieldLimits(0, MOST_SAMPLES, length=MOST_SAMPLES)] = ()
    """Of samples that travel together to their group: their indexes in it; empty: one sample, or the whole group."""

    def check(self) -> None:
        """Raise ValueError for more samples than requested."""
        if len(self.samples) > self.prompt.sampling.samples:
            raise ValueError(
                f"expected at most the {self.prompt.sampling.samples} samples of the prompt, found {len(self.samples)}"
            )

    @property
    def group_id(self) -> GroupId:
        return self.prompt.group_id

    @property
    def newest_version(self) -> PolicyVersion:
        return max(sample.newest_version for sample in self.samples)

    @property
    def oldest_version(self) -> PolicyVersion:
        return min(sample.oldest_version for sample in self.samples)

    @property
    def versions(self) -> frozenset[PolicyVersion]:
        return frozenset().union(*(sample.versions for sample in self.samples))

    @property
    def teacher_top_k(self) -> int:
        """How many of its teacher's most probable tokens every position has."""
        return min(0 if ids is None else ids.shape[1] for ids in (sample.teacher_top_ids for sample in self.samples))


@record
@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """One scorer's result. ``value`` is None exactly if ``status`` is ``UNAVAILABLE``."""

    scorer: Annotated[str, _NAME]
    status: ScoreStatus
    value: float | None
    detail: str = ""
    lenient: tuple[str, ...] = ()
    """Lenient rules that the value depends on (docs/rewards.md, "Leniency")."""
    parts: Annotated[dict[str, float], FieldLimits(length=1024)] = dataclasses.field(default_factory=dict)
    """Values of the scorer's functions, if it has several."""

    def check(self) -> None:
        """Raise ValueError if value and status disagree."""
        if (self.value is None) != (self.status is ScoreStatus.UNAVAILABLE):
            raise ValueError(
                f"expected a value exactly of a scorer that did its work, found {self.value} as {self.status}"
            )


@record
@dataclasses.dataclass(frozen=True, slots=True)
class SampleScores:
    """One sample's scores, in the order of the settings."""

    scores: Annotated[tuple[Score, ...], FieldLimits(length=1024)]


@message("experience", schema=1)
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """A group with its rewards: ``rewards[i]`` (float32) and ``scores[i]`` of ``group.samples[i]``;
    ``reference_logprobs`` of all samples' tokens, concatenated.
    """

    group: RolloutGroup
    rewards: Annotated[Float32Array, FieldLimits(-_LARGEST, _LARGEST)]
    scores: Annotated[tuple[SampleScores, ...], FieldLimits(length=MOST_SAMPLES)]
    scored_at_s: Annotated[float, _TIME]
    score_s: float
    reference_logprobs: Annotated[Float32Array, _ANY_LOGPROB] | None = None
    """Under the initial policy, at the sampling temperature; None: computed by the trainer."""

    def check(self) -> None:
        """Raise ValueError if the parts do not fit the samples."""
        samples = len(self.group.samples)
        if not samples or len(self.rewards) != samples or len(self.scores) != samples:
            raise ValueError(
                f"expected samples, a reward and scores of each, found {samples} samples, {len(self.rewards)} rewards and "
                f"{len(self.scores)} scores"
            )
        if self.reference_logprobs is not None:
            tokens = sum(len(sample.token_ids) for sample in self.group.samples)
            if len(self.reference_logprobs) != tokens:
                raise ValueError(f"expected {tokens} reference logprobs, found {len(self.reference_logprobs)}")

    @property
    def group_id(self) -> GroupId:
        return self.group.group_id


@record
@dataclasses.dataclass(frozen=True, slots=True)
class Misfit:
    """A forward pass without enough memory: all ranks split it, or skip a single sample on ``ranks``."""

    attempt: Annotated[int, _INT32]
    """Index of the pass, with failed ones."""
    ranks: Annotated[tuple[int, ...], _INT32]


@message("step_plan", schema=2)
@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """A step's trained tokens and their distribution over forward passes, for bitwise replays."""

    micro_batch_tokens: Annotated[int, FieldLimits(1, (1 << 53) - 1)]
    layout: str
    """Digest of samples per micro-batch and rank."""
    misfits: tuple[Misfit, ...] = ()
    contexts: Annotated[tuple[int, ...], _INT32] = ()
    """How many first tokens of each sample were not trained; empty: none."""
    settings: str = ""
    """Digest of the settings that determined the update; empty: not known."""


@record
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Sequences with the trainer's logprobs, by which a replica checks its weights.

    Concatenated; lengths [3, 2] give five ``token_ids``, and three of each of the others::

        token_ids   41  9  3 | 17  2
        logprobs        a  b |     c        nats, teacher-forced at temperature 1
    """

    token_ids: Annotated[Int32Array, _INT32]
    lengths: Annotated[Int32Array, FieldLimits(1, (1 << 31) - 1)]
    logprobs: Annotated[Float32Array, _ANY_LOGPROB]
    noise: Annotated[Float32Array, _DIFFERENCE] = dataclasses.field(default_factory=no_logprobs)
    """What rounding to the replicas' number type changes in them; empty: not known (an older Penstock)."""
    change: Annotated[Float32Array, _DIFFERENCE] = dataclasses.field(default_factory=no_logprobs)
    """What the step changed in them, rounded otherwise than ``logprobs``; empty: not a step of this process."""

    def check(self) -> None:
        """Raise ValueError if the lengths disagree."""
        tokens, sequences = len(self.token_ids), len(self.lengths)
        scored = (len(self.logprobs), len(self.noise) or len(self.logprobs), len(self.change) or len(self.logprobs))
        if int(self.lengths.sum(dtype=np.int64)) != tokens or set(scored) != {tokens - sequences}:
            raise ValueError(
                f"expected lengths and logprobs of {tokens} tokens, found {sequences} sequences and {scored[0]} logprobs, "
                f"{len(self.noise)} of their noise and {len(self.change)} changes"
            )

    def sequences(self) -> list[tuple[Int32Array, Float32Array]]:
        """Return (token ids, logprobs of all but the first)."""
        ends = np.cumsum(self.lengths).tolist()
        starts = [0, *ends[:-1]]
        return [
            (self.token_ids[start:end], self.logprobs[start - place : end - place - 1])
            for place, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]


@message("policy_record", schema=1)
@dataclasses.dataclass(frozen=True, slots=True)
class PolicyRecord:
    """The ledger's record of a version."""

    version: Annotated[PolicyVersion, _INT32]
    parent: Annotated[PolicyVersion, _INT32] | None
    step: Annotated[int, _ID]
    created_at_s: Annotated[float, _TIME]
    manifest_digest: Annotated[str, _NAME]
    """SHA-256, hex, of the pull's header or snapshot's manifest."""
    location: str
    """Snapshot folder; empty: none."""
    metrics: Annotated[dict[str, float], FieldLimits(finite=False)] = dataclasses.field(default_factory=dict)
    source: Annotated[str, _NAME] = ""
    """``host:port`` of the trainer; empty: by file only."""
    probe: Probe | None = None
    settings_revision: Annotated[int, _ID] = 0
    traced: Annotated[tuple[int, ...], _ID] = ()
    """Groups of its step that are traced."""


@message("policy_update", schema=1)
@dataclasses.dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """The coordinator's message that ``record.version`` is the head."""

    record: PolicyRecord
    promoted_at_s: Annotated[float, _TIME]
    sources: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """By replica: addresses in order, the trainer's last."""


@message("step_report", schema=1)
@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """Measurements of a step; docs/reference/metrics.md lists ``metrics``."""

    step: Annotated[int, _ID]
    version: Annotated[PolicyVersion, _INT32]
    finished_at_s: Annotated[float, _TIME]
    samples: Annotated[int, _ID]
    metrics: Annotated[dict[str, float], FieldLimits(finite=False)]
    lag_counts: Annotated[dict[str, int], _ID]
    """Samples by lag in steps: {"0": 480, "1": 32}."""


@message("event", schema=1)
@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """An event, for people and audits."""

    at_s: Annotated[float, _TIME]
    source: str
    name: str
    detail: str
    fields: dict[str, Json] = dataclasses.field(default_factory=dict)


@record
@dataclasses.dataclass(frozen=True, slots=True)
class MemorySample:
    """What a process held on a device during a phase, at its peak."""

    device: Annotated[str, _NAME]
    """Of one host: its name, and the GPU's (``cpu`` without one)."""
    phase: Annotated[str, _NAME]
    ended_at_s: Annotated[float, _TIME]
    seconds: Annotated[float, _TIME]
    total_bytes: Annotated[float, _BYTES]
    """On a GPU what torch allocated, else what is resident; components add up to it, ``other`` being the rest."""
    capacity_bytes: Annotated[float, _BYTES]
    components: Annotated[dict[str, float], _BYTES]
    """Bytes, by the names of ``penstock plan``."""


@message("memory_report", schema=1)
@dataclasses.dataclass(frozen=True, slots=True)
class MemoryReport:
    """A process's samples since its last report: of each device and phase the largest."""

    replica: Annotated[str, _NAME]
    samples: tuple[MemorySample, ...]
