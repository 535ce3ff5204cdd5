"""Laws of the way from logits to logprobs and entropies, in torch's operations and by the kernel of GPUs."""

import math

import pytest
import torch

from shared.logits import logprobs, logprobs_and_entropies
from tests.interpreted import interpreted


def test_a_logprob_and_an_entropy_are_those_of_the_distribution_at_the_tokens_temperature() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)]])
    targets, temperatures = torch.tensor([1, 0]), torch.tensor([1.0, 0.5])
    chosen, entropies = logprobs_and_entropies(logits, targets, temperatures)
    assert chosen.tolist() == pytest.approx([math.log(3 / 4), math.log(1 / 10)])
    assert entropies.tolist() == pytest.approx(
        [math.log(4) - 3 / 4 * math.log(3), math.log(10) - 9 / 10 * math.log(9)], rel=1e-5
    )
    assert torch.equal(logprobs(logits, targets, temperatures), chosen)


def test_the_kernel_of_gpus_gives_the_same_numbers_and_gradients_and_carries_on_what_is_not_finite() -> None:
    """Beside float64; rows of two blocks and a bit, of one, and of less."""
    lines = interpreted(_COMPARE + _NOT_FINITE)
    assert lines[8:] == ["nan nan", "nan nan", "0.0 0.0", "-inf 0.0"]
    for line in lines[:8]:
        assert max(map(float, line.split())) < 2e-6, line


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("width", [97, 4096, 151_936])
def test_a_gpu_gives_what_torch_does(dtype: torch.dtype, tolerance: float, width: int) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(33, width, device="cuda")).to(dtype).requires_grad_()
    targets, temperatures = torch.randint(0, width, (33,), device="cuda"), torch.linspace(0.5, 1.5, 33, device="cuda")
    found = []
    for fused in (False, True):
        one, other = logprobs_and_entropies(logits, targets, temperatures, entropy_gradient=True, fused=fused)
        (gradient,) = torch.autograd.grad(one.sum() + 0.3 * other.square().sum(), logits)
        found.append((one.detach(), other.detach(), gradient.float()))
    for number, (plain, fused_one) in enumerate(zip(*found, strict=True)):
        assert torch.allclose(plain, fused_one, rtol=tolerance if number == 2 else 1e-5, atol=1e-5)


_COMPARE = """
from shared.logits import _Fused
torch.manual_seed(0)
for width, spread in ((9001, 1.0), (9001, 8.0), (4096, 1.0), (7, 1.0)):
    for temperature in (1.0, 0.7):
        exact = (torch.randn(4, width) * spread).double().requires_grad_()
        targets = torch.randint(0, width, (4,))
        one, other = torch.randn(2, 4)
        logprobs = torch.log_softmax(exact / temperature, -1)
        chosen, entropies = logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
        (gradient,) = torch.autograd.grad((one * chosen + other * entropies).sum(), exact)
        logits = exact.detach().float().requires_grad_()
        found = _Fused.apply(logits, targets, torch.full((4,), temperature), True)
        (fused,) = torch.autograd.grad((one * found[0] + other * found[1]).sum(), logits)
        far = [(a - b).abs().max() / b.abs().max() for a, b in ((found[0], chosen), (found[1], entropies), (fused, gradient))]
        print(*(float(one) for one in far))
        assert not _Fused.apply(logits, targets, torch.ones(4), False)[1].requires_grad
"""

_NOT_FINITE = """
inf, nan = float("inf"), float("nan")
rows = torch.zeros(4, 5000)
rows[0, 4500] = nan
rows[1, 3] = inf
rows[2:, 1:] = -inf
chosen, entropies = _Fused.apply(rows, torch.tensor([0, 0, 0, 1]), torch.ones(4), False)
for pair in zip(chosen.tolist(), entropies.tolist()):
    print(*pair)
"""
