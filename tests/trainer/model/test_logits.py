"""Logprobs and entropies by torch's operations and the GPU kernel."""

import copy
import math

import pytest
import torch
from torch import nn

from penstock.services.trainer.model.layers.logits import token_logprobs
from penstock.shared.errors import SettingsError
from penstock.shared.model.logits import logprobs, logprobs_and_entropies, partition
from penstock.shared.model.logits_projection import projection
from tests.support.interpreted import interpreted
from tests.support.tolerance import ULPS

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_logprob_and_an_entropy_are_those_of_the_distribution_at_the_tokens_temperature() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)]])
    targets, temperatures = torch.tensor([1, 0]), torch.tensor([1.0, 0.5])
    chosen, entropies = logprobs_and_entropies(logits, targets, temperatures)
    assert chosen.tolist() == pytest.approx([math.log(3 / 4), math.log(1 / 10)])
    assert entropies.tolist() == pytest.approx(
        [math.log(4) - 3 / 4 * math.log(3), math.log(10) - 9 / 10 * math.log(9)], rel=ULPS
    )
    assert torch.equal(logprobs(logits, targets, temperatures), chosen)


def test_the_kernel_of_gpus_gives_the_same_numbers_and_gradients_and_carries_on_what_is_not_finite() -> None:
    """Against float64; rows of over two blocks, one, and less."""
    lines = interpreted(_COMPARE + _NOT_FINITE)
    assert lines[8:] == ["nan nan", "nan nan", "0.0 0.0", "-inf 0.0"]
    for line in lines[:8]:
        assert max(map(float, line.split())) < 2e-6, line


def test_the_kernel_of_gpus_parts_tokens_as_torch_does_and_leaves_the_logits_as_they_are() -> None:
    """Against float64; the chosen tokens have all of the probability but 1e-20 in the second half of the lines."""
    lines = interpreted(_PARTITION)
    assert len(lines) == 8
    for line in lines:
        assert max(map(float, line.split())) < 2e-6, line


@NEEDS_GPU
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_a_gpu_parts_tokens_as_torch_does(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(33, 151_936, device="cuda")).to(dtype).requires_grad_()
    before, temperatures = logits.detach().clone(), torch.linspace(0.5, 1.5, 33, device="cuda")
    ids = torch.arange(33 * 8, device="cuda").reshape(33, 8) * 500
    collected = []
    for fused in (False, True):
        tops, others = partition(logits, ids, temperatures, fused=fused)
        (gradient,) = torch.autograd.grad(tops.square().sum() + others.square().sum(), logits)
        collected.append((tops.detach(), others.detach(), gradient.float()))
    assert torch.equal(logits, before)
    for number, (plain, fused_one) in enumerate(zip(*collected, strict=True)):
        assert torch.allclose(plain, fused_one, rtol=tolerance if number == 2 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_a_word_that_cannot_come_adds_nothing_to_the_entropy_and_has_no_gradient(device: str) -> None:
    logits = torch.tensor([[0.0, math.log(3.0), -math.inf]], device=device, requires_grad=True)
    targets, temperatures = torch.tensor([1], device=device), torch.ones(1, device=device)
    logprob, entropy = logprobs_and_entropies(logits, targets, temperatures, entropy_gradient=True)
    assert entropy.tolist() == pytest.approx([math.log(4) - 3 / 4 * math.log(3)], rel=1e-5)
    (gradient,) = torch.autograd.grad(logprob.sum() + entropy.sum(), logits)
    # ∂ log p_1 = [−1/4, 1/4];  ∂ entropy / ∂ x_v = −p_v (log p_v + entropy) = ± 3/16 · log 3
    bend = 3 / 16 * math.log(3)
    assert gradient.tolist() == [pytest.approx([-1 / 4 + bend, 1 / 4 - bend, 0.0], abs=1e-6)]


@NEEDS_GPU
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("width", [97, 4096, 151_936])
def test_a_gpu_gives_what_torch_does(dtype: torch.dtype, tolerance: float, width: int) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(33, width, device="cuda")).to(dtype).requires_grad_()
    targets, temperatures = torch.randint(0, width, (33,), device="cuda"), torch.linspace(0.5, 1.5, 33, device="cuda")
    collected = []
    for fused in (False, True):
        first, other = logprobs_and_entropies(logits, targets, temperatures, entropy_gradient=True, fused=fused)
        assert first.grad_fn is not None
        assert (first.grad_fn.name() == "_FusedBackward") == fused
        (gradient,) = torch.autograd.grad(first.sum() + 0.3 * other.square().sum(), logits)
        collected.append((first.detach(), other.detach(), gradient.float()))
    for number, (plain, fused_one) in enumerate(zip(*collected, strict=True)):
        assert torch.allclose(plain, fused_one, rtol=tolerance if number == 2 else 1e-5, atol=1e-5)


def _layer(device: str, *, bias: bool = False) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    output = nn.Linear(64, 3000, bias=bias).to(device, torch.bfloat16)
    nn.init.normal_(output.weight, std=0.5)
    return output, torch.randn(40, 64, device=device).bfloat16()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_logits_in_float32_are_those_of_exact_products_and_bfloat16_rounds_them(device: str, bias: bool) -> None:
    output, hidden = _layer(device, bias=bias)
    exact = hidden.double() @ output.weight.double().t() + (output.bias.double() if bias else 0.0)
    actual = projection(output, "float32")(hidden)
    assert actual.dtype == torch.float32
    # logits up to 20: 64 products with relative error 2^-24 in float32; bfloat16 has 8 bits
    assert (actual - exact).abs().max() < 1e-4
    assert (projection(output, "model")(hidden) - exact).abs().max() > 1e-2


@pytest.mark.parametrize("chunk_tokens", [0, 16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_the_gradients_of_logits_in_float32_are_those_of_float32_copies(device: str, chunk_tokens: int) -> None:
    output, hidden = _layer(device)
    targets, ones = torch.arange(40, device=device), torch.ones(40, device=device)
    gradients = []
    for layer, leaf in ((output, hidden), (copy.deepcopy(output).float(), hidden.float())):
        leaf.requires_grad_()
        out = token_logprobs(leaf, layer, targets, ones, chunk_tokens, kind="float32")
        gradients.append(torch.autograd.grad(out.policy_logprobs_N.square().sum(), (leaf, layer.weight)))
    for gradient, expected in zip(*gradients, strict=True):
        assert gradient.dtype == torch.bfloat16
        # gradient and sum round to 8 bits: relative error 2^-9 each
        assert (gradient.float() - expected).norm() < 2**-7 * expected.norm()


def test_an_output_layer_that_does_more_keeps_its_own_type_or_is_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return 2.0 * super().forward(hidden)

    output, hidden = Scaled(4, 5), torch.ones(1, 4)
    assert torch.equal(projection(output, "model")(hidden), output(hidden))
    with pytest.raises(SettingsError, match=r'plain linear output layer for trainer\.logits = "float32", found Scaled'):
        projection(output, "float32")


_COMPARE = """
from penstock.shared.model.logits import _Fused
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

_PARTITION = """
from penstock.shared.model.logits import _Fused, _Partition
torch.manual_seed(0)
for above in (0.0, 46.0):
    for width, k in ((9001, 1), (9001, 64), (4096, 8), (7, 3)):
        exact = torch.randn(4, width).double()
        ids = torch.stack([torch.randperm(width)[:k].sort().values for _ in range(4)])
        exact.scatter_add_(-1, ids, torch.full(ids.shape, above).double())
        exact.requires_grad_()
        temperatures, (one, other) = torch.linspace(0.7, 1.3, 4), (torch.randn(4, k), torch.randn(4))
        scaled = exact / temperatures.double()[:, None]
        expected = scaled.gather(-1, ids), scaled.scatter(-1, ids, -torch.inf).logsumexp(-1)
        (gradient,) = torch.autograd.grad((one * expected[0]).sum() + (other * expected[1]).sum(), exact)
        logits = exact.detach().float().requires_grad_()
        kept, sampled = logits.detach().clone(), _Fused.apply(logits, ids[:, 0], temperatures, True)
        found = _Partition.apply(logits, ids, temperatures, True)
        (fused,) = torch.autograd.grad((one * found[0]).sum() + (other * found[1]).sum(), logits)
        assert torch.equal(logits, kept)
        torch.autograd.grad(sampled[0].sum(), logits)  # what it saved is still valid
        pairs = (found[0], expected[0]), (found[1], expected[1]), (fused, gradient)
        print(*(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
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
