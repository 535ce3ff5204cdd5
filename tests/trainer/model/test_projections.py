"""Joined projections: the same outputs and gradients, from one product."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from penstock.services.trainer.batch.packing import micro_batch
from penstock.services.trainer.model.layers import kernels, projections
from penstock.services.trainer.model.policy import Policy
from tests.support import tiny
from tests.support.packed import rows, separate
from tests.support.tolerance import GRADIENT, gap


def test_joined_projections_give_the_logprobs_and_gradients_of_separate_ones() -> None:
    plain, model = tiny.model(0).requires_grad_(True), tiny.model(0).requires_grad_(True)
    assert projections.join(model) == 2
    policy_logprobs_N = Policy(model)(micro_batch(rows(0))).policy_logprobs_N
    expected = separate(plain, rows(0))
    assert torch.allclose(policy_logprobs_N, expected, atol=1e-5)
    pairs = [
        torch.autograd.grad(logprobs.mean(), list(of.parameters()))
        for logprobs, of in ((policy_logprobs_N, model), (expected, plain))
    ]
    assert gap(list(pairs[0]), list(pairs[1])) < GRADIENT


def test_three_layers_of_one_input_make_one_product_and_other_inputs_their_own() -> None:
    attention = tiny.model(0).model.layers[0].self_attn
    assert projections.join(attention) == 1
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    first, second = torch.randn(2, 3, layers[0].in_features)
    with FlopCounterMode(display=False) as counter:
        actual = [layer(first) for layer in layers]
    width = sum(layer.out_features for layer in layers)
    assert counter.get_total_flops() == 2 * 3 * layers[0].in_features * width
    for given in (first, second):  # the first input is computed again
        for layer in reversed(layers):
            expected = torch.nn.functional.linear(given, layer.weight, layer.bias)
            assert torch.allclose(layer(given), expected, atol=1e-6)
    assert torch.allclose(actual[0], torch.nn.functional.linear(first, layers[0].weight, layers[0].bias), atol=1e-6)


def test_an_input_that_changed_in_between_is_computed_anew() -> None:
    attention = tiny.model(0).model.layers[0].self_attn
    projections.join(attention)
    given = torch.randn(3, attention.q_proj.in_features)
    attention.q_proj(given)
    given.mul_(2)
    expected = torch.nn.functional.linear(given, attention.k_proj.weight, attention.k_proj.bias)
    assert torch.allclose(attention.k_proj(given), expected, atol=1e-6)


def test_the_unmodified_model_has_its_own_projections() -> None:
    model = tiny.model(0)
    projections.join(model)
    layer = model.model.layers[0].self_attn.k_proj
    with kernels.unfused(model):
        assert "forward" not in layer.__dict__
    assert "forward" in layer.__dict__


@pytest.mark.parametrize("name", ["q_proj", "v_proj"])
def test_projections_that_are_not_plain_stay_separate(name: str) -> None:
    attention = tiny.model(0).model.layers[0].self_attn

    class Scaled(torch.nn.Linear):
        pass

    getattr(attention, name).__class__ = Scaled
    assert projections.join(attention) == 0
