"""What a run is and what it stands on: ``[run]``, ``[bus]``, ``[data]``, ``[coordinator]``, ``[telemetry]``."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

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
    metrics_port: Annotated[int, Field(ge=0, le=65_535)] = Field(default=0)
    """Port of a service's /metrics, /healthz and /readyz, without a token; 0: any free one. `penstock up` gives its services
    this port and the following ones."""
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto")
    """Where models run; `auto`: a GPU where there is one."""
    threads: NonNegativeInt = Field(default=0)
    """CPU threads of each process that runs a model; 0: as torch decides."""
    deterministic: Literal["off", "steps", "run"] = Field(default="off")
    """`steps`: training steps repeat to the bit, also on a GPU, where some operations are then slower (on a CPU they do anyway).
    `run`: the whole run repeats to the bit on the same kind of machine: each group is generated as its own batch, which is slower
    (1.6 times in the arithmetic example) and needs algorithm.max_lag = 0 and the transformers engine."""


class BusSettings(Section):
    """Redis or Valkey."""

    url: str = Field(default="embedded")
    """`embedded` (a Valkey of its own under the run's folder), redis://, rediss://, unix://, redis+sentinel:// or
    redis+cluster://. Give a URL with a password by the environment: PENSTOCK__BUS__URL."""
    max_attempts: PositiveInt = Field(default=5)
    """An entry that failed so often is moved to the dead letters."""
    drain_s: NonNegativeFloat = Field(default=20.0)
    """How long a service that is told to stop finishes what it holds before it gives it back."""


class DataSettings(Section):
    """The prompts that the run trains on."""

    path: Path = Field(default=Path("train.jsonl"))
    """JSONL, Parquet, or a folder of a Hugging Face dataset saved to disk."""
    prompt_field: str = Field(default="prompt")
    """The column with the prompt: text, or chat messages (`[{role, content}]`). A row without it may have `messages` instead."""
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
    token_file: Path | None = Field(default=None)
    """A file, readable by you alone, whose first line is the bearer token that may read and operate; needed where `host` is no loopback
    address, and where other people use this machine: without a token each of them may operate the run."""
    read_token_file: Path | None = Field(default=None)
    """A file whose first line is a bearer token that may only read."""
    autostart: bool = Field(default=True)
    """Start the run as soon as the services are there; otherwise wait for POST /v1/run/start."""
    sample_every_steps: PositiveInt = Field(default=5)
    """Each so many steps one trained group is written to rollouts.jsonl, to be read."""


class TelemetrySettings(Section):
    """Logs."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="INFO")
    """Least severe line that is logged."""
