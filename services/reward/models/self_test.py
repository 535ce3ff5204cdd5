"""The self-test of a model at the start of the reward service: padded batches against single inputs.

A batch is padded on the right, which no output may depend on: not through positions, a recurrence, or rotary embeddings that
follow the longest input. So one batch of unequal lengths is computed as in service, and each input by itself with
transformers' own attention. Where the batch differs, inputs go one by one from then on; what differs even so is refused.

    float32: at most 1e-3 apart anywhere        half precision: 0.05 on average
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from shared.bus.messages import Float32Array
from shared.errors import SettingsError

log = logging.getLogger(__name__)

Input = TypeVar("Input")
LENGTHS = (60, 7, 33)
"""Tokens of the inputs."""
_EXACT, _HALF = 1e-3, 0.05


def choose_alone(
    inputs: Sequence[Input],
    compute: Callable[[Sequence[Input]], Sequence[Float32Array]],
    reference: Callable[[Input], Float32Array],
    *,
    half: bool,
    what: str,
) -> bool:
    """Return whether inputs must be computed one by one, as a padded batch of them gives something else.

    Args:
        inputs: of unequal lengths.
        compute: what the service does with a batch.
        reference: the same of one input by the unmodified model.
        half: whether the weights are in half precision.
        what: the model and the setting that chose it, for the message.

    Raises:
        SettingsError: one by one they differ, too, or the model cannot be run.
    """
    try:
        expected = [reference(one) for one in inputs]
        together = compute(inputs)
        alone = [compute([one])[0] for one in inputs]
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise SettingsError(
            f"expected a model that runs, found that it raises {type(error).__name__}: {first}: change {what}"
        ) from error
    apart, apart_alone = (_apart(found, expected, half=half) for found in (together, alone))
    limit = _HALF if half else _EXACT
    if apart <= limit:
        return False
    if not apart_alone <= limit:
        raise SettingsError(
            f"expected what the unmodified model gives, within {limit:g}, found {apart_alone:.2g} apart for single inputs and {apart:.2g} for a padded "
            f"batch: change {what}"
        )
    log.warning(
        "batches are not padded",
        extra={
            "detail": f"outputs of a padded batch are {apart:.2g} apart from those of single inputs; inputs of {what} go one by one, which is slower"
        },
    )
    return True


def _apart(found: Sequence[Float32Array], expected: Sequence[Float32Array], *, half: bool) -> float:
    differences = np.abs(np.concatenate(found) - np.concatenate(expected))
    return float(differences.mean() if half else differences.max())
