"""Laws of the order over several datasets."""

from collections import Counter

import pytest

from penstock.services.coordinator.admission.mixing import BLOCK, MixedOrder, shares
from penstock.shared.errors import SettingsError

SIZES = [5, 300]


def mixed(*weights: float, shuffle: bool = True) -> MixedOrder:
    return MixedOrder(SIZES, weights, seed=7, shuffle=shuffle)


@pytest.mark.parametrize(
    ("weights", "parts"),
    [([1, 1], [500, 500]), ([2, 1], [667, 333]), ([1, 1, 1], [334, 333, 333]), ([0.001, 0.999], [1, 999])],
)
def test_each_dataset_has_its_share_of_a_block(weights: list[float], parts: list[int]) -> None:
    assert shares(weights) == parts


def test_every_block_is_drawn_by_weight() -> None:
    order = mixed(3, 1)
    for block in range(3):
        drawn = Counter(order.index(block * BLOCK + place) < SIZES[0] for place in range(BLOCK))
        assert drawn == {True: 750, False: 250}


def test_the_order_is_a_function_of_the_cursor() -> None:
    cursors = [0, 1, 999, 1000, 12_345, 3_000_000]
    forwards = [mixed(3, 1).index(cursor) for cursor in cursors]
    resumed = mixed(3, 1)
    assert [resumed.index(cursor) for cursor in reversed(cursors)] == forwards[::-1]


def test_each_dataset_shows_every_problem_once_an_epoch() -> None:
    order = mixed(3, 1)
    drawn = [index for index in map(order.index, range(2 * BLOCK)) if index >= SIZES[0]]
    assert sorted(drawn[:300]) == list(range(5, 305))
    few = [index for index in map(order.index, range(BLOCK)) if index < SIZES[0]]
    assert [sorted(few[at : at + 5]) for at in range(0, 750, 5)] == [[0, 1, 2, 3, 4]] * 150


def test_without_shuffling_datasets_alternate_evenly_in_their_files_order() -> None:
    order = mixed(3, 1, shuffle=False)
    assert [order.index(cursor) for cursor in range(9)] == [0, 1, 5, 2, 3, 4, 6, 0, 1]


def test_a_weight_that_would_never_be_drawn_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"expected weights of at least 1/1000 of their sum, found 1 of 100001"):
        mixed(1, 100_000)
