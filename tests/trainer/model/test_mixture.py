"""Mixtures of experts: trainer and replicas route alike; only the algorithm's loss is trained."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PhimoeConfig

from penstock.services.trainer.batch.packing import micro_batch
from penstock.services.trainer.model.policy import Policy
from tests.support import tiny
from tests.support.packed import rows

SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2,
    "initializer_range": 0.3,
}  # fmt: skip
NOISY = {
    "mixtral": MixtralConfig(**SIZES, router_jitter_noise=0.5),
    "phimoe": PhimoeConfig(**SIZES, router_jitter_noise=0.5, input_jitter_noise=0.5),
}


def made(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config))  # the configuration notes a model's attention


def logprobs(policy: Policy) -> torch.Tensor:
    policy_logprobs_N: torch.Tensor = policy(micro_batch(rows(0))).policy_logprobs_N
    return policy_logprobs_N


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", NOISY)
def test_a_router_with_noise_routes_in_training_as_in_generation(name: str, checkpointing: bool) -> None:
    policy, model = Policy(made(NOISY[name])), made(NOISY[name])
    if checkpointing:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train()
    training = logprobs(policy)
    assert torch.equal(training, logprobs(policy))
    assert torch.equal(training, logprobs(Policy(model).eval()))
    # in training mode the model alone answers differently each time
    ids = torch.arange(40)[None]
    assert not torch.equal(model.train()(input_ids=ids).logits, model(input_ids=ids).logits)


def test_the_gradient_has_nothing_of_a_routers_auxiliary_loss() -> None:
    gradients = []
    for coefficient in (0.0, 1e6):
        config = tiny.mixture().config
        config.output_router_logits, config.router_aux_loss_coef = True, coefficient
        policy = Policy(made(config)).train()
        logprobs(policy).mean().backward()
        gradients.append([parameter.grad for parameter in policy.parameters()])
    assert all(
        torch.equal(entry, other)
        for entry, other in zip(*gradients, strict=True)
        if entry is not None and other is not None
    )
    assert sum(gradient is not None for gradient in gradients[0]) == len(gradients[0])
