"""The streams of a run, their writers and readers, and when an entry leaves.

::

                   prompts             rollouts             experience
    coordinator ────────▶ rollout × R ────────▶ reward × W ────────▶ trainer ──▶ journal, published
         ▲         ▲                                                     │             │
         │         └───────────── stale groups, requeued ◀───────────────┘             │
         └───────────────── published ◀────────────────────────────────────────────────┘
         └── policy ──▶ every rollout replica

    stream         writers → reader                           an entry leaves when
    prompts        coordinator, trainer → rollout             its sample joins its group, or is lost; the last one publishes
                                                              the RolloutGroup, in the same transaction
    episodes       as prompts → episodes                      the same, of prompts with an environment
    rollouts       rollout → reward                           its Experience is published, in the same transaction
    experience     reward → trainer; of demonstrations:       its step is committed: moved to the journal; or its group is
                   coordinator → trainer                      dropped, or requeued. What it carries is in `payloads`
    journal        trainer (commit) → trainer                 a checkpoint covers its step, or a rollback leaves its branch
    published      trainer (commit) → coordinator             its version is the head, in the same transaction
    policy         coordinator → all rollouts                 trimmed (broadcast; the newest entry is the head)
    eval_prompts, eval_episodes, eval_rollouts, eval_results  as those of training, for held-out problems; each entry is a group
    holds          coordinator → all rollouts                 trimmed (the version to keep for an evaluation may be another)
    steps          trainer (commit) → coordinator, people     trimmed (step reports)
    events         every service, rollbacks → people          trimmed
    questions      API → rollout                              trimmed (`stores.questions`)
    answers        rollout → API                              trimmed
    audit          scripts → people                           trimmed (how every group ended, and lost samples)
    history        scripts → people                           trimmed (every state of the run, with its reason)
    memory         every process with a model → people        trimmed (what it holds on its device, by phase)
    <stream>.dead  scripts → API                              a person revives (back onto its stream) or discards it

An entry of ``prompts`` or ``episodes`` is one sample, every other one a group (``assembly``). Hand-over deletes a data stream's entry,
so ``HLEN(generating) + XLEN(rollouts) + XLEN(experience)`` is the number of groups in flight. Other keys are declared
beside their stores (``keys.key``).
"""

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from penstock.shared.bus.keys import declare

Row: TypeAlias = tuple[str, Mapping[bytes, bytes]]
"""Id and fields of a stream's entry."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """One stream and its consumer group (None for broadcast and trimmed streams)."""

    name: str
    group: str | None = None
    max_entries: int | None = None
    """Approximate length at which the oldest entries are trimmed; None for data streams."""

    @property
    def dead(self) -> "Stream":
        """The stream of this stream's dead letters."""
        return Stream(f"{self.name}.dead")


PROMPTS = Stream("prompts", group="rollout")
EPISODES = Stream("episodes", group="episodes")
ROLLOUTS = Stream("rollouts", group="reward")
EXPERIENCE = Stream("experience", group="trainer")
EVAL_PROMPTS = Stream("eval_prompts", group="rollout")
EVAL_EPISODES = Stream("eval_episodes", group="episodes")
EVAL_ROLLOUTS = Stream("eval_rollouts", group="reward")
EVAL_RESULTS = Stream("eval_results", group="coordinator")
JOURNAL = Stream("journal")
PUBLISHED = Stream("published", group="coordinator")
POLICY = Stream("policy", max_entries=64)
STEPS = Stream("steps", max_entries=100_000)
EVENTS = Stream("events", max_entries=10_000)
AUDIT = Stream("audit", max_entries=100_000)
QUESTIONS = Stream("questions", max_entries=256)
ANSWERS = Stream("answers", max_entries=256)
HOLDS = Stream("holds", max_entries=16)
HISTORY = Stream("history", max_entries=10_000)
MEMORY = Stream("memory", max_entries=10_000)

SAMPLE_STREAMS = (PROMPTS, EPISODES)
"""Their entries are samples."""
TRAINING_STREAMS = (*SAMPLE_STREAMS, ROLLOUTS, EXPERIENCE)
"""They hold what is in flight."""
EVALUATION_STREAMS = (EVAL_PROMPTS, EVAL_EPISODES, EVAL_ROLLOUTS, EVAL_RESULTS)
GROUPED_STREAMS = (*TRAINING_STREAMS, *EVALUATION_STREAMS, PUBLISHED)

for _stream in (*GROUPED_STREAMS, JOURNAL, POLICY, STEPS, EVENTS, AUDIT, HOLDS, HISTORY, MEMORY, QUESTIONS, ANSWERS):
    declare(_stream)


def count_in(fields: Mapping[bytes, bytes], name: bytes) -> int:
    """Return the number in a field of an entry; -1: it has none, so that no process of the run wrote it."""
    text = fields.get(name, b"")
    return int(text) if text.isdigit() and len(text) < 16 else -1
