"""The batcher with a recording computation."""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from penstock.services.reward.models import batcher as batcher_module
from penstock.services.reward.models.batcher import Batcher, NoRoom, cut
from penstock.shared.errors import StateLost
from penstock.shared.settings.rewards.models import ModelsSettings
from tests.conftest import PATIENCE_S, until


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    tokens: int
    value: float = 0.0


class Notes:
    """Records the lengths of every forward pass; waits for ``gate``."""

    on_cpu = True

    def __init__(self, fits_samples: int = 1000) -> None:
        self.passes: list[list[int]] = []
        self.moves: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fits_samples = fits_samples
        self.fits_restore = True

    def compute(self, batch: Sequence[Item]) -> list[float]:
        self.gate.wait(PATIENCE_S)
        self.passes.append([item.tokens for item in batch])
        if len(batch) > self.fits_samples:
            raise NoRoom("tried to allocate 2.00 GiB")
        return [item.value for item in batch]

    def offload(self) -> None:
        self.moves.append("offload")

    def restore(self) -> None:
        self.moves.append("restore")
        if not self.fits_restore:
            raise NoRoom("the device is full")


@contextlib.asynccontextmanager
async def batching(notes: Notes, wait_s: float, **work: float) -> AsyncIterator[Batcher[Item, float]]:
    batcher = Batcher(notes, ModelsSettings.model_validate(work), "notes", wait_s)
    batcher.start()
    try:
        yield batcher
    finally:
        notes.gate.set()
        await batcher.close()


def test_rectangles_hold_as_many_texts_of_a_length_as_fit() -> None:
    assert cut([3, 8, 4, 8], 16) == [[1, 3], [2, 0]]
    assert cut([20, 5], 16) == [[0], [1]]
    assert cut([], 16) == []


async def test_samples_of_different_groups_share_a_forward_pass_by_length() -> None:
    notes = Notes()
    async with batching(notes, batch_tokens=16, wait_s=0.2) as batcher:
        groups = [[Item(8, 1.0), Item(2, 2.0)], [Item(2, 3.0), Item(8, 4.0)]]
        outcomes = await asyncio.gather(*(batcher.run(group) for group in groups))
    assert outcomes == [[1.0, 2.0], [3.0, 4.0]]
    assert notes.passes == [[8, 8], [2, 2]]


async def test_a_sample_waits_for_others_no_longer_than_it_may() -> None:
    notes = Notes()
    async with batching(notes, batch_tokens=1000, wait_s=0.01) as batcher:
        async with asyncio.timeout(PATIENCE_S):
            assert await batcher.run([Item(3, 0.5)]) == [0.5]


async def test_the_one_that_waited_longest_is_in_the_next_forward_pass() -> None:
    notes = Notes()
    async with batching(notes, batch_tokens=8, wait_s=0.0) as batcher:
        notes.gate.clear()
        first = asyncio.create_task(batcher.run([Item(1)]))
        await asyncio.sleep(0)
        await until(lambda: not batcher._waiting)
        later = [asyncio.create_task(batcher.run([Item(tokens)])) for tokens in (2, 8, 8, 2)]
        await until(lambda: len(batcher._waiting) == 4)
        notes.gate.set()
        await asyncio.gather(first, *later)
    assert notes.passes == [[1], [2, 2], [8], [8]]


async def test_a_forward_pass_that_does_not_fit_is_halved_and_loses_nothing() -> None:
    notes = Notes(fits_samples=2)
    async with batching(notes, batch_tokens=50, wait_s=30.0) as batcher:
        assert await batcher.run([Item(10, float(n)) for n in range(5)]) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [len(lengths) for lengths in notes.passes] == [5, 2, 3, 1, 2]


async def test_a_sample_that_does_not_fit_alone_fails_its_group_and_no_other() -> None:
    class Long(Notes):
        def compute(self, batch: Sequence[Item]) -> list[float]:
            if any(item.tokens > 5 for item in batch):
                raise NoRoom("tried to allocate 2.00 GiB")
            return [item.value for item in batch]

    async with batching(Long(), batch_tokens=20, wait_s=0.01) as batcher:
        outcome = await asyncio.gather(
            batcher.run([Item(9), Item(1)]), batcher.run([Item(2, 0.5), Item(4, 0.75)]), return_exceptions=True
        )
    assert str(outcome[0]) == "no memory for a sample of 9 tokens: tried to allocate 2.00 GiB"
    assert outcome[1] == [0.5, 0.75]


async def test_a_bug_in_the_model_reaches_everybody_who_waits() -> None:
    class Broken(Notes):
        def compute(self, batch: Sequence[Item]) -> list[float]:
            raise RuntimeError("device-side assert")

    async with batching(Broken(), batch_tokens=8, wait_s=0.01) as batcher:
        outcomes = await asyncio.gather(*(batcher.run([Item(8)]) for _ in range(3)), return_exceptions=True)
        assert [str(error) for error in outcomes] == [
            "the model of scorer 'notes' failed: RuntimeError('device-side assert')"
        ] * 3
        with pytest.raises(StateLost, match="device-side assert"):
            await batcher.run([Item(1)])


async def test_what_nobody_waits_for_any_more_is_not_computed() -> None:
    notes = Notes()
    async with batching(notes, batch_tokens=1, wait_s=0.0) as batcher:
        notes.gate.clear()
        first = asyncio.create_task(batcher.run([Item(1)]))
        await asyncio.sleep(0)
        await until(lambda: not batcher._waiting)
        left = asyncio.create_task(batcher.run([Item(7)]))
        await until(lambda: len(batcher._waiting) == 1)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        last = asyncio.create_task(batcher.run([Item(3)]))
        await asyncio.sleep(0)
        notes.gate.set()
        await asyncio.gather(first, last)
    assert notes.passes == [[1], [3]]


async def test_a_call_of_the_model_that_hangs_does_not_keep_the_batcher_from_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batcher_module, "_CLOSE_S", 0.1)
    notes = Notes()
    notes.gate.clear()
    batcher = Batcher(notes, ModelsSettings(), "notes", 0.0)
    batcher.start()
    asking = asyncio.create_task(batcher.run([Item(1)]))
    await until(lambda: batcher._turns.watch._calls)
    async with asyncio.timeout(PATIENCE_S / 2):
        await batcher.close()
    assert notes.passes == []
    notes.gate.set()
    asking.cancel()
