"""How the tensors of a checkpoint become the parameters of a model, traced once and then replayed as one copy.

Inference engines fuse and shard parameters: query, key and value projections lie in one tensor, each rank holds its rows.
Only the model's own loader knows how. It is run once over views of the shadow, with every write caught instead of made::

    load_weights ──▶ recorder ──▶ copy_(parameter view, shadow view)      a copy of the plan
                                  fill_(parameter view, constant)         a fill (padded vocabularies)
                                  anything else into a parameter          CopyPlanRefused

What a plan promises:

- Its copies and fills write every byte of every parameter exactly once (proved by interval arithmetic), so replaying it
  is the same as running the loader, whatever the parameters held before. Tied parameters count once.
- Tracing changes nothing: no parameter, no buffer, no tensor of the shadow.
- What is not a plain copy (concatenated, cast into fresh memory, quantized) is refused, never guessed.

The sources stand as (part, offset, strides), where a part is one storage of the shadow in the order in which ``tensors``
first touches it: the bucket's number, for tensors in the order of their layout. So the copies of one bucket can be
replayed from another buffer that holds its bytes. Tensors on the meta device may be traced, for that use alone.

It knows no engine: which model, which parameters and what else depends on them is the caller's business.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.rollout.engines.vllm.swap.byte_coverage import (
    Intervals,
    TouchedTwice,
    first_missing,
    intervals,
    merged,
    union,
)
from services.rollout.engines.vllm.swap.copies import Copy, CopyPlan, Fill, Region, coalesced

Load: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""A model's ``load_weights``: takes (name, tensor) pairs and writes them into its parameters."""
Tensors: TypeAlias = Mapping[str, torch.Tensor]

_aten = torch.ops.aten
_NONE: Tensors = MappingProxyType({})


class CopyPlanRefused(Exception):
    """Loading this model is not a matter of plain copies; the text says why."""


class LoaderRefused(CopyPlanRefused):
    """The model's loader itself raised on these tensors."""


def trace(load: Load, tensors: Tensors, parameters: Tensors, buffers: Tensors = _NONE) -> CopyPlan:
    """Return the plan of what ``load`` does with ``tensors`` (stable views of the shadow) to a model.

    ``parameters`` are all that the model has, tied ones under each of their names or once. Its ``buffers`` need not be
    loaded, but one that is must be covered as a whole too. Both keep their values.

    Raises:
        CopyPlanRefused: it is not a plan of copies, or not of all bytes; :class:`LoaderRefused` where ``load`` raised.
    """
    for name, parameter in parameters.items():
        if is_lazy(parameter) or not parameter.numel():
            raise CopyPlanRefused(f"the parameter {name} is empty: its weight was repacked into another form")
    held = {name: tensor.data for name, tensor in (*buffers.items(), *parameters.items())}
    recorder = _Recorder(_numbered(tensors.values()), _numbered(held.values()))
    _run(load, tensors, recorder, {**buffers, **parameters}, held)
    regions = {name: recorder.destinations.region(tensor) for name, tensor in held.items()}
    _prove_coverage((*recorder.copies, *recorder.fills), regions, optional=buffers.keys() - parameters.keys())
    return CopyPlan(coalesced(recorder.copies), recorder.fills, recorder.sources.kept, recorder.destinations.kept)


def first_cut(read: Iterable[Region], tensors: Mapping[str, Region]) -> str:
    """Return the name of the first of ``tensors`` of which ``read`` has some bytes, but not all; "" where there is none.

    A loader whose heads are narrower than the checkpoint's takes the first rows and says nothing.
    """
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
    """Return where each of ``tensors`` is, in the numbers that a traced plan's sources have."""
    storages = _numbered(tensors.values())
    return {name: storages.region(tensor) for name, tensor in tensors.items()}


def _run(load: Load, tensors: Tensors, recorder: "_Recorder", live: Tensors, held: Tensors) -> None:
    sources = [(name, tensor.detach()) for name, tensor in tensors.items()]  # loaders hang attributes on them
    try:
        with torch.no_grad(), recorder:
            load(iter(sources))
    except CopyPlanRefused:
        raise
    except Exception as error:
        raise recorder.refusal or LoaderRefused(f"the model's loader refused the tensors: {error!r}") from error
    finally:
        replaced = _put_back(live, held)
    if recorder.refusal:  # caught by the loader
        raise recorder.refusal
    if replaced:
        raise CopyPlanRefused(f"the loader replaces the parameter {replaced} instead of writing into it")


def _put_back(live: Tensors, held: Tensors) -> str:
    """Undo ``parameter.data = …``, which no mode sees; return the name of the first so replaced."""
    first = ""
    for name, tensor in live.items():
        if _place(tensor.data) != _place(held[name]):
            tensor.data = held[name]
            first = first or name
    return first


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


# ---------------------------------------------------------------- recording


class _Storages:
    """Storages by number, in the order in which they came; by identity, as addresses are 0 on the meta device."""

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
    """Catches what a loader writes into ``destinations``, and follows what it makes out of ``sources``."""

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
            self._refuse(f"the loader writes into the shadow by {operation}")
        if any(tensor in self.destinations for tensor in written):
            self._write(operation, args, kwargs)
            return args[0]
        if any(tensor not in self._made for tensor in written):
            self._refuse(f"the loader writes by {operation} into a tensor that is neither parameter nor buffer")
        result = operation(*args, **kwargs)
        self._follow(operation, taken, _tensors(result), written)
        return result

    def _write(self, operation: Any, args: Any, kwargs: Any) -> None:
        """Record a write into a parameter."""
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
        """Remember what was made, and what of it was computed from the tensors; a view of a tensor is the tensor."""
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
    """Remembers which tensors are written into in its block, and which are read; works on the meta device.

    Args:
        live: tensors that keep their values: what would be written into them is checked for its shape alone.
        sources: tensors whose reads are remembered for :meth:`cut`.
    """

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
        """Whether any part of ``tensor`` was written into."""
        return tensor in self._written

    def cut(self, tensors: Tensors) -> str:
        """Return the name of the first of ``tensors`` (``sources``) that was read in part; "" where there is none."""
        return first_cut(self._read, {name: self._sources.region(tensor) for name, tensor in tensors.items()})


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def written_by(operation: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that ``operation`` writes into, by its schema."""
    found: list[torch.Tensor] = []
    for number, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[number] if number < len(args) else kwargs.get(argument.name))
    return found


# ---------------------------------------------------------------- proving


def _prove_coverage(writes: Iterable[Copy | Fill], regions: Mapping[str, Region], optional: Iterable[str]) -> None:
    """Check that ``writes`` cover every byte of ``regions`` exactly once; of ``optional`` ones, every byte or none.

    Raises:
        CopyPlanRefused: with the name of the first parameter that is not covered, or covered twice.
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
