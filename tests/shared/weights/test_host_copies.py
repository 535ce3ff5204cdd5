"""Memory that goes to the host and comes back holds the same bytes, in every view of it."""

import threading
from pathlib import Path

import pytest
import torch

from penstock.shared.errors import SettingsError
from penstock.shared.process import memory_timeline
from penstock.shared.weights import host_copies
from penstock.shared.weights.host_copies import HostCopies, storages_of
from penstock.shared.weights.stream_order import Point

CPU = torch.device("cpu")


def test_every_view_of_memory_that_was_away_holds_its_bytes_again() -> None:
    flat = torch.arange(12, dtype=torch.float32)
    view, tail = flat[:6].view(2, 3), flat[6:].requires_grad_(True)
    copies = HostCopies(CPU, "the optimizer", "lower placement.rung")
    storages = storages_of([flat, view, tail], CPU)
    assert len(storages) == 1
    copies.offload(storages.values())
    assert flat.untyped_storage().nbytes() == 0
    copies.reload()
    copies.follow()
    assert view.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert tail.tolist() == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]


def test_copies_are_forgotten_once_they_are_back_and_do_not_undo_later_changes() -> None:
    flat = torch.zeros(4)
    copies = HostCopies(CPU, "the optimizer", "lower placement.rung")
    for number in (1.0, 2.0):
        copies.offload(storages_of([flat], CPU).values())
        copies.reload()
        copies.follow()
        assert flat.add_(1.0).tolist() == [number] * 4


def test_more_may_leave_while_some_is_away() -> None:
    first, second, gradients = torch.arange(4.0), torch.arange(5.0), [torch.ones(2), torch.ones(3)]
    copies = HostCopies(CPU, "the optimizer", "lower placement.rung")
    for tensors in ([first], [first, second]):
        copies.offload(storages_of(tensors, CPU).values())
    for gradient in gradients:
        copies.discard(storages_of([gradient], CPU).values())
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (first, second, *gradients))
    copies.reload()
    copies.follow()
    assert first.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert second.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [gradient.tolist() for gradient in gradients] == [[0.0] * 2, [0.0] * 3]


def test_discarded_memory_comes_back_as_zeros() -> None:
    flat = torch.ones(3)
    copies = HostCopies(CPU, "the optimizer", "lower placement.rung")
    copies.discard(storages_of([flat], CPU).values())
    assert flat.untyped_storage().nbytes() == 0
    copies.reload()
    assert flat.tolist() == [0.0, 0.0, 0.0]


def test_a_host_with_too_little_memory_is_told_with_the_setting_and_keeps_the_contents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_copies, "_CHUNK_BYTES", 1 << 20)
    free_bytes = [float(3 << 20), float(2 << 20), float((1 << 20) - 1)]
    monkeypatch.setattr(memory_timeline, "host_bytes", lambda: (0.0, free_bytes.pop(0)))
    flat = torch.ones(1 << 20)
    copies = HostCopies(CPU, "the optimizer", "lower placement.rung")
    with pytest.raises(
        SettingsError, match=r"^the optimizer need 0\.0 GiB .* which 0\.0 GiB are left: lower placement\.rung$"
    ):
        copies.offload(storages_of([flat], CPU).values())
    assert not copies.is_away
    assert bool((flat == 1).all())
    monkeypatch.undo()
    copies.offload(storages_of([flat], CPU).values())
    copies.reload()
    copies.follow()
    assert bool((flat == 1).all())


def test_what_follows_waits_for_the_thread_that_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "_CHUNK_BYTES", 8)
    gate, fill = threading.Event(), HostCopies._fill

    def filled(copies: HostCopies, behind: Point) -> None:
        gate.wait()
        fill(copies, behind)

    monkeypatch.setattr(HostCopies, "_fill", filled)
    flat = torch.arange(12, dtype=torch.float32)
    copies = HostCopies(CPU, "the optimizer", "lower placement.rung")
    for use in (copies.follow, lambda: copies.offload(())):
        gate.clear()
        copies.offload(storages_of([flat], CPU).values())
        copies.reload()
        threading.Timer(0.2, gate.set).start()
        use()
        assert gate.is_set()
    copies.reload()
    copies.follow()
    assert flat.tolist() == list(range(12))


@pytest.mark.parametrize("everywhere", [False, True])
def test_streams_that_do_not_follow_the_current_one_may_use_what_returned_everywhere(
    monkeypatch: pytest.MonkeyPatch, everywhere: bool
) -> None:
    copies = HostCopies(CPU, "the weights", "lower placement.rung")
    copies.offload(storages_of([torch.ones(3)], CPU).values())
    copies.reload()
    waited: list[Point] = []
    monkeypatch.setattr(Point, "wait", lambda point: waited.append(point))
    copies.follow(everywhere=everywhere)
    assert waited.count(copies._arrived) == everywhere


def test_an_error_of_that_thread_is_raised_where_the_memory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.ones(3)
    copies = HostCopies(CPU, "the optimizer", "lower placement.rung")
    copies.offload(storages_of([flat], CPU).values())
    monkeypatch.setattr(host_copies, "_flat", lambda _storage: 1 / 0)
    copies.reload()
    with pytest.raises(ZeroDivisionError):
        copies.follow()


def test_memory_that_is_mapped_from_a_file_stays(tmp_path: Path) -> None:
    torch.zeros(8).numpy().tofile(tmp_path / "mapped")
    mapped = torch.from_file(str(tmp_path / "mapped"), size=8)
    assert storages_of([mapped], CPU) == {}
