"""The settings of the guards: what must not go on unseen in a run, and what is done about it.

One table a guard, as ``[guards.kl]``. ``action`` is what happens when it trips: ``pause`` the run, ``tell`` (status, events, a
metric), or ``off``. How each is measured stands in ``services.coordinator.run.guards``.
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from shared.settings.section import Section

Action = Literal["off", "tell", "pause"]
Share = Annotated[float, Field(ge=0, le=1)]


class NoSignalGuard(Section):
    """Reward collapse: no group has two different rewards, so nothing can be learned."""

    action: Action = Field(default="pause")
    """What is done about it."""
    steps: PositiveInt = Field(default=10)
    """In so many steps in a row."""


class KlGuard(Section):
    """The policy runs away from what sampled its data, or from the reference."""

    action: Action = Field(default="pause")
    """What is done about it."""
    steps: PositiveInt = Field(default=5)
    """Steps whose mean is looked at."""
    ceiling_nats: PositiveFloat = Field(default=1.0)
    """Largest mean KL(behavior || policy) of a token."""
    reference_ceiling_nats: NonNegativeFloat = Field(default=0.0)
    """Largest mean KL of a token to the reference, where the run has one; 0: any."""


class EntropyGuard(Section):
    """The policy has become certain of every token: it explores no more."""

    action: Action = Field(default="pause")
    """What is done about it."""
    steps: PositiveInt = Field(default=10)
    """Steps whose mean is looked at."""
    floor_nats: NonNegativeFloat = Field(default=1e-4)
    """Smallest mean entropy of a token."""


class LagGuard(Section):
    """Groups grow too old on their way: work is thrown away."""

    action: Action = Field(default="tell")
    """What is done about it."""
    steps: PositiveInt = Field(default=10)
    """Steps that are looked at together."""
    stale_share: Share = Field(default=0.25)
    """Largest share of groups that left as stale."""


class ThroughputGuard(Section):
    """Tokens per second fell off a cliff."""

    action: Action = Field(default="tell")
    """What is done about it."""
    steps: PositiveInt = Field(default=5)
    """Steps whose median is compared with that of four times as many before them."""
    least_share: Share = Field(default=0.5)
    """Smallest share of the earlier speed."""


class TrainerStarvingGuard(Section):
    """The trainer waits for groups."""

    action: Action = Field(default="tell")
    """What is done about it."""
    steps: PositiveInt = Field(default=10)
    """Steps that are looked at together."""
    share: Share = Field(default=0.8)
    """Largest share of the time that is spent waiting."""


class RolloutsStarvingGuard(Section):
    """Replicas wait for prompts, as groups wait for the trainer."""

    action: Action = Field(default="tell")
    """What is done about it."""
    window_s: PositiveInt = Field(default=60)
    """Seconds that are looked at together, with a look at the streams in each."""
    share: Share = Field(default=0.8)
    """Largest share of the looks that may find no prompt while groups wait for the trainer."""


class UnscoredGuard(Section):
    """Groups are generated and none can be scored: a scorer, its data or what it needs is broken."""

    action: Action = Field(default="pause")
    """What is done about it."""
    groups: PositiveInt = Field(default=16)
    """Groups in a row that were given up without a reward."""


class ProbeGuard(Section):
    """A replica's logprobs are not the trainer's, by more than weights.probe_gap_nats: what it generates is not from the trained policy."""

    action: Action = Field(default="pause")
    """What is done about it."""


class StalledGuard(Section):
    """A run that should train commits nothing."""

    action: Action = Field(default="tell")
    """What is done about it."""
    after_s: PositiveFloat = Field(default=600.0)
    """Seconds since the last commit, or since the run was started."""


class GuardsSettings(Section):
    """What must not go on unseen; each can be turned off. What is not finite is the trainer's: trainer.max_skipped_steps."""

    no_signal: NoSignalGuard = Field(default=NoSignalGuard())
    """Reward collapse."""
    kl: KlGuard = Field(default=KlGuard())
    """A ceiling for the KL."""
    entropy: EntropyGuard = Field(default=EntropyGuard())
    """A floor for the entropy."""
    lag: LagGuard = Field(default=LagGuard())
    """Groups that grow stale."""
    throughput: ThroughputGuard = Field(default=ThroughputGuard())
    """A cliff in tokens per second."""
    trainer_starving: TrainerStarvingGuard = Field(default=TrainerStarvingGuard())
    """The trainer waits for groups."""
    rollouts_starving: RolloutsStarvingGuard = Field(default=RolloutsStarvingGuard())
    """Replicas wait for prompts: every slot is taken by groups that wait for the trainer."""
    unscored: UnscoredGuard = Field(default=UnscoredGuard())
    """No group can be scored."""
    probe: ProbeGuard = Field(default=ProbeGuard())
    """A replica does not serve what the trainer published."""
    stalled: StalledGuard = Field(default=StalledGuard())
    """No commit for long."""
