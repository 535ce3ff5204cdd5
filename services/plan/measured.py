"""What an earlier run measured: metrics.jsonl and settings.toml beside its summary.json."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.shared.errors import SettingsError
from penstock.shared.settings import SETTINGS_FILE, Settings, load

WARM_UP = 3
"""A third of the steps is not measured."""
_COMPUTING = ("forward_backward", "proximal", "reference", "critic")
_OTHER = ("optimizer", "snapshot", "commit", "probe")


@dataclasses.dataclass(frozen=True, slots=True)
class Corrections:
    """Measured over predicted seconds."""

    train: float = 1.0
    """Of forward and backward passes."""
    update: float = 1.0
    host: float = 1.0
    """Of vLLM's scheduler, which depends on the host's processors. Several engines hide it behind each other's kernels."""
    decode: float = 1.0
    """Of whole decoding steps: what is too much to be the scheduler's."""
    switch: float = 1.0
    """From generating to training and back."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Means of a run's steady steps."""

    step_s: float
    wait_s: float
    """Switches of shared devices included."""
    switch_s: float
    moving_s: float
    """Of the trainer's memory at switches, beside the wait."""
    switches: float
    """From generating to training."""
    rung: int
    """Of the newest switch."""
    compute_s: float
    """Forward and backward passes, of all kinds."""
    other_s: float
    """Update, snapshot, commit and probe."""
    samples: float
    tokens: float
    """Of a completion; of an episode, in all of its turns."""
    samples_per_s: float
    turns: float = 0.0
    """Of an episode; 0: no episodes."""
    given_tokens: float = 0.0
    """Of an episode, its prompt included."""
    turns_wait_s: float = 0.0
    """Of an episode, for its tools."""


def mean_metrics(run_folder: Path) -> dict[str, float]:
    """Empty if the run has no three steps."""
    try:
        lines = _lines(run_folder / "metrics.jsonl")
    except SettingsError:
        return {}
    steps = lines[len(lines) // WARM_UP :] if len(lines) >= WARM_UP else []
    names = {name for line in steps for name, value in line.items() if isinstance(value, int | float)}
    return {name: sum(float(line.get(name) or 0.0) for line in steps) / len(steps) for name in names}


def folder_of(path: Path) -> Path:
    """Return the folder of the run whose folder, or summary.json, ``path`` is."""
    return path if path.is_dir() else path.parent


def read_run(path: Path) -> tuple[Measured, Settings]:
    """Return the figures and settings of the run whose folder, or summary.json, ``path`` is. Raises SettingsError:
    they cannot be read, or the run has too few steps.
    """
    folder = folder_of(path)
    own = load(folder / SETTINGS_FILE, environment={})
    return measured(_lines(folder / "metrics.jsonl"), own.algorithm.max_lag), own


def under_mps(path: Path) -> bool | None:
    """Return whether the engines of a run shared GPUs under CUDA MPS, or None if it has no record of several engines."""
    folder = folder_of(path)
    file = folder / "events.jsonl"
    events = _lines(file) if file.exists() else []
    started = [str(event.get("detail")) for event in events if event.get("name") == "engines per GPU"]
    return "CUDA MPS" in started[-1] if started else None


def steady(steps: int, max_lag: int) -> slice:
    """Return which of a run's ``steps`` tell its speed, as far as there are such: those after the first third, without the
    last ``max_lag``, beside which nothing is admitted any more, and in multiples of ``max_lag + 1``, as batches that were
    admitted together may be trained directly after each other.
    """
    first, turn = max(1, steps // WARM_UP), max_lag + 1
    end = steps - max_lag if steps - max_lag > first else steps
    turns = (end - first) // turn
    return slice(end - turns * turn if turns else first, end)


def measured(lines: Sequence[Mapping[str, Any]], max_lag: int) -> Measured:
    """Return the means of the lines of metrics.jsonl. Raises SettingsError: fewer than three steps."""
    if len(lines) < 3:
        raise SettingsError(
            f"expected a run of at least 3 steps with --calibrate, found {len(lines)}: give a longer one"
        )
    steps = lines[steady(len(lines), max_lag)]

    def mean(*names: str) -> float:
        return sum(float(line.get(name) or 0.0) for line in steps for name in names) / len(steps)

    step_s = mean("step_s")
    return Measured(
        step_s=step_s,
        wait_s=mean("phase_wait_s"),
        switch_s=mean("switch_train_s", "switch_generate_s"),
        moving_s=mean("phase_offload_s", "phase_reload_s"),
        switches=mean("switches"),
        rung=round(next((line["switch_rung"] for line in reversed(steps) if "switch_rung" in line), 0)),
        compute_s=mean(*(f"phase_{name}_s" for name in _COMPUTING)),
        other_s=mean(*(f"phase_{name}_s" for name in _OTHER)),
        samples=mean("samples"),
        tokens=mean("response_tokens_mean"),
        samples_per_s=mean("samples") / step_s if step_s else 0.0,
        turns=mean("episode_turns_mean"),
        given_tokens=mean("episode_given_tokens_mean"),
        turns_wait_s=mean("episode_wait_s_mean"),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise SettingsError(f"expected the metrics of a run in {path}, found: {error}: change --calibrate") from error
    return [row for row in rows if isinstance(row, dict)]
