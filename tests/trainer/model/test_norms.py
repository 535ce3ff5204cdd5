"""The RMS norm kernels, in Triton's interpreter and on a GPU."""

import pytest
import torch

from tests.support.interpreted import interpreted


def test_the_kernel_of_rms_norms_gives_the_outputs_and_gradients_of_its_formula() -> None:
    """Against float64; more rows than programs, fewer, odd widths."""
    for line in interpreted(_COMPARE):
        assert max(map(float, line.split())) < 2e-6, line


_COMPARE = """
from penstock.services.trainer.model.layers.triton_kernels import norm as norm_kernel
from penstock.services.trainer.model.layers.norms import rms_norm
torch.manual_seed(0)
norm_kernel._PROGRAMS = 3
for rows, width in ((8, 96), (2, 33), (7, 64)):
    exact = [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((1, rows, width), (width,))]
    direction = torch.randn(1, rows, width, dtype=torch.float64)
    x, weight = exact
    expected = weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    gradients = torch.autograd.grad((expected * direction).sum(), exact)
    found = [one.detach().float().requires_grad_() for one in exact]
    out = rms_norm(*found, 1e-6)
    others = torch.autograd.grad((out * direction.float()).sum(), found)
    pairs = ((out, expected), *zip(others, gradients))
    print(*(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs))
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("width", [896, 3584])
def test_rms_norms_of_a_gpu_in_half_precision_are_within_their_roundings(width: int) -> None:
    from penstock.services.trainer.model.layers.norms import rms_norm

    torch.manual_seed(0)
    inputs = [torch.randn(*shape, device="cuda").bfloat16().requires_grad_() for shape in ((1, 5000, width), (width,))]
    direction = torch.randn(1, 5000, width, device="cuda").bfloat16()
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = exact[1] * exact[0] * (exact[0].square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    gradients = torch.autograd.grad(expected, exact, direction.double())
    out = rms_norm(inputs[0], inputs[1], 1e-6)
    for actual, right in zip((out, *torch.autograd.grad(out, inputs, direction)), (expected, *gradients), strict=True):
        assert (actual.double() - right).norm() < 2**-7 * right.norm()
