"""The reward service's self-test: single inputs replace differing padded batches; if these differ too, the model is
refused.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from penstock.services.reward.models.self_test import choose_alone
from penstock.shared.bus.messages import Float32Array
from penstock.shared.errors import SettingsError


def values(inputs: Sequence[float]) -> list[Float32Array]:
    return [np.array([value], np.float32) for value in inputs]


def chosen(*, padded: float = 0.0, single: float = 0.0, half: bool = False) -> bool:
    def compute(inputs: Sequence[float]) -> list[Float32Array]:
        return values([value + (padded if len(inputs) > 1 else single) for value in inputs])

    return choose_alone([1.0, 2.0], compute, lambda first: values([first])[0], half=half, setting="policy.model")


def test_batches_that_agree_stay_padded() -> None:
    assert not chosen()
    assert not chosen(padded=0.02, half=True)


def test_batches_that_differ_give_way_to_single_inputs() -> None:
    assert chosen(padded=0.02)


def test_single_inputs_that_differ_are_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"0\.5 apart for single inputs and 0\.02 for a padded batch: change policy.model"
    ):
        chosen(padded=0.02, single=0.5)
    with pytest.raises(SettingsError, match="nan apart"):
        chosen(padded=0.02, single=float("nan"))
