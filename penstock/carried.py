"""Reward functions of a script or notebook in a scorer's processes: ``penstock.carried:NAME(file="…/rewards.pkl")``.

Whatever a function is called, it is no name of this module: names that begin with ``__`` are no function's.
"""

from penstock.inputs import loader as __loader


def __getattr__(name: str) -> object:
    """Return what loads the function ``name`` from a file."""
    if name.startswith("__"):
        raise AttributeError(name)
    return __loader(name)
