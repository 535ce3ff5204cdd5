"""Compare padded batches with single inputs when the reward service starts.

If a batch of unequal lengths differs from transformers' own attention (float32: by over 1e-3; half precision: by over
0.05 on average), inputs are computed one by one; if these differ too, the model is refused.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from penstock.shared.bus.messages import Float32Array
from penstock.shared.errors import SettingsError

log = logging.getLogger(__name__)

Input = TypeVar("Input")
LENGTHS = (60, 7, 33)
_EXACT, _HALF = 1e-3, 0.05


def choose_alone(
    inputs: Sequence[Input],
    compute: Callable[[Sequence[Input]], Sequence[Float32Array]],
    reference: Callable[[Input], Float32Array],
    *,
    half: bool,
    setting: str,
) -> bool:
    """Return whether inputs must be computed one by one, because padding changes the result."""
    try:
        expected = [reference(model_input) for model_input in inputs]
        together = compute(inputs)
        alone = [compute([model_input])[0] for model_input in inputs]
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise SettingsError(f"the model raises {type(error).__name__}: {first}: change {setting}") from error
    apart, apart_alone = (_apart(outputs, expected, half=half) for outputs in (together, alone))
    limit = _HALF if half else _EXACT
    if apart <= limit:
        return False
    if not apart_alone <= limit:
        raise SettingsError(
            f"expected what the unmodified model gives, within {limit:g}, found {apart_alone:.2g} apart for single inputs and {apart:.2g} for a padded "
            f"batch: change {setting}"
        )
    log.warning(
        "batches are not padded",
        extra={
            "detail": f"outputs of a padded batch are {apart:.2g} apart from those of single inputs; inputs of {setting} are run one at a time, which is slower"
        },
    )
    return True


def _apart(outputs: Sequence[Float32Array], expected: Sequence[Float32Array], *, half: bool) -> float:
    differences = np.abs(np.concatenate(outputs) - np.concatenate(expected))
    return float(differences.mean() if half else differences.max())
