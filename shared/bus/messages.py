"""Messages on the bus and their parts::

    Prompt ──▶ RolloutGroup(prompt, samples) ──▶ Experience(group, rewards) ──▶ PolicyRecord ──▶ PolicyUpdate

Times are Unix seconds, token ids int32, logprobs float32 nats under the sampling distribution (after temperature).
``T``: completion tokens, ``P``: prompt tokens, ``K``: spans.
"""

import dataclasses
from enum import StrEnum
from typing import Annotated, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.shared.bus.encoding.sample_checks import check_samples
from penstock.shared.bus.encoding.validation import FieldLimits
from penstock.shared.bus.encoding.wire import columns, message, record

GroupId = NewType("GroupId", int)
"""Place in the run's order of admission: 0, 1, 2, …; never reused."""
PolicyVersion = NewType("PolicyVersion", int)
"""Number of a set of weights; never reused. 0 is the initial policy."""

MOST_SAMPLES = 65_536
_ID = FieldLimits(0, (1 << 53) - 1)
_INT32 = FieldLimits(0, (1 << 31) - 1)
_NAME = FieldLimits(length=1024)
_TIME = FieldLimits(0.0, 1e11)
_BYTES = FieldLimits(0.0, 1e18)
_LOGPROB = FieldLimits(-80.0, 0.1)
"""Probabilities are at least e⁻⁸⁰; above 0 is rounding."""
_LARGEST = float(np.finfo(np.float32).max)
_ANY = FieldLimits(-_LARGEST, _LARGEST)
_SIGNED = FieldLimits(-(1 << 31), (1 << 31) - 1)
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


class Ended(StrEnum):
    """Why an episode ended."""

    NOT_AN_EPISODE = ""
    STOP = "stop"
    LENGTH = "length"
    TURNS = "turns"
    CONTEXT = "context"
    DEADLINE = "deadline"
    AGENT = "agent"


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


@message("prompt", schema=2, late=("environment", "losses"))
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
    """Digest of the row's question and answer; empty: it is of no dataset."""
    environment: Annotated[str, _NAME] = ""
    """What the policy's turns happen in; empty: a single turn."""
    losses: Annotated[int, _INT32] = 0
    """How often the group was generated again because its payload was lost."""

    @property
    def is_plain(self) -> bool:
        return not self.environment

    @property
    def stable_id(self) -> str:
        """Names the problem wherever its row is."""
        return self.row_id or self.problem


def no_ids() -> Int32Array:
    return np.zeros(0, dtype=np.int32)


def no_logprobs() -> Float32Array:
    return np.zeros(0, dtype=np.float32)


def no_segments() -> Int32Array:
    """Return an empty array (0 × 3)."""
    return np.zeros((0, 3), dtype=np.int32)


@columns(check_samples, late=("segments", "ended", "transcript", "environment_reward", "turn_rewards", "routes"))
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One completion with its tokens and behavior logprobs.

    ``version_spans`` (int32, K × 2) has rows (first token, policy version)::

        token_ids          41  9  3 17  2
        version_spans      [[0, 7], [3, 8]]        oldest_version 7, newest_version 8

    With truncated sampling, ``support_sizes`` has the number of tokens that could be drawn at each position, and
    ``support_ids`` these tokens, concatenated. A negative size lists the tokens that could *not* be drawn; 0: all could.

    An episode is a tree of ``segments`` (int32, S × 3) in depth-first order, with rows (first token, parent segment or −1
    for the prompt, 0 given or 1 sampled). Given tokens have behavior logprob 0 and support 0, and their version is not
    read. Here the agent dropped its first two turns and asked again::

        token_ids   8 8 8 | 41 9 | 6 6 | 3 | 5 2           question, turn, observation, turn; another turn
        segments    [[0, -1, 0], [3, 0, 1], [5, 1, 0], [7, 2, 1], [8, 0, 1]]
    """

    token_ids: Annotated[Int32Array, _INT32]
    behavior_logprobs: Annotated[Float32Array, _LOGPROB]
    version_spans: Annotated[Int32Array, FieldLimits(0, (1 << 31) - 1, shape=(None, 2))]
    finish_reason: FinishReason
    text: str
    support_sizes: Annotated[Int32Array, _SIGNED] = dataclasses.field(default_factory=no_ids)
    support_ids: Annotated[Int32Array, _INT32] = dataclasses.field(default_factory=no_ids)
    teacher_logprobs: Annotated[Float32Array, _TEACHER_LOGPROB] | None = None
    """Of the tokens, under the problem's teachers, at the sampling temperature; None: the problem has no teacher."""
    teacher_top_ids: Annotated[Int32Array, _TOP_IDS] | None = None
    """The teacher's k most probable tokens at each position (T × k), ascending by id; None: not asked for."""
    teacher_top_logprobs: Annotated[Float32Array, _TOP_LOGPROBS] | None = None
    """Their logprobs (T × k), over the whole vocabulary, at the sampling temperature."""
    segments: Annotated[Int32Array, FieldLimits(-1, (1 << 31) - 1, shape=(None, 3))] = dataclasses.field(
        default_factory=no_segments
    )
    """Empty: a completion, sampled after the prompt."""
    ended: Ended = Ended.NOT_AN_EPISODE
    transcript: Annotated[bytes, FieldLimits(length=1 << 24)] = b""
    """MessagePack or JSON of the episode's messages."""
    environment_reward: Annotated[float, _ANY] | None = None
    turn_rewards: Annotated[Float32Array, _ANY] = dataclasses.field(default_factory=no_logprobs)
    """Of each sampled segment; empty: none."""
    routes: Annotated[bytes, FieldLimits(length=1 << 14)] = b""
    """A claim (``penstock.shared.model.routes``); empty: not recorded."""

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """Whether each token was sampled (T)."""
        if not len(self.segments):
            return np.ones(len(self.token_ids), dtype=np.bool_)
        lengths = np.diff(np.append(self.segments[:, 0], len(self.token_ids)))
        return np.repeat(self.segments[:, 2] == 1, lengths)

    @property
    def sampled_tokens(self) -> int:
        return int(self.sampled.sum()) if len(self.segments) else len(self.token_ids)

    @property
    def token_versions(self) -> Int32Array:
        starts, versions = self.version_spans.T
        return np.repeat(versions, np.diff(np.append(starts, len(self.token_ids))))

    @property
    def oldest_version(self) -> PolicyVersion:
        return min(self.versions)

    @property
    def newest_version(self) -> PolicyVersion:
        return max(self.versions)

    @property
    def versions(self) -> frozenset[PolicyVersion]:
        """Versions that sampled its tokens."""
        versions = self.token_versions[self.sampled] if len(self.segments) else self.version_spans[:, 1]
        return frozenset(map(PolicyVersion, versions.tolist()))


@message("rollout_group", schema=2)
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RolloutGroup:
    """All samples of one prompt, unscored."""

    prompt: Prompt
    prompt_token_ids: Annotated[Int32Array, _INT32]
    """Empty: each sample is a tree whose first segments are given."""
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
        if not len(self.prompt_token_ids):
            for sample in self.samples:
                parents, is_sampled = sample.segments[:, 1], sample.segments[:, 2]
                if not len(sample.segments) or is_sampled[parents < 0].any():
                    raise ValueError("expected prompt tokens, or samples that begin with given tokens, found neither")

    @property
    def is_plain(self) -> bool:
        return self.prompt.is_plain and not any(len(sample.segments) for sample in self.samples)

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


@message("experience", schema=2)
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """A group with its rewards: ``rewards[i]`` (float32) and ``scores[i]`` of ``group.samples[i]``;
    ``reference_logprobs`` of all samples' tokens, concatenated.
    """

    group: RolloutGroup
    rewards: Annotated[Float32Array, _ANY]
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
    def is_plain(self) -> bool:
        return self.group.is_plain

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
    noise: Annotated[Float32Array, _DIFFERENCE]
    """What rounding to the replicas' number type changes in them."""
    change: Annotated[Float32Array, _DIFFERENCE] = dataclasses.field(default_factory=no_logprobs)
    """What the step changed in them, rounded otherwise than ``logprobs``; empty: not a step of this process."""

    def check(self) -> None:
        """Raise ValueError if the lengths disagree."""
        tokens, sequences = len(self.token_ids), len(self.lengths)
        scored = (len(self.logprobs), len(self.noise), len(self.change) or len(self.logprobs))
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
    """SHA-256, hex, of the pull's header or snapshot's manifest; empty: not published, as in a supervised run."""
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
