"""Numeric tolerances with their causes, and distances that hold on any CPU.

Other instruction sets, numbers of threads, ranks or micro-batches, and packings add the same float32 numbers in
another order. Only this difference is tolerated; replay and resume add in the same order and are compared bit for
bit. ``make portability`` runs these tests under several instruction sets and thread counts.

Adam divides a gradient by its own size, so a gradient that cancels to rounding moves its weight a whole learning rate
in an arbitrary direction. Whole tensors are therefore compared by norms (:func:`gap`, :func:`moved_apart`), and tests
that choose their optimizer use :func:`smooth_adam`.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

ULPS = 1e-6
"""A few float32 operations near 1: several units in the last place (1.2e-7)."""
FORWARD = 1e-4
"""A reordered float32 forward pass of a small model. Logits of ``tests.support.tiny`` reach 60, with last place 4e-6,
and a logprob is a difference of two; at most 4.2e-6 was observed between SSE4.1, AVX2 and AVX-512.
"""
GRADIENT = 3e-5
"""Relative norm of the difference of reordered gradients; 2e-6 is common."""
MOVEMENT = 1e-4
"""With :func:`smooth_adam`, relative to the movement of the weights; 2e-6 is common, a learning rate 1 % off gives
1e-2.
"""
RESUMED = 1e-5
"""As MOVEMENT, of a step or two by other ranks or another ZeRO stage, from the same weights and moments."""
ADAM_MOVEMENT = 1e-2
"""With Adam, relative to the movement of a million weights; 1e-5 is common, so 100 may have cancelling gradients and
move anywhere. A learning rate 1 % off gives as much, a step without one of its groups more than 0.1.
"""


def gap(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    """Return ‖found − expected‖ ÷ ‖expected‖ over all tensors together."""
    pairs = [(a.double(), b.double()) for a, b in zip(actual, expected, strict=True)]
    squares = sum(float((a - b).square().sum()) for a, b in pairs)
    return float((squares / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5)


def moved_apart(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]
) -> float:
    """Return ‖found − expected‖ ÷ ‖expected − start‖: 0 for equal weights, about 1.4 for unrelated steps."""
    names = sorted(expected)
    assert sorted(actual) == names, "the same tensors"
    return gap([actual[n].double() - start[n] for n in names], [expected[n].double() - start[n] for n in names])


@contextlib.contextmanager
def smooth_adam(epsilon: float = 1e-4) -> Iterator[None]:
    """Use an Adam with ε far above a gradient's rounding, so that steps are continuous in the gradient."""
    from penstock.services.trainer.model import optimizer

    def moments(trainer: Any) -> dict[str, Any]:
        return {"betas": trainer.adam_betas, "eps": epsilon}

    with mock.patch.object(optimizer, "_moments", moments):
        yield
