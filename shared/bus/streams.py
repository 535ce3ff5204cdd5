"""The map of the bus: the streams of a run, their writers and readers, and when an entry leaves.

::

                   prompts             rollouts             experience
    coordinator ────────▶ rollout × R ────────▶ reward × W ────────▶ trainer ──▶ journal, published
         ▲         ▲                                                     │             │
         │         └───────────── stale groups, requeued ◀───────────────┘             │
         └───────────────── published ◀────────────────────────────────────────────────┘
         └── policy ──▶ every rollout replica

    stream         writers → reader                           an entry leaves when
    prompts        coordinator (admission), trainer (requeued stale groups), API (revived letters) → rollout
                                                              its RolloutGroup is published, in the same transaction
    rollouts       rollout, API (revived letters) → reward    its Experience is published, in the same transaction
    experience     reward, API (revived letters) → trainer    the step that used it is committed: moved to the journal; or its
                                                              group is dropped, or requeued
    journal        trainer (commit) → trainer                 a checkpoint covers its step, or a rollback leaves its branch
    published      trainer (commit), API (revived letters) → coordinator
                                                              its version is the head, in the same transaction
    policy         coordinator → all rollouts                 trimmed (broadcast; the newest entry is the head)
    eval_prompts, eval_rollouts, eval_results                 as the first three, for held-out problems: coordinator → rollout →
                                                              reward → coordinator, and revived letters from the API
    steps          trainer (commit) → coordinator, people     trimmed (step reports)
    events         every service, rollbacks → people          trimmed
    audit          scripts → people                           trimmed (how every group ended)
    history        scripts → people                           trimmed (every state of the run, with its reason)
    <stream>.dead  scripts → API                              a person revives or discards it

A data stream's entries are deleted on hand-over, so ``XLEN(prompts) + XLEN(rollouts) + XLEN(experience)`` is the
number of groups in flight. No data stream is trimmed by length. Every other key is declared beside the store that
owns it (``keys.key``). This module only names streams; ``bus`` moves their entries.
"""

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from shared.bus.keys import declare

Row: TypeAlias = tuple[str, Mapping[bytes, bytes]]
"""The id and the fields of a stream's entry."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """One stream of a run and the consumer group that reads it (None for broadcast and trimmed streams)."""

    name: str
    group: str | None = None
    max_entries: int | None = None
    """Approximate length at which the oldest entries are trimmed; None for data streams, which are never trimmed."""

    @property
    def dead(self) -> "Stream":
        """The stream of this stream's entries that cannot be handled, with their reasons."""
        return Stream(f"{self.name}.dead")


PROMPTS = Stream("prompts", group="rollout")
ROLLOUTS = Stream("rollouts", group="reward")
EXPERIENCE = Stream("experience", group="trainer")
EVAL_PROMPTS = Stream("eval_prompts", group="rollout")
EVAL_ROLLOUTS = Stream("eval_rollouts", group="reward")
EVAL_RESULTS = Stream("eval_results", group="coordinator")
JOURNAL = Stream("journal")
PUBLISHED = Stream("published", group="coordinator")
POLICY = Stream("policy", max_entries=64)
STEPS = Stream("steps", max_entries=100_000)
EVENTS = Stream("events", max_entries=10_000)
AUDIT = Stream("audit", max_entries=100_000)
HISTORY = Stream("history", max_entries=10_000)

TRAINING_STREAMS = (PROMPTS, ROLLOUTS, EXPERIENCE)
"""The streams whose lengths add up to the groups in flight."""
EVALUATION_STREAMS = (EVAL_PROMPTS, EVAL_ROLLOUTS, EVAL_RESULTS)
GROUPED_STREAMS = (*TRAINING_STREAMS, *EVALUATION_STREAMS, PUBLISHED)

for _stream in (*GROUPED_STREAMS, JOURNAL, POLICY, STEPS, EVENTS, AUDIT, HISTORY):
    declare(_stream)
