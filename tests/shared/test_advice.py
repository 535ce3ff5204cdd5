"""Laws of the advice on what bounds a run."""

from typing import Literal

import pytest

from penstock.shared.advice import advice


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ({"step_s": 4.0, "phase_wait_s": 1.0, "lag_max": 1}, "rollout-bound: the trainer waits 25%; 2 more replicas would be 1.3 times as fast"),
        ({"step_s": 4.0, "phase_wait_s": 0.2, "lag_max": 1}, "trainer-bound: it waits 5%; more replicas would not help, more trainer.ranks would"),
        ({"step_s": 4.0, "phase_wait_s": 2.0, "lag_max": 0}, "synchronous: the trainer waits 50%; algorithm.max_lag = 1 would generate meanwhile"),
        ({}, ""),
        ({"step_s": None, "phase_wait_s": 1.0}, ""),
    ],
)  # fmt: skip
def test_measured_rates_say_what_bounds_a_run(metrics: dict[str, float], sentence: str) -> None:
    assert advice(metrics, 6, on_gpus=True) == sentence


@pytest.mark.parametrize(
    ("sharing", "lag", "sentence"),
    [
        ("at once", 1, "rollout-bound: the trainer waits 62% for replicas on its own GPUs; more of them would help on other GPUs only (`penstock plan` compares layouts)"),
        ("in turn", 0, "rollout-bound: the trainer waits 62% for replicas on its own GPUs; more of them would help on other GPUs only (`penstock plan` compares layouts)"),
        ("at once", 0, "synchronous: the trainer waits 62%; algorithm.max_lag = 1 would generate meanwhile"),
    ],
)  # fmt: skip
def test_where_trainer_and_replicas_share_gpus_no_replica_more_is_promised_there(
    sharing: Literal["in turn", "at once"], lag: int, sentence: str
) -> None:
    metrics = {"step_s": 3.1, "phase_wait_s": 1.92, "lag_max": lag}
    assert advice(metrics, 1, on_gpus=True, sharing=sharing) == sentence


@pytest.mark.parametrize(("wait_s", "sentence"), [(1.0, "rollout-bound: the trainer waits 25% of a step"), (0.2, "trainer-bound: the trainer waits 5% of a step")])  # fmt: skip
def test_without_gpus_nothing_is_promised(wait_s: float, sentence: str) -> None:
    assert advice({"step_s": 4.0, "phase_wait_s": wait_s, "lag_max": 1}, 6, on_gpus=False) == sentence
