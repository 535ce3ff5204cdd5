"""A function of the user's own (``functions``)."""

import torch

from penstock.services.trainer.algorithm import functions
from penstock.services.trainer.algorithm.kinds import TokenLoss, Tokens
from penstock.shared.settings.algorithm import AlgorithmSettings


def loss(tokens: Tokens, algorithm: AlgorithmSettings) -> TokenLoss:
    inputs = tokens.inputs
    tensors = {
        "policy_logprobs": tokens.policy_N,
        "anchor_logprobs": tokens.anchor_N,
        "behavior_logprobs": inputs.behavior_logprobs_N,
        "advantages": tokens.advantages_N,
        "entropy": tokens.out.entropy_N.detach(),
        "lags": inputs.lags_N,
        "lengths": inputs.lengths_S,
    }
    never_N = torch.zeros_like(tokens.advantages_N, dtype=torch.bool)
    return TokenLoss(functions.loss(algorithm.loss, tensors), never_N, never_N)
