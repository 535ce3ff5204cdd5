"""The map of the bus: every key of a run, who writes it, who reads it, and when an entry leaves it.

::

                 prompts             rollouts             experience
    coordinator ────────▶ rollout × R ────────▶ reward × W ────────▶ trainer ──▶ journal, published
         ▲                                                                             │
         └───────────────── published ◀────────────────────────────────────────────────┘
         └── policy ──▶ every rollout replica

    key          kind    writer → reader            an entry leaves when
    prompts      stream  coordinator → rollout      its RolloutGroup is published, in the same transaction
    rollouts     stream  rollout → reward           its Experience is published, in the same transaction
    experience   stream  reward → trainer           the step that used it is committed: moved to the journal
    journal      stream  trainer → trainer          a checkpoint covers its step
    published    stream  trainer → coordinator      its version is the head, in the same transaction
    policy       stream  coordinator → all rollouts trimmed (broadcast; the newest entry is the head)
    eval_*       stream  as prompts, rollouts, experience, for held-out problems; the coordinator reads the results
    steps        stream  trainer → coordinator      trimmed (reports for people)
    events       stream  all → people               trimmed
    audit        stream  scripts → people           trimmed (how every group ended)
    history      stream  scripts → people           trimmed (every state of the run, with its reason)
    <stream>.dead stream scripts → people           by hand
    run          hash    state, step, cursor, head, newest_version, trainer_epoch, …
    counts       hash    trained, dropped:<reason>, dead:<stream>, requeued: exact, written by the same scripts
    policies     hash    version → PolicyRecord;    policy_states: version → published | live | retired | revoked
    checkpoints  hash    version → folder or URI;   revoked: the set of fenced versions
    marks        hash    version → groups trained and place in the dataset when it was committed
    rollback     hash    the rollback that is under way, or the last one
    lease        hash    which coordinator leads, under which term; expires
    evaluation   hash    the evaluation that is under way, and who keeps its version (coordinator → all rollouts, see ``holding``);
                         its answers: evaluation_answers, problem → correct completions
    evaluations  hash    version → what its evaluation found, by set (JSON), written by the coordinator
    gate         hash    version whose accuracy fell → what was done about it: tell, rollback, pause
    statistics:<scorer> hash count, mean, squares of a scorer's values, over all reward replicas; …:groups: those counted
    live         hash    revision → the settings that were changed while the run goes on (see ``live_settings``)
    pins         set     versions whose checkpoints are kept; released: versions that people may use
    operations   hash    id → a command that takes a while, and how far it is (JSON)
    exports      hash    number → an export that was ordered, who makes it, and what became of it (coordinator → trainer, see ``exports``)
    secret       string  by which processes of the run know each other on ports beside the bus
    cordons      hash    replica → what it was told: to take nothing new, or to finish and leave
    settings     string  the TOML of a run that was registered over HTTP; services may start from it
    idempotency:<digest> what a POST was answered, with a TTL
    crashes      hash    <stream>:<entry> → how many processes died while they held it; causes: why its newest attempt failed
    trained      string  a bit for each group id whose experience was committed, so that a copy of it is not trained
    trying       string  the entries of the batch that the trainer works on: suspects, where it died
    services     set     replica names;             service:<replica>: its heartbeat, with a TTL

Entries of a data stream are deleted on hand-over, so ``XLEN(prompts) + XLEN(rollouts) + XLEN(experience)`` is the number
of groups in flight. No data stream is trimmed by length. All keys of a run share one hash tag, so that scripts hold on a
cluster too. This module only names things; ``bus`` moves them.
"""

import dataclasses
import re

from shared.errors import SettingsError

RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """One stream of a run and the consumer group that reads it (None for broadcast and trimmed streams)."""

    name: str
    group: str | None = None
    max_entries: int | None = None
    """Approximate length at which the oldest entries are trimmed; None for data streams, which are never trimmed."""

    @property
    def dead(self) -> "Stream":
        """Where entries of this stream that cannot be handled lie, with their reasons."""
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
GROUPED_STREAMS = (PROMPTS, ROLLOUTS, EXPERIENCE, EVAL_PROMPTS, EVAL_ROLLOUTS, EVAL_RESULTS, PUBLISHED)


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """The key names of one run.

    >>> Keys("demo").of(PROMPTS)
    'penstock:{demo}:prompts'
    """

    run_id: str

    def __post_init__(self) -> None:
        if RUN_ID_PATTERN.fullmatch(self.run_id) is None:
            raise SettingsError(
                f"expected a run id of 1 to 64 letters, digits, '.', '_' or '-', found {self.run_id!r}: change run.id"
            )

    def of(self, stream: Stream) -> str:
        """Return the key of a stream."""
        return self.named(stream.name)

    def named(self, name: str) -> str:
        """Return the key ``name`` of this run."""
        return f"penstock:{{{self.run_id}}}:{name}"

    @property
    def run(self) -> str:
        """The hash that holds the run's state."""
        return self.named("run")

    @property
    def counts(self) -> str:
        """The hash that counts how groups ended."""
        return self.named("counts")

    @property
    def policies(self) -> str:
        """The hash version → PolicyRecord."""
        return self.named("policies")

    @property
    def policy_states(self) -> str:
        """The hash version → state."""
        return self.named("policy_states")

    @property
    def revoked(self) -> str:
        """The set of revoked versions."""
        return self.named("revoked")

    @property
    def checkpoints(self) -> str:
        """The hash version → checkpoint folder, or its URI in object storage."""
        return self.named("checkpoints")

    @property
    def marks(self) -> str:
        """The hash version → "groups trained, place in the dataset" at its commit."""
        return self.named("marks")

    @property
    def lease(self) -> str:
        """The hash that says which coordinator leads; it expires."""
        return self.named("lease")

    @property
    def rollback(self) -> str:
        """The hash that describes the rollback under way, or the last one."""
        return self.named("rollback")

    @property
    def evaluation(self) -> str:
        """The hash that describes the evaluation under way; absent when there is none."""
        return self.named("evaluation")

    @property
    def evaluation_answers(self) -> str:
        """The hash problem → correct completions of the evaluation under way."""
        return self.named("evaluation_answers")

    @property
    def evaluations(self) -> str:
        """The hash version → what its evaluation found."""
        return self.named("evaluations")

    @property
    def gate(self) -> str:
        """The hash version → what was done about the fall of its accuracy."""
        return self.named("gate")

    @property
    def live(self) -> str:
        """The hash of settings that were changed while the run goes on."""
        return self.named("live")

    @property
    def secret(self) -> str:
        """The secret by which processes of the run know each other on ports beside the bus."""
        return self.named("secret")

    @property
    def pins(self) -> str:
        """The set of versions whose checkpoints are kept."""
        return self.named("pins")

    @property
    def released(self) -> str:
        """The set of versions that people may use."""
        return self.named("released")

    @property
    def operations(self) -> str:
        """The hash id → operation."""
        return self.named("operations")

    @property
    def exports(self) -> str:
        """The hash of exports that were ordered."""
        return self.named("exports")

    @property
    def cordons(self) -> str:
        """The hash replica → what it was told."""
        return self.named("cordons")

    @property
    def settings(self) -> str:
        """The TOML of a run that was registered over HTTP."""
        return self.named("settings")

    @property
    def rehearsal(self) -> str:
        """The hash of prompts on which scorers are tried before training."""
        return self.named("rehearsal")

    @property
    def crashes(self) -> str:
        """The hash of how many processes died while they held an entry."""
        return self.named("crashes")

    @property
    def causes(self) -> str:
        """The hash of why the newest attempt at an entry failed."""
        return self.named("causes")

    @property
    def trained(self) -> str:
        """The bits of group ids whose experience was committed."""
        return self.named("trained")

    @property
    def trying(self) -> str:
        """The entries of the batch that the trainer works on."""
        return self.named("trying")

    def idempotency(self, digest: str) -> str:
        """Return the key of what one POST was answered."""
        return self.named(f"idempotency:{digest}")

    @property
    def services(self) -> str:
        """The set of replica names that were seen."""
        return self.named("services")

    def statistics(self, scorer: str) -> str:
        """The hash with count, mean and sum of squared differences of a scorer's values."""
        return self.named(f"statistics:{scorer}")

    def statistics_groups(self, scorer: str) -> str:
        """The sorted set of the newest groups in these statistics."""
        return self.named(f"statistics:{scorer}:groups")

    def service(self, replica: str) -> str:
        """Return the key of one replica's heartbeat."""
        return self.named(f"service:{replica}")

    def starts(self, replica: str) -> str:
        """Return the key of the set of one replica's processes, each under a name of its own; no process leaves it."""
        return self.named(f"starts:{replica}")

    def left(self, replica: str) -> str:
        """Return the key that exists while a replica's last process has left in order."""
        return self.named(f"left:{replica}")
