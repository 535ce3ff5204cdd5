"""What a run is and what it stands on: ``[run]``, ``[bus]``, ``[data]``, ``[coordinator]``, ``[telemetry]``."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shared.settings.section import Section


class RunSettings(Section):
    """What this run is."""

    id: str = Field(default="", max_length=64)
    """Names the run on the bus and in its folder; empty: made from the file's name and the time."""
    folder: Path = Field(default=Path("runs"))
    """Where run folders are made; everything a run leaves lies in `<folder>/<id>/`."""
    steps: PositiveInt = Field(default=100)
    """How many optimizer steps the run makes."""
    seed: NonNegativeInt = Field(default=0)
    """Seeds the dataset order, sampling and the trainer."""
    host: str = Field(default="", pattern=r"^[0-9A-Za-z_.-]*$")
    """Address at which other machines reach the processes of this one, for /metrics and weights; empty: `POD_IP`, else the address
    from which this machine reaches the bus. Differs from machine to machine: give it as a flag or by PENSTOCK__RUN__HOST."""


class BusSettings(Section):
    """Redis or Valkey."""

    url: str = Field(default="embedded")
    """`embedded` (a Valkey of its own under the run's folder), redis://, rediss://, unix://, redis+sentinel:// or
    redis+cluster://. Give a URL with a password by the environment: PENSTOCK__BUS__URL."""
    claim_after_s: PositiveFloat = Field(default=30.0)
    """An entry whose consumer has not renewed it for so long is taken over by another."""
    max_attempts: PositiveInt = Field(default=5)
    """An entry that failed so often is moved to the dead letters."""
    drain_s: NonNegativeFloat = Field(default=20.0)
    """How long a service that is told to stop finishes what it holds before it gives it back."""
    start_wait_s: PositiveFloat = Field(default=30.0)
    """How long a service waits for the bus at its start; later it waits for ever."""
    audit_entries: NonNegativeInt = Field(default=100_000)
    """How many endings of groups the audit stream keeps; 0: none."""


class DataSettings(Section):
    """The prompts that the run trains on."""

    path: Path = Field(default=Path("train.jsonl"))
    """JSONL, Parquet, or a folder of a Hugging Face dataset saved to disk."""
    prompt_field: str = Field(default="prompt")
    """The column with the prompt's text."""
    messages_field: str = Field(default="messages")
    """The column with chat messages (`[{role, content}]`); used where the prompt's column is missing."""
    answer_field: str = Field(default="answer")
    """The column with the reference answer; every other column goes to the scorers."""
    scorers_field: str = Field(default="")
    """The column that names the scorers of a problem, as a list or with commas between; where it is empty, or no such column
    is set here, all score it."""
    max_bad_rows: NonNegativeInt = Field(default=10)
    """So many rows that cannot be read are counted and passed over; one more stops the start."""
    shuffle: bool = Field(default=True)
    """Draw each epoch in another order, from run.seed."""


class CoordinatorSettings(Section):
    """Admission, ledger and the HTTP API."""

    host: str = Field(default="127.0.0.1")
    """Address of the HTTP API; /metrics and weights are served at `run.host`."""
    port: NonNegativeInt = Field(default=0)
    """Port of the HTTP API; 0: any free one, written to <run folder>/coordinator.json."""
    metrics_port: NonNegativeInt = Field(default=0)
    """Port of /metrics, /healthz and /readyz, which ask for no token; 0: any free one."""
    token_file: Path | None = Field(default=None)
    """A file, readable by you alone, whose first line is the bearer token that may read and operate; empty: `penstock up` makes one,
    `token` in the run's folder."""
    read_token_file: Path | None = Field(default=None)
    """A file whose first line is a bearer token that may only read."""
    generate_token: bool = Field(default=True)
    """Whether `penstock up` makes a token where `token_file` is empty. Without a token, which only a loopback `host` may be, every user of
    this machine may operate the run."""
    autostart: bool = Field(default=True)
    """Start the run as soon as the services are there; otherwise wait for POST /v1/run/start."""
    sample_every_steps: PositiveInt = Field(default=5)
    """Each so many steps one trained group is written to rollouts.jsonl, to be read."""


class TelemetrySettings(Section):
    """Logs and heartbeats."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="INFO")
    """Least severe line that is logged."""
    heartbeat_s: PositiveFloat = Field(default=1.0)
    """Seconds between a replica's heartbeats; it counts as gone after 5 of them."""
    prometheus_port: Annotated[int, Field(ge=0, le=65_535)] = Field(default=9090)
    """Where `penstock up --prometheus` serves, on loopback; 0: any free port."""
