"""Copies between storages as data, executed in bulk.

::

    Copy(destination Region, source Region) × N ──▶ joined where neighbours on both sides
                                                ──▶ grouped by number type and order ──▶ one _foreach_copy_ a group

:func:`penstock.services.rollout.engines.vllm.swap.copy_plan.trace` builds plans. Only :meth:`CopyPlan.differences` waits for a
device.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

Groups = list[tuple[list[torch.Tensor], list[torch.Tensor]]]
"""Destinations and sources of like copies."""
_WIDE = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """A view of storage number ``storage``: ``offset`` in bytes, ``strides`` in items."""

    storage: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether its items are contiguous and in order."""
        expected_stride = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected_stride:
                return False
            expected_stride *= size
        return True

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return this view of ``storage``."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset // self.dtype.itemsize, self.shape, self.strides)


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    destination: Region
    source: Region


@dataclasses.dataclass(frozen=True, slots=True)
class Fill:
    destination: Region
    value: float


class CopyPlan:
    """Traced copies and fills; keeps the storages of both sides alive."""

    def __init__(
        self,
        copies: Sequence[Copy],
        fills: Sequence[Fill],
        sources: Sequence[torch.UntypedStorage],
        destinations: Sequence[torch.UntypedStorage],
        recorded: Sequence[Copy] = (),
    ) -> None:
        self.copies = tuple(copies)
        self.recorded = tuple(recorded)
        """The copies as the loader made them, each of one tensor."""
        self.fills = tuple(fills)
        self._sources = tuple(sources)
        self._destinations = tuple(destinations)
        self._filled = [(fill.destination.on(destinations[fill.destination.storage]), fill.value) for fill in fills]
        self._groups: Groups = []
        if all(storage.device.type != "meta" for storage in sources):
            self._groups = self._grouped(self.copies, self._sources)

    @property
    def nbytes(self) -> int:
        return sum(copy.destination.nbytes for copy in self.copies)

    def over(self, copies: Sequence[Copy], sources: Sequence[torch.UntypedStorage]) -> "CopyPlan":
        """Return ``copies`` from ``sources`` with this plan's fills, to its destinations."""
        return CopyPlan(copies, self.fills, sources, self._destinations)

    @property
    def parts(self) -> int:
        """Number of shadow storages (buckets)."""
        return len(self._sources)

    def copies_of(self, part: int) -> list[Copy]:
        """Return copies from storage ``part``."""
        return [copy for copy in self.copies if copy.source.storage == part]

    @torch.no_grad()
    def replay(self) -> int:
        """Enqueue everything on the current stream; return the bytes copied."""
        assert self._groups, "a plan that was traced on the meta device is replayed part by part"
        _enqueue(self._groups)
        self.replay_fills()
        return self.nbytes

    @torch.no_grad()
    def replay_part(self, part: int, buffer: torch.Tensor) -> int:
        """Enqueue a part's copies from ``buffer`` (uint8); return the bytes copied.

        All parts in any order plus :meth:`replay_fills` equal :meth:`replay`.
        """
        copies, groups = self._from_buffer(part, buffer)
        _enqueue(groups)
        return sum(copy.destination.nbytes for copy in copies)

    @torch.no_grad()
    def part_differences(self, part: int, buffer: torch.Tensor) -> int:
        """Return how many of a part's copies differ bitwise from ``buffer``; waits for the device."""
        return _differences(self._from_buffer(part, buffer)[1])

    def _from_buffer(self, part: int, buffer: torch.Tensor) -> tuple[list[Copy], Groups]:
        assert buffer.dtype == torch.uint8, "a bucket is a tensor of bytes"
        assert buffer.is_contiguous(), "a bucket lies in one piece"
        shift = int(buffer.storage_offset())
        copies = [
            Copy(copy.destination, dataclasses.replace(copy.source, storage=0, offset=copy.source.offset + shift))
            for copy in self.copies_of(part)
        ]
        return copies, self._grouped(copies, [buffer.untyped_storage()])

    @torch.no_grad()
    def replay_fills(self) -> None:
        for destination, value in self._filled:
            destination.fill_(value)

    @torch.no_grad()
    def differences(self) -> int:
        """Return how many copies differ bitwise (cast ones: by value); waits for the device."""
        return _differences(self._groups)

    def _grouped(self, copies: Iterable[Copy], sources: Sequence[torch.UntypedStorage]) -> Groups:
        """Group views by number types and order: one strided pair slows a whole foreach."""
        groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for copy in copies:
            to, of = self._destinations[copy.destination.storage], sources[copy.source.storage]
            if copy.destination.dtype == torch.uint8 and copy.source.dtype == torch.uint8:
                copy = _widened(copy, to, of)
            destination, source = copy.destination.on(to), copy.source.on(of)
            alike = copy.destination.contiguous and copy.source.contiguous
            group = groups[destination.dtype, source.dtype, destination.device, source.device, alike]
            group[0].append(destination)
            group[1].append(source)
        return list(groups.values())


def _differences(groups: Groups) -> int:
    pairs = [pair for group in groups for pair in zip(*group, strict=True)]
    return sum(not torch.equal(destination, source.to(destination.dtype)) for destination, source in pairs)


def _enqueue(groups: Groups) -> None:
    for destinations, sources in groups:
        torch._foreach_copy_(destinations, sources, non_blocking=True)


def coalesced(copies: Iterable[Copy]) -> list[Copy]:
    """Return plain copies as bytes, joined if adjacent on both sides."""
    plain: list[Copy] = []
    others: list[Copy] = []
    for copy in copies:
        same = copy.destination.dtype == copy.source.dtype
        if same and copy.destination.contiguous and copy.source.contiguous:
            plain.append(Copy(_bytes(copy.destination), _bytes(copy.source)))
        else:
            others.append(copy)
    plain.sort(key=lambda copy: (copy.source.storage, copy.source.offset))
    joined = plain[:1]
    for before, copy in itertools.pairwise(plain):
        if _follows(before.source, copy.source) and _follows(before.destination, copy.destination):
            last = joined[-1]
            size = last.source.nbytes + copy.source.nbytes
            joined[-1] = Copy(_resized(last.destination, size), _resized(last.source, size))
        else:
            joined.append(copy)
    return joined + others


def _bytes(region: Region) -> Region:
    return dataclasses.replace(region, dtype=torch.uint8, shape=(region.nbytes,), strides=(1,))


def _resized(region: Region, size: int) -> Region:
    return dataclasses.replace(region, shape=(size,))


def _follows(before: Region, after: Region) -> bool:
    return before.storage == after.storage and before.offset + before.nbytes == after.offset


def _widened(copy: Copy, to: torch.UntypedStorage, of: torch.UntypedStorage) -> Copy:
    """Use the widest items that fit both sides: copy kernels cost per item."""
    addresses = (to.data_ptr(), of.data_ptr(), copy.destination.offset, copy.source.offset, copy.source.nbytes)
    dtype = next(dtype for dtype in _WIDE if all(value % dtype.itemsize == 0 for value in addresses))
    shape = (copy.source.nbytes // dtype.itemsize,)
    return Copy(
        dataclasses.replace(copy.destination, dtype=dtype, shape=shape),
        dataclasses.replace(copy.source, dtype=dtype, shape=shape),
    )
