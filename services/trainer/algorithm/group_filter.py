"""A filter of groups of the user's own, by import path (docs/algorithms.md, "Your own loss, advantage or filter").

::

    def mine(*, rewards, lengths, **others) -> bool:     # whether the group is trained
"""

from collections.abc import Sequence

import numpy as np

from services.trainer.algorithm.user_function import load
from shared.bus.messages import Experience, FinishReason, Float32Array, Sample
from shared.errors import MessageError

_TRIAL_LENGTHS = (3, 1, 2)


def is_kept(name: str, experience: Experience) -> bool:
    """Return whether the function ``name`` keeps ``experience``. Raises MessageError: it failed."""
    try:
        return _ask(name, experience.rewards, experience.group.samples)
    except Exception as error:
        raise MessageError(
            f"algorithm.filter: {name} failed for {experience.group.prompt.problem} ({type(error).__name__}: {error}): correct the "
            "function, or change algorithm.filter"
        ) from error


def try_filter(name: str) -> None:
    """Call the function ``name`` once; raises what is wrong with it."""
    samples = [
        Sample(
            token_ids=np.arange(length, dtype=np.int32),
            behavior_logprobs=np.full(length, -1.0, dtype=np.float32),
            version_spans=np.zeros((1, 2), dtype=np.int32),
            finish_reason=FinishReason.STOP,
            text="a trial",
        )
        for length in _TRIAL_LENGTHS
    ]
    _ask(name, np.linspace(0.0, 1.0, len(samples), dtype=np.float32), samples)


def _ask(name: str, rewards_S: Float32Array, samples: Sequence[Sample]) -> bool:
    """Return what the function ``name`` returns for a group. Raises TypeError for no bool, and what it raises."""
    kept = load(name)(
        rewards=rewards_S.copy(),
        lengths=np.array([len(sample.token_ids) for sample in samples], dtype=np.int32),
        truncated=np.array([sample.finish_reason is FinishReason.LENGTH for sample in samples]),
        token_ids=np.concatenate([sample.token_ids for sample in samples]),
        behavior_logprobs=np.concatenate([sample.behavior_logprobs for sample in samples]),
        texts=[sample.text for sample in samples],
    )
    if not isinstance(kept, bool | np.bool_):
        raise TypeError(f"expected True or False, found {type(kept).__name__}")
    return bool(kept)
