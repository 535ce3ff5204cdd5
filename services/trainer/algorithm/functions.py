"""Loss and advantage functions of the user's own, by import path (docs/algorithms.md, "Your own loss, advantage or filter").

::

    def mine(*, policy_logprobs, anchor_logprobs, advantages, **others) -> Tensor:  # the loss of each token (N)
    def mine(rewards) -> array:                                                     # the advantage of each sample (S)
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from penstock.services.trainer.algorithm.group_filter import FilterError, load, try_filter
from penstock.shared.bus.messages import Float32Array
from penstock.shared.errors import SettingsError
from penstock.shared.settings.algorithm import AlgorithmSettings

_TRIAL_LENGTHS = (3, 1, 2)


def loss(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the function's loss of each token (N). Raises TypeError for another result."""
    loss_N = load(name)(**tensors)
    expected = tensors["policy_logprobs"].shape
    if not isinstance(loss_N, Tensor) or loss_N.shape != expected or not loss_N.is_floating_point():
        given = f"{loss_N.dtype} of {tuple(loss_N.shape)}" if isinstance(loss_N, Tensor) else type(loss_N).__name__
        raise TypeError(f"expected the loss of each of {expected[0]} tokens from {name}, found {given}")
    return loss_N


def advantages(name: str, rewards_S: Float32Array) -> Float32Array:
    """Return the function's advantage of each sample (S). Raises TypeError for another result."""
    found_S = np.asarray(load(name)(rewards_S.copy()), dtype=np.float32)
    if found_S.shape != rewards_S.shape or not np.isfinite(found_S).all():
        raise TypeError(
            f"expected a finite advantage of each of {len(rewards_S)} samples from {name}, found {found_S.tolist()}"
        )
    return found_S


def check(algorithm: AlgorithmSettings) -> None:
    """Call the user's functions once; raise SettingsError if that fails."""
    for setting, name, trial in (
        ("loss", algorithm.loss, _try_loss), ("advantage", algorithm.advantage, _try_advantages),
        ("filter", algorithm.filter, try_filter),
    ):  # fmt: skip
        try:
            if ":" in name:
                trial(name)
        except Exception as error:
            reason = str(error) if isinstance(error, FilterError) else f"{type(error).__name__}: {error}"
            raise SettingsError(
                f"algorithm.{setting}: {name} failed in a trial ({reason}): it must be importable where the "
                "trainer runs and take what docs/algorithms.md lists; correct it, or change the setting"
            ) from error


def _try_loss(name: str) -> None:
    tokens = sum(_TRIAL_LENGTHS)
    names = ("anchor_logprobs", "behavior_logprobs", "advantages", "entropy", "lags")
    tensors = {each: torch.linspace(-1.0, -0.5, tokens) for each in names}
    policy_N = torch.linspace(-1.1, -0.4, tokens, requires_grad=True)
    found_N = loss(name, {"policy_logprobs": policy_N, **tensors, "lengths": torch.tensor(_TRIAL_LENGTHS)})
    if not found_N.requires_grad:
        raise TypeError("its loss has no gradient to policy_logprobs")


def _try_advantages(name: str) -> None:
    for rewards in ((1.0, 0.0, 0.5, 1.0), (1.0, 1.0, 1.0, 1.0)):
        advantages(name, np.array(rewards, dtype=np.float32))
