"""A filter of groups of the user's own, by import path (docs/algorithms.md, "Your own loss, advantage or filter").

::

    def mine(*, rewards, lengths, **others) -> bool:     # whether the group is trained
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shared.bus.messages import Experience, FinishReason
from shared.errors import MessageError


@functools.cache
def load(name: str) -> Callable[..., Any]:
    """Return the function ``package.module:function``; raises its import's error."""
    module, _, path = name.partition(":")
    target: Any = importlib.import_module(module)
    for part in path.split("."):
        target = getattr(target, part)
    if not callable(target):
        raise TypeError(f"it is no function but {type(target).__name__}")
    function: Callable[..., Any] = target
    return function


def keeps(name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether the function ``name`` keeps a group. Raises TypeError for another result, and what it raises."""
    kept = load(name)(**arguments)
    if not isinstance(kept, bool | np.bool_):
        raise TypeError(f"expected True or False, found {type(kept).__name__}")
    return bool(kept)


def is_kept(name: str, experience: Experience) -> bool:
    """Return whether the function ``name`` keeps ``experience``. Raises MessageError: it failed."""
    samples = experience.group.samples
    arguments = {
        "rewards": experience.rewards.copy(),
        "lengths": np.array([len(sample.token_ids) for sample in samples], dtype=np.int32),
        "truncated": np.array([sample.finish_reason is FinishReason.LENGTH for sample in samples]),
        "token_ids": np.concatenate([sample.token_ids for sample in samples]),
        "behavior_logprobs": np.concatenate([sample.behavior_logprobs for sample in samples]),
        "texts": [sample.text for sample in samples],
    }
    try:
        return keeps(name, arguments)
    except Exception as error:
        raise MessageError(
            f"algorithm.filter: {name} failed for {experience.group.prompt.problem} ({type(error).__name__}: {error}): correct the "
            "function, or change algorithm.filter"
        ) from error


def try_filter(name: str) -> None:
    """Call the function ``name`` once; raises what is wrong with it."""
    lengths = np.array([3, 1, 2], dtype=np.int32)
    keeps(
        name,
        {
            "rewards": np.array([0.0, 1.0, 0.5], dtype=np.float32),
            "lengths": lengths,
            "truncated": np.array([True, False, False]),
            "token_ids": np.arange(int(lengths.sum()), dtype=np.int32),
            "behavior_logprobs": np.linspace(-1.0, -0.5, int(lengths.sum()), dtype=np.float32),
            "texts": ["a trial", "of", "the filter"],
        },
    )
