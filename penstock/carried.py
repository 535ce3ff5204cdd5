"""Reward functions of a script or notebook in a scorer's processes: ``penstock.carried:NAME(file="…/rewards.pkl")``.

The file was written by :mod:`penstock.inputs` in the run's folder, which only its user can write to.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any


def __getattr__(name: str) -> Callable[[str], Callable[..., Any]]:
    """Return what loads the function ``name`` from a file."""
    if name.startswith("__"):
        raise AttributeError(name)

    def load(file: str) -> Callable[..., Any]:
        functions: dict[str, Callable[..., Any]] = pickle.loads(Path(file).read_bytes())  # noqa: S301 (see above)
        return functions[name]

    return load
