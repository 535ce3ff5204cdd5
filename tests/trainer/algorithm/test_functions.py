"""Laws of loss and advantage functions by import path."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.services.trainer.algorithm import functions
from penstock.shared.bus.messages import Float32Array
from penstock.shared.errors import SettingsError
from penstock.shared.settings.algorithm import AlgorithmSettings
from tests.trainer.algorithm.test_update import Rank, batch, settings

pytestmark = pytest.mark.usefixtures("one_rank")

HERE = "tests.trainer.algorithm.test_functions"
FILTERS = "tests.support.filter_functions"


def clipped(*, policy_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, **others: Tensor) -> Tensor:
    """PPO's clipped loss at 0.2, written by a user."""
    ratio = torch.exp(policy_logprobs - anchor_logprobs)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def constant(*, advantages: Tensor, **others: Tensor) -> Tensor:
    return advantages


def summed(*, policy_logprobs: Tensor, **others: Tensor) -> Tensor:
    return policy_logprobs.sum()


def raising(**tensors: Tensor) -> Tensor:
    raise KeyError("temperature")


def standardised(rewards: Float32Array) -> Any:
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def infinite(rewards: Float32Array) -> Any:
    with np.errstate(divide="ignore"):
        return 1.0 / (rewards - rewards)


NOT_A_FUNCTION = 3


def test_a_users_loss_and_advantage_move_the_weights_as_the_same_ones_of_penstock() -> None:
    own = Rank(settings(loss=f"{HERE}:clipped", advantage=f"{HERE}:standardised"))
    plain = Rank(settings(clip=(0.2, 0.2)))
    actual, expected = (each.learn(batch()) for each in (own, plain))
    for name in ("loss", "grad_norm", "logprob_gap", "kl_mean"):
        assert actual[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7)
    before = Rank(settings()).whole()
    moved = {name: tensor - before[name] for name, tensor in own.whole().items()}
    for name, tensor in plain.whole().items():
        torch.testing.assert_close(moved[name], tensor - before[name], rtol=0, atol=2e-5)
    assert max(float(tensor.abs().max()) for tensor in moved.values()) > 1e-4


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"loss": f"{HERE}:constant"}, "algorithm.loss: .*:constant failed in a trial .TypeError: its loss has no gradient"),
        ({"loss": f"{HERE}:summed"}, "expected the loss of each of 6 tokens from .*:summed, found torch.float32 of \\(\\)"),
        ({"loss": f"{HERE}:raising"}, "KeyError: 'temperature'"),
        ({"loss": f"{HERE}:NOT_A_FUNCTION"}, "it is no function but int"),
        ({"loss": "nowhere.to_be:found"}, "ModuleNotFoundError: No module named 'nowhere'"),
        ({"advantage": f"{HERE}:infinite"}, "algorithm.advantage: .*expected a finite advantage of each of 4 samples"),
        ({"filter": f"{FILTERS}:undecided"}, "algorithm.filter: .*:undecided failed in a trial .TypeError: expected True or False, found int"),
        ({"filter": f"{FILTERS}:crashing"}, "algorithm.filter: .*:crashing failed in a trial .it ended its process by SIGSEGV.: it must"),
        ({"filter": f"{FILTERS}:raising"}, "algorithm.filter: .*KeyError: 'temperature'"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_used_is_refused_before_the_first_step(
    setting: dict[str, str], sentence: str
) -> None:
    with pytest.raises(SettingsError, match=sentence):
        functions.check(AlgorithmSettings(**setting))  # type: ignore[arg-type]


def test_a_loss_that_fails_later_says_what_it_returned() -> None:
    tensors = {"policy_logprobs": torch.zeros(4)}
    with pytest.raises(TypeError, match="expected the loss of each of 4 tokens"):
        functions.loss(f"{HERE}:summed", tensors)
