"""A trainer whose memory goes to the host between steps trains bit for bit as one that keeps it."""

from pathlib import Path

import pytest
import torch

from tests.support import tiny
from tests.trainer.model.test_engine import Stepper, settings

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 4
FP32_BYTES = 4 * sum(parameter.numel() for parameter in tiny.model(0).parameters())


def trained(zero_stage: int, rungs: list[int]) -> tuple[Stepper, dict[str, torch.Tensor]]:
    """Return an engine after ``STEPS`` steps, freed down to each of ``rungs`` in turn after them."""
    stepper = Stepper(settings(zero_stage=zero_stage))
    residency = stepper.engine.residency
    for number in range(1, STEPS + 1):
        stepper.step(number)
        if rungs:
            rung = rungs[number % len(rungs)]
            residency.begin(rung)
            residency.free(rung)
            residency.restore()
    return stepper, stepper.weights()


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_training_is_bit_equal_with_and_without_switches(zero_stage: int) -> None:
    _, kept = trained(zero_stage, [])
    _, moved = trained(zero_stage, [4, 3, 2])
    assert kept.keys() == moved.keys()
    assert all(torch.equal(kept[name], moved[name]) for name in kept)


def bytes_of(stepper: Stepper) -> int:
    return sum(parameter.data.untyped_storage().nbytes() for parameter in stepper.engine.policy.parameters())


@pytest.mark.parametrize(("zero_stage", "optimizer_share"), [(0, 2), (1, 3), (2, 3)])
def test_rung_3_frees_moments_and_master_weights_and_rung_4_the_weights_too(
    zero_stage: int, optimizer_share: int
) -> None:
    stepper, _ = trained(zero_stage, [])
    residency = stepper.engine.residency
    memory = residency.memory()
    assert memory["weights"] == pytest.approx(FP32_BYTES, rel=0.01)
    assert memory["optimizer"] == pytest.approx(optimizer_share * FP32_BYTES, rel=0.01)
    residency.free(3)
    state = next(iter(stepper.engine._engine.optimizer.state.values()))
    assert state["exp_avg"].untyped_storage().nbytes() == 0
    assert bytes_of(stepper) > 0
    residency.restore()
    residency.free(4)
    assert bytes_of(stepper) == 0
    residency.restore()
    assert residency.memory() == memory


def test_a_checkpoint_that_is_loaded_after_the_copies_began_is_not_undone_by_them(tmp_path: Path) -> None:
    stepper, _ = trained(1, [])
    stepper.engine.save(tmp_path)
    saved = stepper.weights()
    stepper.step(STEPS + 1)
    residency = stepper.engine.residency
    residency.begin(4)
    stepper.engine.load(tmp_path)
    residency.free(4)
    residency.restore()
    loaded = stepper.weights()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    stepper.step(STEPS + 1)
    again = Stepper(settings(zero_stage=1))
    again.engine.load(tmp_path)
    again.step(STEPS + 1)
    assert all(torch.equal(tensor, stepper.weights()[name]) for name, tensor in again.weights().items())
