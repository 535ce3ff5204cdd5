"""Laws of a rank's memory by component: real storages, each counted once, and as many bytes as the plan predicts."""

from typing import Any

import pytest
import torch

from penstock.services.plan.memory import TrainerOptions, trainer_table
from penstock.services.plan.shapes import from_config
from penstock.services.plan.workload import Lengths, Workload
from penstock.services.trainer.model.held_tensors import components
from penstock.services.trainer.model.memory.storages import Storages
from penstock.services.trainer.phases import Phases
from tests.support import tiny
from tests.trainer.model.test_engine import Stepper, settings

pytestmark = pytest.mark.usefixtures("one_rank")
_NORMS = 0.05
"""Share of the tiny policy's weights that the plan ignores."""
_MEASURED = ("weights", "gradients", "master weights", "moments")


def predicted(zero_stage: int, phase: str) -> dict[str, float]:
    shape = from_config(tiny.model(0).config.to_dict(), "tiny")
    work = Workload(shape, 4, 4, 2, 8, Lengths(8, 8, 0.0), 1, 1, 1.0, None, False, 0)
    table, _ = trainer_table(work, TrainerOptions(1, zero_stage, snapshots=0), 1e12)
    parts: Any = {str(name): parts for name, parts in table.items()}[phase]
    return {part.name: part.nbytes for part in parts if part.name in _MEASURED and part.nbytes}


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_what_a_rank_holds_between_steps_is_what_the_plan_predicts(zero_stage: int) -> None:
    stepper = Stepper(settings(zero_stage))
    stepper.step(1)
    held = components(stepper.engine)
    expected = predicted(zero_stage, "wait")
    assert {name: held[name] for name in expected} == pytest.approx(expected, rel=_NORMS)
    assert held["moments"] == pytest.approx(2 * held["weights"], rel=0.01)


def test_a_phase_holds_the_larger_of_its_begin_and_end() -> None:
    held = iter([{"weights": 8.0, "gradients": 8.0}, {"weights": 8.0, "moments": 16.0}])
    phases = Phases(torch.device("cpu"), lambda: next(held))
    for phase in ("forward_backward", "optimizer"):
        with phases.measure(phase):
            pass
    first, second = phases.take_samples()
    assert (first.phase, second.phase) == ("forward and backward", "optimizer")
    assert {name: nbytes for name, nbytes in second.components.items() if name != "other"} == {
        "weights": 8.0, "gradients": 8.0, "moments": 16.0,
    }  # fmt: skip
    assert sum(second.components.values()) == second.total_bytes


def test_a_storage_counts_once_and_whole() -> None:
    storages, whole = Storages(torch.device("cpu")), torch.zeros(100)
    assert storages.add([whole[:10], whole[50:]]) == 400
    assert storages.add([whole]) == 0
    assert storages.add([torch.zeros(5, device="meta")]) == 0
