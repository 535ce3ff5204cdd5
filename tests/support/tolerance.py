"""Numeric tolerances, each with its cause, and distances that hold on any CPU.

The kernels of another instruction set, another number of threads, ranks or micro-batches, and another packing add the same float32
numbers in another order. That is the only cause of a difference that these tolerances allow; what adds in the same order (a replay, a resume)
is compared bit for bit. ``make portability`` runs the tests that use them under several instruction sets and thread counts.

Adam divides a gradient by its own size, so a gradient that cancels to rounding moves its weight by a whole learning rate in an arbitrary
direction: two correct runs differ there by more than any tolerance for single weights. Whole tensors are therefore compared by norms (:func:`gap`,
:func:`moved_apart`), and tests that choose their optimizer take one without that property (:func:`smooth_adam`).
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from unittest import mock

import torch

ULPS = 1e-6
"""A few float32 operations on numbers near 1: several units in the last place, which is 1.2e-7."""
FORWARD = 1e-4
"""A float32 forward pass of a small model in another order. Logits of ``tests.support.tiny`` reach 60, where the last place is 4e-6, and a
logprob is the difference of two of them; 4.2e-6 was the most between SSE4.1, AVX2 and AVX-512."""
GRADIENT = 3e-5
"""Relative norm of the difference of two gradients in another order; 2e-6 is common."""
MOVEMENT = 1e-4
"""With :func:`smooth_adam`, share of what training moved the weights; 2e-6 is common, a learning rate that is 1 % off makes 1e-2."""
ADAM_MOVEMENT = 1e-2
"""With Adam itself, share of what training moved a million weights; 1e-5 is common. So 100 of them may have a gradient that cancels to
rounding, and move anywhere. A learning rate that is 1 % off makes as much, a step without one of its groups more than 0.1."""


def gap(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    """Return ‖found − expected‖ ÷ ‖expected‖ over all tensors together."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    squares = sum(float((a - b).square().sum()) for a, b in pairs)
    return float((squares / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5)


def moved_apart(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]
) -> float:
    """Return ‖found − expected‖ ÷ ‖expected − start‖: 0 for equal weights, about 1.4 for those of unrelated steps."""
    names = sorted(expected)
    assert sorted(found) == names, "the same tensors"
    return gap([found[n].double() - start[n] for n in names], [expected[n].double() - start[n] for n in names])


@contextlib.contextmanager
def smooth_adam(epsilon: float = 1e-4) -> Iterator[None]:
    """Give engines an Adam whose ε is far above the rounding of a gradient: its steps are continuous in the gradient."""
    from services.trainer.model import engine
    from services.trainer.model.optimizer import adamw as made

    @functools.wraps(made)
    def smooth(*arguments: object) -> torch.optim.Optimizer:
        optimizer = made(*arguments)  # type: ignore[arg-type]
        for group in optimizer.param_groups:
            group["eps"] = epsilon
        return optimizer

    with mock.patch.object(engine, "adamw", smooth):
        yield
