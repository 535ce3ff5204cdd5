"""Laws of the simulation; rates are chosen so that the steps can be computed by hand."""

import pytest

from penstock.services.plan.rates import Rates
from penstock.services.plan.shapes import shape_of
from penstock.services.plan.simulation import Side, SimulatedFigures, simulate
from penstock.services.plan.workload import Lengths, Workload

TWO = Side(2, 4)


def outcome(
    lag: int = 1, *, train_s: float = 1.0, decode_s: float = 0.01, transfer_s: float = 0.0, bus_s: float = 0.0,
    coordinator_s: float = 0.0, switch_s: float = 0.0, beside: float = 0.0, again_s: float = 0.0, side: Side = TWO, spread: float = 0.0, steps: int = 30,
) -> SimulatedFigures:  # fmt: skip
    """Return 8 groups of 4 × 100 tokens a step, by default a second of generation and one of training."""
    work = Workload(shape_of("0.5b"), 2, 8, 4, 10, Lengths(100, 400, spread), lag, 100, 1.0, None, False, 0)
    rates = Rates(decode_s, 0.0, 0.0, train_s, 0.0, transfer_s, 0.0, switch_s, bus_s, coordinator_s, again_s, beside)
    if not spread:
        work = Workload(shape_of("0.5b"), 2, 8, 4, 10, Lengths(100, 100, 0.0), lag, 100, 1.0, None, False, 0)
    return simulate(work, rates, side, steps)


def test_a_synchronous_step_is_generation_and_training() -> None:
    result = outcome(0)
    assert result.step_s == pytest.approx(2.0)
    assert [result.trainer_idle, result.rollout_idle] == pytest.approx([0.5, 0.5])
    assert result.samples_per_s == pytest.approx(16.0)


def test_an_asynchronous_step_is_the_longer_of_the_two() -> None:
    assert outcome(1).step_s == pytest.approx(1.0)
    assert outcome(1, train_s=3.0).step_s == pytest.approx(3.0)
    assert outcome(1, train_s=0.1).step_s == pytest.approx(1.0)


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_no_trained_group_exceeds_max_lag(lag: int) -> None:
    result = outcome(lag, spread=0.8, transfer_s=0.3)
    assert max(result.lags) <= lag
    assert sum(result.lags.values()) == pytest.approx(1.0)


def test_with_slots_for_it_the_lag_reaches_max_lag_when_training_is_slow() -> None:
    assert outcome(4, train_s=5.0).lags == {4: 1.0}


def test_a_transfer_delays_a_synchronous_step_and_no_other() -> None:
    assert outcome(0, transfer_s=0.5).step_s == pytest.approx(2.5)
    assert outcome(4, train_s=2.0, transfer_s=0.5).step_s == pytest.approx(2.0)


def test_replicas_on_the_trainers_gpus_take_turns_with_it() -> None:
    shared = outcome(1, side=Side(0, 4, borrowed=2), switch_s=0.4)
    assert shared.step_s == pytest.approx(2.4, rel=0.1)


def test_replicas_that_generate_while_the_trainer_trains_slow_it_and_gain_what_they_generate_meanwhile() -> None:
    at_once = outcome(1, side=Side(0, 4, borrowed=2), beside=0.5)
    assert at_once.step_s == pytest.approx(1.07 + (1.0 - 0.5 * 1.07), rel=0.01)
    assert outcome(0, side=Side(0, 4, borrowed=2), beside=0.5).step_s == pytest.approx(
        2.0
    )  # nothing is generated meanwhile


def test_groups_that_lost_their_cache_in_a_pause_are_computed_again() -> None:
    kept, lost = (outcome(1, side=Side(0, 4, borrowed=2), spread=0.5, again_s=seconds) for seconds in (0.0, 1e-3))
    assert lost.step_s > 1.05 * kept.step_s


def test_a_host_with_few_cores_slows_what_computes_at_the_same_time() -> None:
    assert outcome(1, side=Side(2, 4, cores=1.5)).step_s > 1.5 * outcome(1).step_s
    assert outcome(0, side=Side(2, 4, cores=2.0)).step_s == pytest.approx(2.0)


def test_a_slow_bus_or_coordinator_is_named_by_its_share() -> None:
    assert outcome(bus_s=0.5).bus_busy > 0.9
    assert outcome(coordinator_s=0.5).coordinator_busy > 0.9
    assert outcome(transfer_s=5.0, lag=4).source_busy > 0.9


def test_a_simulation_repeats() -> None:
    assert outcome(1, spread=0.7) == outcome(1, spread=0.7)


def test_a_thousand_replicas_are_kept_busy() -> None:
    work = Workload(shape_of("70b"), 2, 2048, 8, 256, Lengths(1600, 4096), 1, 100, 1.0, None, False, 0)
    result = simulate(work, Rates(0.02, 1e-5, 0.01, 5.0, 2e-6, 8.0), Side(1000, 8), 6)
    assert result.rollout_idle < 0.5
