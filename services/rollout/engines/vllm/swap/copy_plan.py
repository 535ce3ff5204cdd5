"""Trace how checkpoint tensors become a model's parameters, and replay it as one copy.

Only the model's loader knows how parameters are fused and sharded. It runs once over views of the shadow, with writes
recorded instead of made::

    load_weights ──▶ recorder ──▶ copy_(parameter view, shadow view)      a copy of the plan
                                  clone(shadow view)                      that view (experts cut from a stacked tensor)
                                  fill_(parameter view, constant)         a fill (padded vocabularies)
                                  anything else into a parameter          CopyPlanRefused

A plan writes every parameter byte exactly once (proved by interval arithmetic). Sources are (part, offset, strides);
parts are shadow storages by first use (bucket numbers, in layout order), so another buffer can replace them. Meta
tensors may be traced for that only.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.services.rollout.engines.vllm.swap.byte_coverage import (
    Intervals,
    TouchedTwice,
    first_missing,
    intervals,
    merged,
    union,
)
from penstock.services.rollout.engines.vllm.swap.copies import Copy, CopyPlan, Fill, Region, coalesced

Load: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Tensors: TypeAlias = Mapping[str, torch.Tensor]

_aten = torch.ops.aten
_NONE: Tensors = MappingProxyType({})


class CopyPlanRefused(Exception):
    """The model is not loaded by plain copies only."""


class LoaderRefused(CopyPlanRefused):
    """The model's loader raised."""


def trace(load: Load, tensors: Tensors, parameters: Tensors, buffers: Tensors = _NONE) -> CopyPlan:
    """Return the plan of what ``load`` does with ``tensors`` (stable shadow views).

    ``parameters`` are complete, ties may repeat; ``buffers`` are covered completely or not at all. Neither changes.

    Raises:
        CopyPlanRefused: not only copies, or bytes are missing; :class:`LoaderRefused` if ``load`` raised.
    """
    for name, parameter in parameters.items():
        if is_lazy(parameter) or not parameter.numel():
            raise CopyPlanRefused(f"the parameter {name} is empty: its weight was repacked into another form")
    held = {name: tensor.data for name, tensor in (*buffers.items(), *parameters.items())}
    recorder = _Recorder(_numbered(tensors.values()), _numbered(held.values()))
    _run(load, tensors, recorder, {**buffers, **parameters}, held)
    regions = {name: recorder.destinations.region(tensor) for name, tensor in held.items()}
    _prove_coverage((*recorder.copies, *recorder.fills), regions, optional=buffers.keys() - parameters.keys())
    copies, sides = coalesced(recorder.copies), (recorder.sources.kept, recorder.destinations.kept)
    return CopyPlan(copies, recorder.fills, *sides, recorder.copies)


def first_cut(read: Iterable[Region], tensors: Mapping[str, Region]) -> str:
    """Return the first of ``tensors`` that ``read`` covers only in part, as loaders with narrower heads do, or ""."""
    parts: dict[int, list[Intervals]] = defaultdict(list)
    for region in read:
        parts[region.storage].append(_touched(region))
    covered = {storage: merged(touched) for storage, touched in parts.items()}
    for name, region in tensors.items():
        touched, held = _touched(region), covered.get(region.storage)
        if held is None or not len(touched):
            continue
        starts, ends = touched[:, 0].min(), touched[:, 1].max()
        is_read = bool(((held[:, 0] < ends) & (held[:, 1] > starts)).any())
        if is_read and first_missing(held, touched) is not None:
            return name
    return ""


def sources_of(tensors: Tensors) -> dict[str, Region]:
    storages = _numbered(tensors.values())
    return {name: storages.region(tensor) for name, tensor in tensors.items()}


def _run(load: Load, tensors: Tensors, recorder: "_Recorder", live: Tensors, held: Tensors) -> None:
    sources = [(name, tensor.detach()) for name, tensor in tensors.items()]  # loaders set attributes on them
    try:
        with torch.no_grad(), recorder:
            load(iter(sources))
    except CopyPlanRefused:
        raise
    except Exception as error:
        raise recorder.refusal or LoaderRefused(f"the model's loader refused the tensors: {error!r}") from error
    finally:
        replaced = _put_back(live, held)
    if recorder.refusal:  # the loader caught the exception
        raise recorder.refusal
    if replaced:
        raise CopyPlanRefused(f"the loader replaces the parameter {replaced} instead of writing into it")


def _put_back(live: Tensors, held: Tensors) -> str:
    """Undo ``parameter.data = …``, which dispatch modes miss; return the first such name."""
    first = ""
    for name, tensor in live.items():
        if place_of(tensor.data) != place_of(held[name]):
            tensor.data = held[name]
            first = first or name
    return first


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what two tensors share exactly if they are the same view of the same memory."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


# ---------------------------------------------------------------- recording


class _Storages:
    """Storages by first use and identity, because meta addresses are 0."""

    def __init__(self) -> None:
        self.kept: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}

    def add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self.kept)
            self.kept.append(storage)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._numbers

    def region(self, tensor: torch.Tensor) -> Region:
        number = self._numbers[tensor.untyped_storage()._cdata]
        offset = int(tensor.storage_offset()) * tensor.dtype.itemsize
        return Region(number, offset, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _numbered(tensors: Iterable[torch.Tensor]) -> _Storages:
    storages = _Storages()
    for tensor in tensors:
        storages.add(tensor.untyped_storage())
    return storages


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, sources: _Storages, destinations: _Storages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources = sources
        self.destinations = destinations
        self.copies: list[Copy] = []
        self.fills: list[Fill] = []
        self.refusal: CopyPlanRefused | None = None
        self._made = _Storages()
        self._computed = _Storages()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        taken = _tensors((args, kwargs))
        written = written_by(operation, args, kwargs)
        if any(tensor in self.sources for tensor in written):
            self._refuse(f"the loader writes into the shadow, or into a copy of it, by {operation}")
        if any(tensor in self.destinations for tensor in written):
            self._write(operation, args, kwargs)
            return args[0]
        if operation is _aten.clone.default and args[0] in self.sources:
            return args[0].detach()  # an unchanged copy; where a loader needs another order, its view is refused
        if any(tensor not in self._made for tensor in written):
            self._refuse(f"the loader writes by {operation} into a tensor that is neither parameter nor buffer")
        result = operation(*args, **kwargs)
        self._follow(operation, taken, _tensors(result), written)
        return result

    def _write(self, operation: Any, args: Any, kwargs: Any) -> None:
        if operation is _aten.copy_.default:
            self._copy(args[0], args[1])
        elif operation not in (_aten.zero_.default, _aten.fill_.Scalar):
            self._refuse(f"the loader writes into a parameter by {operation}, which is no copy")
        elif args[0].numel():
            value = (*args[1:], *kwargs.values(), 0)[0]
            self.fills.append(Fill(self.destinations.region(args[0]), value))

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if source in self._computed:
            self._refuse("the loader copies what it computed from a tensor, not the tensor itself")
        if source not in self.sources:
            self._refuse("the loader copies something into a parameter that does not come from the tensors")
        if destination.dtype != source.dtype and not (destination.is_floating_point() and source.is_floating_point()):
            self._refuse(f"the loader turns {source.dtype} into {destination.dtype}")
        if destination.numel():
            source = source.expand(destination.shape)
            self.copies.append(Copy(self.destinations.region(destination), self.sources.region(source)))

    def _follow(
        self, operation: Any, taken: list[torch.Tensor], made: list[torch.Tensor], written: list[torch.Tensor]
    ) -> None:
        """Record new tensors and whether they derive from sources; a view counts as its base."""
        given = _numbered(taken)
        for tensor in made:
            if tensor not in given:
                self._made.add(tensor.untyped_storage())
        if not any(tensor in self.sources or tensor in self._computed for tensor in taken):
            return
        if not made and not written:
            self._refuse(f"the loader decides by the values of a tensor, by {operation}")
        for tensor in (*made, *written):
            if tensor not in self.sources:
                self._computed.add(tensor.untyped_storage())

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or CopyPlanRefused(reason)
        raise self.refusal


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records writes, and reads of ``sources``, in its block, also on the meta device; ``live`` keeps its values."""

    def __init__(self, live: Iterable[torch.Tensor] = (), sources: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = _numbered(live)
        self._sources = _numbered(sources)
        self._written = _Storages()
        self._read: list[Region] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = written_by(operation, args, kwargs or {})
        for tensor in written:
            self._written.add(tensor.untyped_storage())
        if not operation.is_view:
            read = [tensor for tensor in _tensors((args, kwargs)) if tensor in self._sources]
            self._read += [self._sources.region(tensor) for tensor in read]
        if not any(tensor in self._live for tensor in written):
            return operation(*args, **(kwargs or {}))
        if operation is _aten.copy_.default:
            args[1].expand(args[0].shape)
        return args[0]

    def reached(self, tensor: torch.Tensor) -> bool:
        """Whether any part of ``tensor`` was written."""
        return tensor in self._written

    def cut(self, tensors: Tensors) -> str:
        """Return the first of ``tensors`` (``sources``) read only in part, or ""."""
        return first_cut(self._read, {name: self._sources.region(tensor) for name, tensor in tensors.items()})


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def written_by(operation: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    written: list[torch.Tensor] = []
    for number, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _tensors(args[number] if number < len(args) else kwargs.get(argument.name))
    return written


# ---------------------------------------------------------------- proving


def _prove_coverage(writes: Iterable[Copy | Fill], regions: Mapping[str, Region], optional: Iterable[str]) -> None:
    """Check that ``writes`` cover ``regions`` exactly once; ``optional`` ones completely or not at all. Raises
    CopyPlanRefused: names the first violation.
    """
    parts: dict[int, list[Intervals]] = defaultdict(list)
    for write in writes:
        parts[write.destination.storage].append(_touched(write.destination))
    covered: dict[int, Intervals] = defaultdict(lambda: union([]))
    for storage, touched in parts.items():
        try:
            covered[storage] = union(touched)
        except TouchedTwice as error:
            raise CopyPlanRefused(f"the loader writes {_names(regions, storage)} twice") from error
    untouched = {name for name in optional if regions[name].storage not in parts}
    for name, region in regions.items():
        missing = first_missing(covered[region.storage], _touched(region))
        if missing is not None and name not in untouched:
            raise CopyPlanRefused(f"the tensors do not cover {name}, from its byte {missing - region.offset} on")


def _touched(region: Region) -> Intervals:
    return intervals(region.offset, region.shape, region.strides, region.dtype.itemsize)


def _names(regions: Mapping[str, Region], storage: int) -> str:
    return " or ".join(name for name, region in regions.items() if region.storage == storage)
