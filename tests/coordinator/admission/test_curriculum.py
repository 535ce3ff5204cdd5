"""Laws of the curriculum."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.services.coordinator.admission.admission import Admission, Terms
from penstock.services.coordinator.admission.bus_full import Shortage
from penstock.services.coordinator.admission.curriculum import Curriculum, chances
from penstock.services.coordinator.admission.dataset import Dataset, Problem
from penstock.services.coordinator.admission.mixing import EpochOrder, MixedOrder
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Sampling
from penstock.shared.bus.stores.experience.signals import SignalChange
from penstock.shared.errors import SettingsError
from tests.coordinator.admission.test_admission import start
from tests.support.coordinator_players import generating, record


def data(problems: int, sizes: tuple[int, ...] = ()) -> Dataset:
    rows = (Problem(f"train.jsonl:{i + 1}", f"q{i}", None, str(i), {}, row_id=f"id{i + 1}") for i in range(problems))
    return Dataset(tuple(rows), 0, sizes=sizes)


def test_problems_are_drawn_by_signal_and_none_is_given_up() -> None:
    drawing = Curriculum(data(4), EpochOrder(4, seed=0, shuffle=True), seed=0)
    drawing.follow({"id1": 0.2, "id2": 0.0, "id3": 0.05, "elsewhere": 0.25})
    drawn = Counter(drawing.index(position) for position in range(8000))
    # signals 0.2, 0, 0.05 and, without a group, (0.25 + 0.25) / 4 = 0.125, of 0.375; a tenth of the draws is uniform
    expected = [4040, 200, 1160, 2600]
    assert all(abs(drawn[index] - count) < 5 * count**0.5 for index, count in enumerate(expected))


def test_equal_rows_share_their_signal() -> None:
    rows = data(4).problems
    again = dataclasses.replace(rows[0], source="train.jsonl:5")
    drawing = Curriculum(Dataset((*rows, again), 0), EpochOrder(5, seed=0, shuffle=True), seed=0)
    drawing.follow({"id1": 0.25, "id2": 0.0, "id3": 0.0, "id4": 0.0})
    drawn = Counter(drawing.index(position) for position in range(4000))
    assert drawn.keys() == {0, 1, 2, 3, 4}
    assert min(drawn[0], drawn[4]) > 1700, "0.9 / 2 + 0.1 / 5 of the draws each, 1,880"


@given(st.lists(st.one_of(st.just(np.nan), st.floats(0, 0.25)), min_size=1, max_size=50))
@example([0.0] + 49 * [0.25])
@example([0.0, 0.0])
@example([0.0, 1e-300])
@example([np.nan])
def test_every_problem_keeps_a_tenth_of_its_uniform_chance_and_more_signal_is_drawn_more(signals: list[float]) -> None:
    known, drawn = np.array(signals), chances(np.array(signals))
    assert drawn.sum() == pytest.approx(1)
    assert drawn.min() >= 0.1 / len(signals) * (1 - 1e-12)
    seen = np.flatnonzero(~np.isnan(known))
    assert (np.diff(drawn[seen[np.argsort(known[seen])]]) >= 0).all()


@given(st.lists(st.floats(1e-6, 0.25), min_size=1, max_size=20), st.floats(1e-3, 1))
def test_chances_do_not_depend_on_how_much_of_a_dataset_is_solved(signals: list[float], scale: float) -> None:
    assert chances(np.array(signals) * scale) == pytest.approx(chances(np.array(signals)))


def test_problems_without_signal_are_drawn_evenly() -> None:
    assert chances(np.zeros(4)).tolist() == [0.25, 0.25, 0.25, 0.25]


def test_a_draw_is_a_function_of_seed_position_and_signals() -> None:
    first, again = (Curriculum(data(50), EpochOrder(50, seed=0, shuffle=True), seed=3) for _ in range(2))
    signals = {f"id{i}": 0.25 / i for i in range(1, 40)}
    before = [first.index(position) for position in range(100)]
    first.follow(signals)
    after = [first.index(position) for position in range(100)]
    again.follow(signals)
    assert [again.index(position) for position in range(100)] == after
    assert after != before
    again.follow({})
    assert [again.index(position) for position in range(100)] == before


def test_several_datasets_keep_their_weights() -> None:
    mixed = data(50, sizes=(40, 10))
    drawing = Curriculum(mixed, MixedOrder((40, 10), (1, 3), 0, shuffle=True), seed=0)
    drawing.follow({f"id{i}": 0.0 for i in range(41, 51)})
    drawn = Counter(mixed.source_of(drawing.index(position)) for position in range(2000))
    assert drawn == {0: 500, 1: 1500}


async def test_admission_draws_by_the_signals_of_the_version_that_it_admits_under(bus: Bus) -> None:
    ledger = await start(bus)
    rows = data(20)
    order = EpochOrder(20, seed=0, shuffle=True)
    terms = Terms(Sampling(2, 4, 1.0), 8, 2, 100)
    admission = Admission(
        bus, ledger, rows, Curriculum(rows, order, 0), lambda: terms, lambda: True, Shortage(bus, ledger), 0.001
    )
    signals = {f"id{i}": "0.25" if i == 7 else "0" for i in range(1, 21)}
    epoch = (await ledger.status()).trainer_epoch
    await ledger.commit(epoch, record(1, 0, 0), [], None, change=SignalChange(whole=signals))
    assert await admission.admit() == 8
    expected = Curriculum(rows, order, 0)
    expected.follow({problem: float(value) for problem, value in signals.items()})
    generated = [prompt.problem for prompt in await generating(bus)]
    assert generated == [rows.problems[expected.index(place)].source for place in range(8)]
    assert generated.count("train.jsonl:7") >= 6, "the only one with signal: 90.5 % of the draws"


def test_signals_that_no_checkpoint_could_hold_are_refused() -> None:
    long = Dataset((Problem("t", "q", None, "", {}, row_id="x" * (9 << 20)),), 0)
    with pytest.raises(SettingsError, match=r"expected at most 8,388,608 bytes of signals with data\.curriculum"):
        Curriculum(long, EpochOrder(1, seed=0, shuffle=True), seed=0)
