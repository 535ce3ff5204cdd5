"""What a forward pass costs in floating point operations, from plain numbers. Knows no model and no tensor.

A multiplication and its addition are 2 operations. Counted are the matrix products: linear layers for every token (of experts, those that
a token goes through), attention for every pair of a token and one that it sees (scores and their use), the output layer where a token is predicted::

    forward = 2 · tokens · linear_weights + 4 · visible_pairs · attention_width + 2 · predicted · output_weights

Layers that see only a window of tokens have pairs of their own.

A backward pass costs twice that. What is computed again (gradient checkpointing) is not counted, as is usual for model FLOPs
utilisation (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
"""

import dataclasses
from collections.abc import Sequence

BACKWARD = 2
"""Backward passes cost so many forward passes."""

_PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
}
"""Dense bfloat16 by the makers' data sheets; the first name found in a device's name counts."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSizes:
    """What of a model a cost depends on. The defaults weigh tokens alone."""

    linear_weights: int = 1
    """Weights of the linear layers that every token goes through, without the output layer."""
    attention_width: int = 0
    """Layers × heads × size of a head, of layers without a window."""
    output_weights: int = 0
    """Vocabulary × hidden size."""
    windows: tuple[tuple[int, int], ...] = ()
    """(Window in tokens, attention width of the layers that have it)."""


def forward_flops(
    tokens: int, visible_pairs: int, predicted: int, sizes: ModelSizes, windowed_pairs: Sequence[int] = ()
) -> float:
    """Return the operations of one forward pass.

    Args:
        tokens: computed positions.
        visible_pairs: pairs of a position and one that it attends to, itself included.
        predicted: positions whose logits are computed.
        sizes: the model.
        windowed_pairs: the pairs within each of ``sizes.windows``.
    """
    attention = visible_pairs * sizes.attention_width
    attention += sum(pairs * width for pairs, (_, width) in zip(windowed_pairs, sizes.windows, strict=True))
    return 2.0 * tokens * sizes.linear_weights + 4.0 * attention + 2.0 * predicted * sizes.output_weights


def peak_tflops(device_name: str) -> float:
    """Return the dense bfloat16 peak of a GPU in TFLOP/s by its name; 0 where it is not known."""
    for name, peak in _PEAK_TFLOPS.items():
        if name in device_name:
            return peak
    return 0.0
