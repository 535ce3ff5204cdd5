"""What travels on the bus. Each type below is one message or a part of one; it knows no bus, no settings, no service.

A prompt becomes a rollout group, a rollout group becomes experience, experience becomes a policy version::

    Prompt ──▶ RolloutGroup(prompt, samples) ──▶ Experience(group, rewards) ──▶ PolicyRecord ──▶ PolicyUpdate

Times are Unix seconds. Token ids are int32, logprobs are float32 in nats under the distribution that was sampled from
(after temperature). ``T`` is a completion's length in tokens, ``P`` a prompt's, ``K`` a number of spans.
"""

import dataclasses
from enum import StrEnum
from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from shared.wire import columns, message, record

GroupId = NewType("GroupId", int)
"""The place of a prompt in the run's order of admission: 0, 1, 2, …; never reused in a run."""
PolicyVersion = NewType("PolicyVersion", int)
"""The number of one set of weights in the ledger; never reused. 0 is the initial policy."""

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"
Int32Array: TypeAlias = npt.NDArray[np.int32]
Float32Array: TypeAlias = npt.NDArray[np.float32]


class Purpose(StrEnum):
    """Why a prompt is generated."""

    TRAIN = "train"
    EVALUATE = "evaluate"


class FinishReason(StrEnum):
    """Why a completion ended: at a stop token, or at its length limit."""

    STOP = "stop"
    LENGTH = "length"


class ScoreStatus(StrEnum):
    """What a scorer can say. All but ``UNAVAILABLE`` carry a value.

    ``TIMEOUT``, ``CRASHED``, ``MEMORY``, ``OUTPUT_LIMIT`` and ``FORBIDDEN`` mean that the *completion* made its own check fail
    (an endless expression, a program that takes too much or what it must not); ``UNAVAILABLE`` means that the scorer could
    not do its work: the group is tried again, then buried, never scored 0.
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
    """One turn of a conversation."""

    role: str
    content: str


@record
@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How to generate. ``temperature`` 0 is greedy.

    >>> Sampling(samples=16, max_new_tokens=4, temperature=1.0)
    Sampling(samples=16, max_new_tokens=4, temperature=1.0)
    """

    samples: int
    max_new_tokens: int
    temperature: float


@message("prompt", schema=1)
@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One problem: text or messages, the reference answer, and what its scorers may need.

    A replica must hold at least ``min_version`` before it generates, which is what bounds the lag.
    """

    group_id: GroupId
    problem: str
    """Where the problem stands in its dataset, ``file:line``, for people."""
    sampling: Sampling
    text: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    answer: str | None = None
    extra: dict[str, Json] = dataclasses.field(default_factory=dict)
    """Every other column of the dataset row."""
    min_version: PolicyVersion = PolicyVersion(0)
    purpose: Purpose = Purpose.TRAIN
    admitted_at_s: float = 0.0
    requeues: int = 0
    """How often the group came back because its samples were stale."""
    scorers: tuple[str, ...] = ()
    """Names of the scorers that apply; none: all of the run."""


@columns
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One completion with its tokens and behavior logprobs.

    ``version_spans`` (int32, K × 2) says which policy wrote which tokens: rows of (first token, version). Tokens 0–2
    under version 7 and the rest under 8::

        token_ids          41  9  3 17  2
        version_spans      [[0, 7], [3, 8]]        oldest_version 7, newest_version 8
    """

    token_ids: Int32Array
    behavior_logprobs: Float32Array
    version_spans: Int32Array
    finish_reason: FinishReason
    text: str

    @property
    def oldest_version(self) -> PolicyVersion:
        """The oldest version that wrote a token."""
        return PolicyVersion(int(self.version_spans[:, 1].min()))

    @property
    def newest_version(self) -> PolicyVersion:
        """The newest version that wrote a token."""
        return PolicyVersion(int(self.version_spans[:, 1].max()))

    @property
    def versions(self) -> frozenset[PolicyVersion]:
        """Every version that wrote a token."""
        return frozenset(PolicyVersion(int(version)) for version in self.version_spans[:, 1])


@message("rollout_group", schema=1)
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RolloutGroup:
    """All samples of one prompt, not yet scored."""

    prompt: Prompt
    prompt_token_ids: Int32Array
    samples: tuple[Sample, ...]
    replica: str
    started_at_s: float
    finished_at_s: float

    @property
    def oldest_version(self) -> PolicyVersion:
        """The oldest version in any sample."""
        return min(sample.oldest_version for sample in self.samples)

    @property
    def versions(self) -> frozenset[PolicyVersion]:
        """Every version in any sample."""
        return frozenset().union(*(sample.versions for sample in self.samples))


@record
@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """What one scorer says of one sample. ``value`` is None exactly when ``status`` is ``UNAVAILABLE``."""

    scorer: str
    status: ScoreStatus
    value: float | None
    detail: str = ""
    lenient: tuple[str, ...] = ()
    """The lenient rules without which the value would be 0 (docs/rewards.md, "Leniency")."""


@record
@dataclasses.dataclass(frozen=True, slots=True)
class SampleScores:
    """What every scorer that applies says of one sample, in the order of the settings."""

    scores: tuple[Score, ...]


@message("experience", schema=1)
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """A group with its rewards: ``rewards[i]`` (float32) and ``scores[i]`` belong to ``group.samples[i]``.

    ``reference_logprobs`` are those of all samples' tokens, one sample after another: of samples of 3 and 2 tokens, five.
    """

    group: RolloutGroup
    rewards: Float32Array
    scores: tuple[SampleScores, ...]
    scored_at_s: float
    score_s: float
    reference_logprobs: Float32Array | None = None
    """Under the frozen initial policy, at the temperature of sampling; None where the trainer computes them itself."""


@record
@dataclasses.dataclass(frozen=True, slots=True)
class Misfit:
    """A forward pass of a step's updates that did not fit into memory: all ranks cut it in two.

    A single sample that does not fit is left out on the ranks in ``ranks``.
    """

    attempt: int
    """Which pass, counted from 0 over the step's updates; failed ones count."""
    ranks: tuple[int, ...]
    """The ranks without memory for it, ascending."""


@message("step_plan", schema=1)
@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """How a step's samples were spread over forward passes; a replay that follows it repeats the step to the bit."""

    micro_batch_tokens: int
    """The value of ``trainer.micro_batch_tokens``."""
    layout: str
    """Digest of which samples lay in which micro-batch of which rank, before any was cut."""
    misfits: tuple[Misfit, ...] = ()


@record
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A few sequences and what the trainer makes of them, so that a replica can check the weights that it serves.

    Sequences stand one after another: of lengths [3, 2], ``token_ids`` holds five, and ``logprobs`` three, as nothing
    predicts a first token::

        token_ids   41  9  3 | 17  2
        logprobs        a  b |     c        nats, teacher-forced at temperature 1
    """

    token_ids: Int32Array
    lengths: Int32Array
    logprobs: Float32Array

    def sequences(self) -> list[tuple[Int32Array, Float32Array]]:
        """Return (token ids, logprobs of all but the first) of each sequence."""
        ends = np.cumsum(self.lengths).tolist()
        starts = [0, *ends[:-1]]
        return [
            (self.token_ids[start:end], self.logprobs[start - place : end - place - 1])
            for place, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]


@message("policy_record", schema=1)
@dataclasses.dataclass(frozen=True, slots=True)
class PolicyRecord:
    """What the ledger keeps of a version, written once."""

    version: PolicyVersion
    parent: PolicyVersion | None
    step: int
    created_at_s: float
    manifest_digest: str
    """SHA-256, hex, of what vouches for every weight: the header of a pull, or the manifest of a snapshot on disk."""
    location: str
    """The folder of the snapshot on disk; empty where there is none."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    source: str = ""
    """``host:port`` where the trainer serves this version; empty: by file only."""
    probe: Probe | None = None
    settings_revision: int = 0
    """Under which revision of the live settings its step was trained."""


@message("policy_update", schema=1)
@dataclasses.dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """The coordinator's word that ``record.version`` is the head."""

    record: PolicyRecord
    promoted_at_s: float
    sources: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """By replica: the addresses that it should pull from, in the order to try; the trainer's is the last."""


@message("step_report", schema=1)
@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step measured. Names in ``metrics`` are listed in docs/architecture.md."""

    step: int
    version: PolicyVersion
    finished_at_s: float
    samples: int
    metrics: dict[str, float]
    lag_counts: dict[str, int]
    """Samples by lag in steps: {"0": 480, "1": 32}."""


@message("event", schema=1)
@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, for people and audits."""

    at_s: float
    source: str
    name: str
    detail: str
    fields: dict[str, Json] = dataclasses.field(default_factory=dict)
