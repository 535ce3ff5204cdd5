"""Settings of a run as a whole: ``[run]``, ``[bus]``, ``[data]``, ``[coordinator]``, ``[telemetry]``."""

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from penstock.shared.dataset_source import DatasetSource
from penstock.shared.errors import SettingsError
from penstock.shared.expression import Condition
from penstock.shared.settings.section import OptionalPath, Section

_OWN_ARGUMENTS = frozenset(
    [
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    ]
)


class RunKind(enum.Enum):
    """What a run trains; the value says what groups are for, as a prompt's purpose does."""

    SAMPLES = ("train",)
    MIXTURE = ("train", "demonstrate")
    DEMONSTRATIONS = ("demonstrate",)
    PAIRS = ("demonstrate", "pairs")
    """Preference pairs of the data, and not prompts whose samples become some."""

    @property
    def generates(self) -> bool:
        """Whether replicas generate, and reward services score."""
        return "train" in self.value

    @property
    def purposes(self) -> tuple[str, ...]:
        """What the groups of a batch are for."""
        return tuple(purpose for purpose in self.value if purpose != "pairs")


class RunSettings(Section):
    """What this run is."""

    id: str = Field(default="", max_length=64)
    """Name of the run and its folder. Empty: made from the file's name and the time."""
    folder: Path = Field(default=Path("runs"))
    """Folder in which run folders are created; a run writes to `<folder>/<id>/`."""
    steps: PositiveInt = Field(default=100)
    """Optimizer steps of the run."""
    gpu_hours: Annotated[float, Field(ge=0, le=1e9)] = Field(default=0.0)
    """GPU-hours after which the run pauses; 0: no limit."""
    seed: NonNegativeInt = Field(default=0)
    """Seed of the dataset order, of sampling and of the trainer."""
    host: str = Field(default="", pattern=r"^[0-9A-Za-z_.-]*$")
    """Address of this machine for others. Empty: `POD_IP`, else the address from which it reaches the bus. Set it per
    machine, by a flag or PENSTOCK__RUN__HOST."""
    metrics_port: Annotated[int, Field(ge=0, le=65_535)] = Field(default=0)
    """Port of /metrics, /healthz and /readyz, with `penstock up` the first of its services'; 0: any free port."""
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto")
    """Device of the models: `auto` (a GPU if there is one), `cpu` or `cuda`."""
    threads: NonNegativeInt = Field(default=0)
    """CPU threads of each process that runs a model; 0: as torch decides."""
    deterministic: Literal["off", "steps", "run"] = Field(default="off")
    """Bitwise repeatability. `steps`: training steps, also on a GPU, at some cost. `run`: the whole run, slower; needs
    algorithm.max_lag = 0 and the transformers engine."""


class BusSettings(Section):
    """Redis or Valkey."""

    url: str = Field(default="embedded")
    """URL of the Redis or Valkey server: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://, or
    `embedded` (a Valkey of its own in the run's folder). Give a URL with a password by PENSTOCK__BUS__URL."""
    drain_s: NonNegativeFloat = Field(default=20.0)
    """Seconds that a stopped service may take to finish its work; the rest returns to the bus. A checkpoint for which they
    do not suffice is not begun: a resume replays its steps."""
    shelve_above_bytes: NonNegativeInt = Field(default=0)
    """Size above which a sample or a scored group stays in files of two replicas (`<run folder>/shelf`), of two
    hosts if there are, and the bus carries its digest and addresses; 0: the bus carries all."""
    shelf_bytes: PositiveInt = Field(default=8 << 30)
    """Most bytes of them on one replica; the bus carries what finds no room."""

    def check_shelves(self, kind: RunKind, deterministic: str, *, replays: bool) -> None:
        """Raise ValueError where shelves cannot keep what other settings promise, or have no effect."""
        if (self.shelve_above_bytes or replays) and deterministic == "run":
            raise ValueError(
                'expected bus.shelve_above_bytes = 0 and trainer.router_replay = false with run.deterministic = "run", as a '
                "payload that is lost changes the run: change one of them"
            )
        if not self.shelve_above_bytes and not replays:
            if self.shelf_bytes != type(self).model_fields["shelf_bytes"].default:
                raise ValueError(
                    f"bus.shelf_bytes = {self.shelf_bytes} has no effect with bus.shelve_above_bytes = 0: remove it"
                )
        elif not kind.generates:
            raise ValueError("bus.shelve_above_bytes has no effect, as nothing is generated: remove it")


class DataSettings(Section):
    """The prompts that the run trains on."""

    path: DatasetSource | dict[DatasetSource, PositiveFloat] = Field(default="train.jsonl")
    """Prompts: JSONL, Parquet, a dataset folder saved by Hugging Face `datasets`, or a split on a hub,
    `hf://owner/name@revision:split`. Several by weight: { "a.jsonl" = 3, "b.parquet" = 1 }."""
    prompt_field: str = Field(default="prompt")
    """Column with the prompt: text, or chat messages (`[{role, content}]`). A row without it may have `messages`
    instead."""
    answer_field: str = Field(default="answer")
    """Column with the reference answer; dots lead into a column: `reward_model.ground_truth`. Every other column is
    available to the scorers."""
    completion_field: str = Field(default="completion")
    """Column with a demonstration's completion, with algorithm.loss = "cross_entropy" or algorithm.imitation > 0: text,
    or one message of the assistant (or `messages` that end with one). With rejected_field: the better completion of a
    pair."""
    rejected_field: str = Field(default="")
    """Column with the worse completion of a preference pair, with algorithm.loss = "dpo". Empty: pairs are among a
    group's samples."""
    scorers_field: str = Field(default="")
    """Column with the scorers of a problem, as a list or separated by commas. Empty: all."""
    teacher_field: str = Field(default="")
    """Column with the teachers of a problem, as a list or separated by commas: their mixture. Every training row must
    name one. Not set: all teachers."""
    max_bad_rows: NonNegativeInt = Field(default=10)
    """Unreadable rows that are skipped; one more refuses the start."""
    shuffle: bool = Field(default=True)
    """Whether each epoch has a new order, drawn from run.seed."""
    curriculum: bool = Field(default=False)
    """Whether problems are drawn by the signal of their last groups instead of epoch by epoch."""
    filter: str = Field(default="")
    """Condition of training rows, over their columns and `prompt_characters`: `level <= 3 and source != "web"`. Empty:
    all rows."""
    system: str = Field(default="")
    """System message of prompts that have none; a text becomes the user's message."""
    user: str = Field(default="")
    """The user's message with which texts are asked: `{prompt} Answer in \\boxed{}.`, also with `{extra.COLUMN}`. Empty:
    texts are asked as they are, or as data.system says."""
    chat_template: dict[str, Any] = Field(default={})
    """Arguments of the tokenizer's chat template, such as { enable_thinking = false } or { tools = [{…}] }."""

    @property
    def sources(self) -> Mapping[str, float]:
        """The datasets, each with its weight."""
        return self.path if isinstance(self.path, dict) else {self.path: 1.0}

    @field_validator("filter")
    @classmethod
    def _parsed(cls, text: str) -> str:
        try:
            Condition(text or "1", "data.filter")
        except SettingsError as error:
            raise ValueError(str(error)) from error
        return text

    @field_validator("user")
    @classmethod
    def _asks(cls, text: str) -> str:
        if text and "{prompt}" not in text:
            raise ValueError(
                f"expected {{prompt}} in data.user, found {text[:60]!r}: write it where the prompt belongs"
            )
        return text

    @field_validator("chat_template")
    @classmethod
    def _free(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_OWN_ARGUMENTS & arguments.keys()):
            raise ValueError(
                f"expected arguments of the chat template itself in data.chat_template, found {taken[0]!r}, which Penstock "
                "sets: leave it out"
            )
        return arguments


class CoordinatorSettings(Section):
    """Admission, ledger and the HTTP API."""

    host: str = Field(default="127.0.0.1")
    """Address of the HTTP API."""
    port: NonNegativeInt = Field(default=0)
    """Port of the HTTP API; 0: any free port, written to <run folder>/coordinator.json."""
    token_file: OptionalPath = Field(default=None)
    """File, readable by you alone, whose first line is the bearer token that may read and operate. Empty: `penstock up`
    makes `token` in the run's folder. Required if `host` is not a loopback address."""
    read_token_file: OptionalPath = Field(default=None)
    """File whose first line is a bearer token that may only read."""
    autostart: bool = Field(default=True)
    """Whether the run starts as soon as its services are ready; otherwise it waits for `penstock resume`."""
    sample_every_steps: PositiveInt = Field(default=2)
    """Steps between two groups written to rollouts.jsonl, with their tokens in tokens/, and shown as tables in trackers."""


Tracker = Literal["wandb", "trackio", "mlflow", "tensorboard"]


class TrackingSettings(Section):
    """Experiment trackers (docs/tracking.md)."""

    sinks: tuple[Tracker, ...] = Field(default=())
    """Trackers: "wandb", "trackio", "mlflow", "tensorboard". Each needs the extra of its name."""
    project: str = Field(default="penstock", min_length=1)
    """Project (wandb, trackio) or experiment (mlflow) of the run."""


class TelemetrySettings(Section):
    """Logs."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="INFO")
    """Least severe level that is logged."""
