"""Where a run's checkpoints are: ``<run folder>/checkpoints/step-000020``."""

from pathlib import Path

CHECKPOINTS = "checkpoints"


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    return run_folder / CHECKPOINTS / name_of(step)
