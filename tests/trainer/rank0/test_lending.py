"""Laws of lending: a wait is lent if it will outlast the switches, no wait is endless, and nothing unmeasured is lent."""

import pytest

from services.trainer.rank0.lending import Lending, is_due, lends, missing_samples

DECISIONS = [
    (100, 0.0, 10.0, 7.9, True),  # 10 s, against 7.9 s and a quarter more
    (100, 0.0, 10.0, 8.1, False),
    (0, 0.0, 10.0, 0.1, False),
    (0, 1.3, 10.0, 1.0, True),  # waits longer than the switches took, whatever was expected
    (0, 1.2, 10.0, 1.0, False),
    (100, 0.0, None, 1.0, False),
    (100, 1.3, None, 1.0, True),  # no rate is known: a restarted trainer
    (10**6, 10**6, 0.001, None, False),
]


@pytest.mark.parametrize(("missing", "waited_s", "rate", "cost_s", "lent"), DECISIONS)
def test_a_device_is_lent_if_the_wait_outlasts_the_switches_and_a_margin(
    missing: int, waited_s: float, rate: float | None, cost_s: float | None, lent: bool
) -> None:
    assert lends(missing, waited_s, rate, cost_s) is lent


def test_a_device_returns_when_the_rest_takes_no_longer_than_the_switch_back() -> None:
    assert is_due(10, 10.0, 1.0)
    assert not is_due(11, 10.0, 1.0)
    assert not is_due(0, None, 1.0)
    assert not is_due(0, 10.0, None)


MISSING = [
    ((8, 4), (8, 0, 32), 32),  # max_lag = 0: all that is in flight
    ((8, 4), (16, 0, 64), 32),  # one step ahead
    ((8, 4), (16, 6, 37), 5),
    ((8, 4), (16, 6, 10), 2),  # of later groups much is generated already: still one sample of each
    ((8, 4), (4, 2, 8), 24),  # half of the batch is not admitted yet
    ((8, 4), (16, 8, 32), 0),
    ((8, 4), (16, 12, 16), 0),
]


@pytest.mark.parametrize(("batch", "flight", "missing"), MISSING)
def test_the_next_batch_lacks_what_earlier_groups_lack(
    batch: tuple[int, int], flight: tuple[int, int, int], missing: int
) -> None:
    in_flight, complete, unfinished = flight
    assert missing_samples(*batch, in_flight, complete, unfinished) == missing


def waited(lending: Lending, start_s: float, missing: int, seconds: float) -> None:
    """Let one wait pass without a lend."""
    lending.is_worthwhile(missing, start_s, 0)
    lending.note_complete(start_s + seconds)


def test_nothing_is_lent_before_waits_and_switches_are_measured() -> None:
    lending = Lending()
    waited(lending, 0.0, 100, 1000.0)
    assert str(lending.rate) == "None", "in the first wait, replicas load their models"
    waited(lending, 2000.0, 100, 10.0)
    assert lending.rate == 10.0
    assert lending.cost_s(0) is None
    assert not lending.is_worthwhile(10_000, 3000.0, 0)


def lent(lending: Lending, start_s: float, parts_s: tuple[float, float, float], rung: int | None = 0) -> None:
    """Lend for 10 s; ``parts_s``: of freeing, of the guests' switches, and of moving memory back."""
    free_s, switch_s, reload_s = parts_s
    lending.note_lent(start_s, free_s, rung)
    lending.note_returned(start_s + 10, start_s + 9, switch_s, (3, 12))
    lending.note_step(reload_s)


def test_the_cost_is_that_of_both_switches_at_the_rung_of_the_next_lend() -> None:
    lending = Lending()
    lent(lending, 10.0, (30.0, 60.0, 5.0), rung=None)
    assert lending.cost_s(0) == lending.cost_s(4) == 0.1, "a model that loads says nothing of switches"
    assert lending.take_figures(4) == {
        "lends": 1.0, "lent_s": 10.0, "lent_samples": 3.0, "lent_tokens": 12.0, "lend_cost_s": 0.1
    }  # fmt: skip
    lent(lending, 60.0, (0.2, 0.5, 0.1), rung=4)
    assert lending.cost_s(4) == pytest.approx(0.2 + 0.5 + 0.1 + 0.1)
    assert lending.cost_s(0) == 0.1
    assert lending.take_figures(4)["lend_cost_s"] == pytest.approx(0.9)
    assert set(lending.take_figures(0)) == {"lend_cost_s"}


def test_one_slow_switch_does_not_keep_the_devices_from_being_lent() -> None:
    lending = Lending(has_guests=True)
    lent(lending, 0.0, (31.0, 1.2, 0.0))
    lending.take_figures(0)
    assert lending.cost_s(0) == pytest.approx(32.3)
    lent(lending, 100.0, (0.1, 0.1, 0.0))
    assert lending.cost_s(0) == pytest.approx(0.3)
    for lend in range(5):
        lent(lending, 200.0 + lend, (1.0, 2.0, 3.0))
    assert lending.cost_s(0) == pytest.approx(6.1), "the newest five count"


def test_a_turn_of_a_guest_is_not_measured_again_in_a_lend_without_one() -> None:
    lending = Lending()
    lent(lending, 0.0, (0.1, 0.5, 0.0))
    for lend in range(5):
        lent(lending, 100.0 + lend, (0.1, 0.0, 0.0))
    assert lending.cost_s(0) == pytest.approx(0.1 + 0.5 + 0.1), "0 s say that no guest had a turn"
    restarted = Lending()
    restarted.note_returned(10.0, 9.0, 0.0, (0, 0))
    assert restarted.cost_s(0) == 0.1, "but one had in the run"


def test_a_trainer_that_restarts_lends_once_to_measure_and_then_waits_that_outlast_it() -> None:
    lending = Lending(has_guests=True)
    assert not lending.is_worthwhile(5, 100.0, 4)
    assert lending.is_worthwhile(5, 100.2, 4)
    lent(lending, 100.2, (0.2, 0.6, 0.0), rung=4)
    assert not lending.is_worthwhile(5, 110.9, 4)
    assert lending.is_worthwhile(5, 111.4, 4)


def test_devices_are_taken_back_early_once_a_wait() -> None:
    lending = Lending(has_guests=True)
    for wait in range(2):
        waited(lending, 100.0 * wait, 100, 10.0)
    assert lending.is_worthwhile(100, 1000.0, 0)
    lending.note_lent(1000.0, 0.0, 0)
    assert not lending.is_due(0), "how long the way back takes is not measured"
    lending.note_returned(1010.0, 1009.0, 1.0, (0, 0))
    lending.note_complete(1010.0)
    for wait in (1, 2):
        assert lending.is_worthwhile(100, 2000.0 * wait, 0)
        lending.note_lent(2000.0 * wait, 0.0, 0)
        assert not lending.is_due(11)
        assert lending.is_due(10)
        lending.note_returned(2000.0 * wait + 1, 2000.0 * wait, 1.0, (0, 0))
        assert not lending.is_worthwhile(10, 2000.0 * wait + 2, 0)
        assert lending.is_worthwhile(10, 2000.0 * wait + 3, 0), "a guest may have what the batch lacks"
        lending.note_lent(2000.0 * wait + 3, 0.0, 0)
        assert not lending.is_due(10)
        lending.note_returned(2000.0 * wait + 10, 2000.0 * wait + 9, 1.0, (0, 0))
        lending.note_complete(2000.0 * wait + 10)
