"""The ``[guards]`` table: which guards pause the run, and at which thresholds (``penstock.services.coordinator.run.guards``)."""

from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from penstock.shared.settings.section import Section

Action = Literal["off", "tell", "pause"]
Share = Annotated[float, Field(ge=0, le=1)]
Guard = Literal[
    "no_signal", "kl", "entropy", "lag", "throughput", "trainer_starving", "rollouts_starving", "unscored", "probe",
    "stalled",
]  # fmt: skip
GUARDS: tuple[Guard, ...] = get_args(Guard)
OF_GENERATION: tuple[Guard, ...] = (
    *("no_signal", "lag", "trainer_starving", "rollouts_starving", "unscored", "probe"),
)
"""Guards of what replicas generate and reward services score."""


class GuardsSettings(Section):
    """Conditions that warn, or pause the run. For losses that are not finite: trainer.max_skipped_steps."""

    pause: tuple[Guard, ...] = Field(default=("no_signal", "kl", "entropy", "unscored", "probe"))
    """Guards that pause the run; the others only warn (status, events, a metric)."""
    off: tuple[Guard, ...] = Field(default=())
    """Guards that are turned off."""
    steps: PositiveInt = Field(default=10)
    """Steps that a guard examines together; `kl` and `throughput`, which react to sudden changes, examine half of them."""
    kl_nats: PositiveFloat = Field(default=1.0)
    """Guard `kl`: largest mean KL(behavior || policy) per token."""
    reference_kl_nats: NonNegativeFloat = Field(default=0.0)
    """Guard `kl`: largest mean KL per token to the reference, if the run has one; 0: no limit."""
    entropy_nats: NonNegativeFloat = Field(default=1e-4)
    """Guard `entropy`: smallest mean entropy per token."""
    stale_share: Share = Field(default=0.25)
    """Guard `lag`: largest share of samples that are dropped as stale, alone or with their group."""
    throughput_share: Share = Field(default=0.5)
    """Guard `throughput`: smallest tokens/s, as a share of the median of the preceding steps (four times as many)."""
    starving_share: Share = Field(default=0.8)
    """Guards `trainer_starving` and `rollouts_starving`: largest share of the time spent waiting."""
    unscored_groups: PositiveInt = Field(default=16)
    """Guard `unscored`: consecutive groups that were given up without a reward; also refused prompts, if they are
    at least as many as slots."""
    stalled_s: PositiveFloat = Field(default=600.0)
    """Guard `stalled`: seconds without a committed step while the run is running."""

    @model_validator(mode="after")
    def _agree(self) -> "GuardsSettings":
        if both := sorted(set(self.pause) & set(self.off)):
            raise ValueError(
                f"expected {both[0]!r} in guards.pause or in guards.off, but it is in both: remove it from one"
            )
        return self

    @property
    def sudden_steps(self) -> int:
        return max(1, self.steps // 2)

    def action(self, guard: Guard) -> Action:
        if guard in self.off:
            return "off"
        return "pause" if guard in self.pause else "tell"
