"""The ``[guards]`` table: which guards pause the run, and at which thresholds (``penstock.services.coordinator.run.guards``)."""

from typing import Literal, get_args

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from penstock.shared.settings.section import Section

Action = Literal["off", "tell", "pause"]
Guard = Literal[
    "no_signal", "kl", "entropy", "lag", "throughput", "trainer_starving", "rollouts_starving", "unscored", "probe",
    "stalled",
]  # fmt: skip
GUARDS: tuple[Guard, ...] = get_args(Guard)
OF_GENERATION: tuple[Guard, ...] = (
    *("no_signal", "lag", "trainer_starving", "rollouts_starving", "unscored", "probe"),
)
"""Guards of what replicas generate and reward services score."""

LIMITS = {
    "kl": 1.0, "reference_kl": 0.0, "entropy": 1e-4, "lag": 0.25, "throughput": 0.5, "starving": 0.8, "unscored": 16.0,
    "stalled": 600.0, "probe": 3.0,
}  # fmt: skip
_SHARES = ("lag", "throughput", "starving")


class GuardsSettings(Section):
    """Conditions that warn, or pause the run. Losses that are not finite pause it, too."""

    pause: tuple[Guard, ...] = Field(default=("no_signal", "kl", "entropy", "unscored", "probe"))
    """Guards that pause the run; the others only warn (status, events, a metric)."""
    off: tuple[Guard, ...] = Field(default=())
    """Guards that are turned off."""
    steps: PositiveInt = Field(default=10)
    """Steps that a guard examines together; `kl` and `throughput`, which react to sudden changes, examine half of them."""
    limits: dict[str, NonNegativeFloat] = Field(default={})
    """Other limits: { kl = 0.5, stalled = 1200 }. Nats per token: `kl` (1) to behavior, `reference_kl` (0: none),
    `entropy` (1e-4, the smallest). Shares: `lag` (0.25) of samples that are dropped as stale, `throughput` (0.5, the
    smallest) of the median tokens/s of the steps before (four times as many), `starving` (0.8) of the time spent waiting.
    `unscored` (16) groups in a row without a reward, or refused prompts if they are at least as many as slots; `stalled`
    (600, or 0.05 for each of sampling.max_new_tokens) seconds without a committed step while the run is running.
    `probe` (3) times the mean change by rounding, to the number type with which replicas generate, by which a replica's
    logprobs may differ from the trainer's."""

    @model_validator(mode="after")
    def _agree(self) -> "GuardsSettings":
        if both := sorted(set(self.pause) & set(self.off)):
            raise ValueError(
                f"expected {both[0]!r} in guards.pause or in guards.off, but it is in both: remove it from one"
            )
        for name, value in self.limits.items():
            if name not in LIMITS or (name in _SHARES and value > 1) or (name == "probe" and not value):
                raise ValueError(
                    f"expected limits of {', '.join(LIMITS)} in guards.limits, at most 1 for {', '.join(_SHARES)}, above 0 for probe, found {name} = "
                    f"{value:g}: change guards.limits"
                )
        return self

    def limit(self, name: str) -> float:
        return self.limits.get(name, LIMITS[name])

    @property
    def sudden_steps(self) -> int:
        return max(1, self.steps // 2)

    def action(self, guard: Guard) -> Action:
        if guard in self.off:
            return "off"
        return "pause" if guard in self.pause else "tell"
