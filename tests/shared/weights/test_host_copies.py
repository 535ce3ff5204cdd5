"""Memory that goes to the host and comes back holds the same bytes, in every view of it."""

from pathlib import Path

import torch

from shared.weights.host_copies import HostCopies, storages_of

CPU = torch.device("cpu")


def test_every_view_of_memory_that_was_away_holds_its_bytes_again() -> None:
    flat = torch.arange(12, dtype=torch.float32)
    view, tail = flat[:6].view(2, 3), flat[6:].requires_grad_(True)
    copies = HostCopies(CPU)
    storages = storages_of([flat, view, tail], CPU)
    assert len(storages) == 1
    copies.begin(storages.values())
    copies.finish()
    assert flat.untyped_storage().nbytes() == 0
    copies.reload()
    copies.follow()
    assert view.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert tail.tolist() == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]


def test_copies_that_were_not_needed_are_forgotten_and_do_not_undo_later_changes() -> None:
    flat = torch.zeros(4)
    copies = HostCopies(CPU)
    copies.begin(storages_of([flat], CPU).values())
    copies.follow()
    flat.add_(1.0)
    copies.begin(storages_of([flat], CPU).values())
    copies.finish()
    copies.reload()
    assert flat.tolist() == [1.0, 1.0, 1.0, 1.0]


def test_discarded_memory_comes_back_as_zeros() -> None:
    flat = torch.ones(3)
    copies = HostCopies(CPU)
    copies.discard(storages_of([flat], CPU).values())
    assert flat.untyped_storage().nbytes() == 0
    copies.reload()
    assert flat.tolist() == [0.0, 0.0, 0.0]


def test_memory_that_is_mapped_from_a_file_stays(tmp_path: Path) -> None:
    torch.zeros(8).numpy().tofile(tmp_path / "mapped")
    mapped = torch.from_file(str(tmp_path / "mapped"), size=8)
    assert storages_of([mapped], CPU) == {}
