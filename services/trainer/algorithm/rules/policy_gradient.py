"""REINFORCE: −A π (Williams 1992)."""

import torch
from torch import Tensor

from penstock.services.trainer.algorithm.kinds import TokenLoss, Tokens
from penstock.shared.settings.algorithm import AlgorithmSettings


def loss(tokens: Tokens, _: AlgorithmSettings) -> TokenLoss:
    return policy_gradient(tokens.policy_N, tokens.advantages_N)


def policy_gradient(policy_logprobs_N: Tensor, advantages_N: Tensor) -> TokenLoss:
    never_N = torch.zeros_like(policy_logprobs_N, dtype=torch.bool)
    return TokenLoss(-advantages_N * policy_logprobs_N, never_N, never_N)
