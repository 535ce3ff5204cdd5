"""The ``[internal]`` table: set by tests and by the Helm chart; not supported otherwise."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from penstock.shared.settings.section import Section


class InternalSettings(Section):
    """For tests and the Helm chart; not supported, and not listed by `penstock settings`."""

    claim_after_s: PositiveFloat = Field(default=30.0)
    """Seconds after which another consumer takes over an entry that its consumer no longer renews."""
    max_attempts: PositiveInt = Field(default=5)
    """Failed attempts at an entry after which it is moved to the dead letters."""
    heartbeat_s: PositiveFloat = Field(default=1.0)
    """Seconds between a replica's heartbeats; it counts as gone after 5 of them."""
    start_wait_s: PositiveFloat = Field(default=30.0)
    """Seconds that a service waits for the bus at its start; later it waits without a limit."""
    owner: str = Field(default="")
    """The release whose services use the run's keys, `namespace/release`; services of another one refuse to start."""
    shelf_folder: Path | None = Field(default=None)
    """Folder of this process's shelf, for pods that cannot write to the run's; not set: `<run folder>/shelf`."""
    stopped_exit_status: Annotated[int, Field(ge=0, le=255)] = Field(default=0)
    """Exit status of a service that is stopped before its run is over; a Job of Kubernetes restarts it for 143."""
    leave_when_over: bool = Field(default=False)
    """Whether the trainer exits once the run is over, its records are complete and its checkpoints are stored."""
    release: tuple[str, ...] = Field(default=())
    """Kubernetes objects, as group/version/resource/name, that the coordinator scales to zero when the run is over."""
    pod_template: str = Field(default="")
    """Hash of the coordinator's pod template: what one of the same template has released is not released again."""
    deadline_s: NonNegativeFloat = Field(default=0.0)
    """Seconds after its creation when the run is stopped; 0: never."""
    executor_check_s: PositiveFloat = Field(default=15.0)
    """Seconds between two checks of the executor with a program that tries to escape."""
    executor_profiles: tuple[Literal["stdlib", "numpy"], ...] = Field(default=())
    """Interpreters that the executor keeps warm; empty: those of the code scorers, or both if it knows no code scorer."""
    executor_recycle_after: PositiveInt = Field(default=5_000)
    """Programs after which the executor replaces a warm interpreter."""
    probe_every_versions: NonNegativeInt = Field(default=10)
    """Versions between two probes, which compare the replicas' logprobs with the trainer's; 0: never."""
    attention: Literal["auto", "mask", "varlen", "flash4"] = Field(default="auto")
    """How packed sequences attend: variable-length attention of torch or FlashAttention 4, or rectangles with a mask;
    `auto`: what runs."""
    logits_chunk_tokens: NonNegativeInt = Field(default=2048)
    """Tokens whose logits the trainer holds at a time; 0: of a whole micro-batch."""
    peak_tflops: NonNegativeFloat = Field(default=0.0)
    """Speed of one GPU, to report its utilization (`mfu`); 0: by the GPU's name."""
    stale_wait_s: PositiveFloat = Field(default=600.0)
    """Longest wait of a step for earlier groups with algorithm.on_stale = "wait". Default: 600, or 0.05 for each of
    sampling.max_new_tokens."""
    reward_groups: PositiveInt = Field(default=32)
    """Groups that one reward replica scores at a time; the others wait on the bus."""
    starving_window_s: PositiveInt = Field(default=60)
    """Seconds that the guard `rollouts_starving` examines, with one look at the streams in each."""
