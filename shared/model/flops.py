"""Cost of a forward pass in floating point operations (a multiply-add is 2).

Counted are matrix products: linear layers (of experts, the active ones), attention, output layer::

    forward = 2 · tokens · linear_weights + 4 · visible_pairs · attention_width + 2 · predicted · output_weights

A backward pass costs twice that; recomputation is not counted (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
"""

import dataclasses
from collections.abc import Sequence

BACKWARD = 2
"""In forward passes."""

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
"""Dense bfloat16, from data sheets; the first match in the device's name counts."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes that determine a model's cost; by default tokens count."""

    linear_weights: int = 1
    """Per token, without the output layer."""
    attention_width: int = 0
    """Layers × heads × size of a head, of layers without a window."""
    output_weights: int = 0
    """Vocabulary × hidden size."""
    windows: tuple[tuple[int, int], ...] = ()
    """(Window in tokens, attention width of its layers)."""


def forward_flops(
    tokens: int, visible_pairs: int, predicted: int, sizes: ModelSizes, windowed_pairs: Sequence[int] = ()
) -> float:
    """Operations of one forward pass over ``tokens`` positions, ``predicted`` of them with logits; ``visible_pairs``
    are (position, visible position) pairs, and ``windowed_pairs`` those within each of ``sizes.windows``.
    """
    attention = visible_pairs * sizes.attention_width
    attention += sum(pairs * width for pairs, (_, width) in zip(windowed_pairs, sizes.windows, strict=True))
    return 2.0 * tokens * sizes.linear_weights + 4.0 * attention + 2.0 * predicted * sizes.output_weights


def peak_tflops(device_name: str) -> float:
    """Dense bfloat16; 0 if unknown."""
    for name, peak in _PEAK_TFLOPS.items():
        if name in device_name:
            return peak
    return 0.0
