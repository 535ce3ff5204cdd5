"""Laws of flat snapshots and checksums."""

import threading
import time

import pytest
import torch

from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.checksum import checksum, text
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import Header, plan_layout
from penstock.shared.weights.source.session import choose_transport
from penstock.shared.weights.transport.place import DeviceLocation, plain_uuid
from tests.conftest import PATIENCE_S
from tests.support.interpreted import interpreted

CPU = torch.device("cpu")
LAYOUT = plan_layout([("a", "bfloat16", (3, 2)), ("b", "float32", (2,)), ("c", "int64", (2,))], bucket_bytes=512)
ONE, TWO = PolicyVersion(1), PolicyVersion(2)


def tensors(value: float = 1.5) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((3, 2), value)), ("b", torch.tensor([value, -value])), ("c", torch.tensor([7, 8]))]


def snapshot() -> FlatSnapshot:
    return FlatSnapshot(LAYOUT, CPU)


def bytes_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_a_checksum_never_changes_its_value() -> None:
    """Processes of different releases compare them."""
    words = torch.arange(1024 * 2 + 32, dtype=torch.int64)
    assert text(checksum(words.view(torch.uint8))) == "502fe0354930428c"
    assert text(checksum(torch.zeros(256, dtype=torch.uint8))) == "00" * 8


@pytest.mark.parametrize("size", [256, 8192, 8192 * 3 + 256 * 5, 8192 * 1500 + 256])
def test_any_byte_that_changes_changes_the_checksum(size: int) -> None:
    bucket = bytes_of(size)
    before = text(checksum(bucket))
    for place in {0, 1, size // 3, size // 2, size - 1}:
        bucket[place] ^= 1 << (place % 8)
        assert text(checksum(bucket)) != before
        bucket[place] ^= 1 << (place % 8)
    assert text(checksum(bucket)) == before


@pytest.mark.parametrize(("place", "other"), [(0, 1), (0, 1024), (5, 1024 * 3 + 9), (1024 * 4, 1024 * 4 + 1)])
def test_words_that_change_places_change_the_checksum(place: int, other: int) -> None:
    bucket = bytes_of(1024 * 8 * 4 + 256)
    before = text(checksum(bucket))
    words = bucket.view(torch.int64)
    words[[place, other]] = words[[other, place]]
    assert text(checksum(bucket)) != before


def test_a_bucket_half_old_and_half_new_is_neither() -> None:
    old, new = bytes_of(8192 * 7, 1), bytes_of(8192 * 7, 2)
    torn = torch.cat([new[: 8192 * 3], old[8192 * 3 :]])
    assert len({text(checksum(bucket)) for bucket in (old, new, torn)}) == 3


@pytest.mark.parametrize("given", [list, iter], ids=["at once", "one by one"])
def test_filling_casts_to_the_layouts_types_and_views_stay_where_they_are(given: type) -> None:
    held = snapshot()
    views = held.tensors()
    header = held.fill(given(tensors()), ONE, 1)
    assert views["a"].dtype == torch.bfloat16
    assert views["a"].tolist() == [[1.5, 1.5]] * 3
    assert views["b"].tolist() == [1.5, -1.5]
    assert views["c"].tolist() == [7, 8]
    assert held.header is header
    assert held.whole
    assert header.checksums == tuple(text(checksum(bucket)) for bucket in held.buckets)
    assert held.tensors()["a"].data_ptr() == views["a"].data_ptr()


def test_equal_weights_have_equal_headers_whatever_the_snapshot_held_before() -> None:
    fresh, used = snapshot(), snapshot()
    used.fill(tensors(2.5), ONE, 1)
    assert fresh.fill(tensors(), TWO, 2) == used.fill(tensors(), TWO, 2)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (tensors()[:2], "tensors of the layout are missing: c"),
        ([*tensors(), ("d", torch.zeros(1))], "found 'd'"),
        ([*tensors(), tensors()[0]], "found 'a'"),
        ([("a", torch.zeros(2, 3)), *tensors()[1:]], r"expected a of shape \(3, 2\), found \(2, 3\)"),
    ],
)
def test_a_policy_that_is_not_the_layouts_is_refused_and_nothing_is_held(
    given: list[tuple[str, torch.Tensor]], sentence: str
) -> None:
    held = snapshot()
    held.fill(tensors(), ONE, 1)
    with pytest.raises(WeightsError, match=sentence):
        held.fill(given, TWO, 2)
    assert held.header is None


def test_a_waiter_goes_on_as_soon_as_its_bucket_is_marked() -> None:
    held = snapshot()
    header = held.fill(tensors(), ONE, 1)
    held.begin(header)
    assert not held.whole
    threading.Timer(0.05, lambda: held.mark(0)).start()
    before_s = time.monotonic()
    held.wait(0, 2 * PATIENCE_S)
    assert time.monotonic() - before_s < PATIENCE_S


def test_a_waiter_is_told_the_deadline_the_reason_and_the_new_version() -> None:
    held = snapshot()
    header = held.fill(tensors(), ONE, 1)
    held.begin(header)
    with pytest.raises(WeightsError, match=r"bucket 0 did not arrive within 0\.1 s"):
        held.wait(0, 0.1)
    threading.Timer(0.05, lambda: held.void("its source died")).start()
    with pytest.raises(WeightsError, match="its source died"):
        held.wait(0, PATIENCE_S)
    held.fill(tensors(), TWO, 2)
    with pytest.raises(WeightsError, match=r"expected version 1 .* version 2 replaced it: the pull is torn"):
        held.wait(0, PATIENCE_S, header)


def test_a_version_of_another_layout_cannot_begin() -> None:
    with pytest.raises(WeightsError, match="this snapshot was made for another model"):
        snapshot().begin(Header(ONE, 1, "0" * 64, ()))
    with pytest.raises(WeightsError, match="at least one tensor"):
        FlatSnapshot(plan_layout([]), CPU)


def test_whatever_touches_a_cpu_goes_through_the_hosts() -> None:
    assert choose_transport(DeviceLocation(), 1, CPU) == "gloo"
    assert choose_transport(DeviceLocation("cuda", ("GPU-1b",), "boot"), 1, CPU) == "gloo"
    assert plain_uuid("GPU-1B-2c") == plain_uuid("1b-2c")


def test_the_kernel_of_gpus_finds_the_same_checksum() -> None:
    assert interpreted(_KERNEL) == ["same"] * 4


_KERNEL = """
from penstock.shared.weights.format.checksum import checksum
from penstock.shared.weights.format.checksum_kernel import enqueue
for words in (32, 1024, 1024 * 5 + 7 * 32, 1024 * 37):
    bucket = torch.randint(0, 256, (8 * words,), dtype=torch.uint8)
    found = torch.zeros((), dtype=torch.int64)
    enqueue(bucket.view(torch.int64), found)
    print("same" if int(found) == int(checksum(bucket)) else "different")
"""
