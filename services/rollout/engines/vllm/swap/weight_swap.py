"""Swap received weights into a vLLM model: by a traced plan, or by vLLM's layerwise reload.

::

    prepare(views of the shadow) ──▶ trace load_weights on the live model
                                       a plan of all bytes ──▶ path "plan":      swap = one foreach copy, enqueued
                                       refused, with reason ─▶ path "layerwise": swap = vLLM reloads layer by layer,
                                                               behind a pause
    stream(buckets, layout)       ──▶ the same two paths without a shadow: bucket after bucket, behind a pause
    pieces(layout), swap_share    ──▶ the plan over a shadow of this rank's share alone: path "shares"

Plans are also refused if loading derives other state from weights (CPU packing, quantization, MLA's absorbed
projections, permuted experts). Refused weights leave the live ones unchanged; a failed stream or reload leaves them
``torn`` until the next swap. Call between two decoding steps, in the worker's thread.
"""

import contextlib
import logging
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from penstock.services.rollout.engines.checkpoint_form import CheckpointForm
from penstock.services.rollout.engines.vllm.swap.copies import CopyPlan
from penstock.services.rollout.engines.vllm.swap.copy_plan import CopyPlanRefused, Writes, first_cut, sources_of, trace
from penstock.services.rollout.engines.vllm.swap.experts import METHOD as EXPERTS
from penstock.services.rollout.engines.vllm.swap.experts import changed, inherits_processing
from penstock.services.rollout.engines.vllm.swap.quantised import (
    PROVEN,
    QuantisingPlan,
    method_of,
    prove,
    quantised,
    stand_ins,
)
from penstock.services.rollout.engines.vllm.swap.reload_repairs import (
    counting_direct_writes,
    fuse_gates_again,
    fusing_gates,
    packing_experts_again,
    process_tied,
)
from penstock.services.rollout.engines.vllm.swap.share_plan import SharesRefused, packed, pieces_of
from penstock.shared.errors import SettingsError, WeightsError
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import Layout
from penstock.shared.weights.format.shares import Pieces, Share

log = logging.getLogger(__name__)

Path: TypeAlias = Literal["plan", "layerwise", "shares"]

_PLAIN = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", PROVEN})
"""Methods that use GPU parameters unchanged, or quantised as a plan can."""


class WeightSwapper:
    """Swaps weights of a worker's loaded ``model``."""

    def __init__(self, model: nn.Module, vllm_config: Any, device: torch.device) -> None:
        self.path: Path = "layerwise"
        self.reason = "nothing was prepared"
        self.torn = False
        self._model: Any = model
        self._config = vllm_config
        self._device = device
        source = vllm_config.model_config
        self._form = CheckpointForm(source.model, trust_remote_code=source.trust_remote_code)
        self._tensors: dict[str, torch.Tensor] = {}
        self._plan: CopyPlan | None = None
        self._layout = ""
        self._packed: tuple[FlatSnapshot, CopyPlan] | None = None
        self._fusing: list[nn.Module] = []
        self._live: list[torch.Tensor] = []
        self._addresses: list[int] = []

    def check_quantised(self) -> None:
        """Refuse quantised layers that no version is proven to reach; raises SettingsError.

        vLLM's CPU build packs other weights, too, so there its own reload quantises a version.
        """
        if self._config.quant_config is None:
            return
        reason = next((why for name, module in self._model.named_modules() if (why := _unproven(name, module))), "")
        if not reason and self._device.type == "cuda":
            try:
                with _loading(self._config):
                    self._traced(self._form.outlined(self._config.model_config.dtype))
            except CopyPlanRefused as refused:
                reason = str(refused)
        if reason:
            raise SettingsError(
                f"new weights of this model cannot be proven to be quantised as vLLM does when it loads them: {reason}: set "
                'rollout.vllm.quantization = "none", or change policy.model'
            )

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Choose the path for ``tensors`` (stable shadow views by Hugging Face name, in layout order).

        Cheap if nothing moved. Raises WeightsError if they do not fit.
        """
        if self._is_prepared_for(tensors):
            return
        plan, reason = None, ""
        with _loading(self._config):
            self._form.open()  # of transformers' classes, which vLLM's backend of that name compiles
            try:
                plan = self._traced(tensors)
            except CopyPlanRefused as refused:
                self._check_fit(tensors)
                reason = str(refused)
        self.path, self.reason = ("layerwise", reason) if plan is None else ("plan", "")
        self._plan, self._tensors, self._layout, self._packed = plan, dict(tensors), "", None
        self._fusing = fusing_gates(self._model)
        self._live = list(self._model.parameters())
        self._addresses = [parameter.data_ptr() for parameter in self._live]
        self._say()

    def swap(self) -> tuple[Path, int]:
        """Make the prepared tensors live; return the path and the bytes. A plan only enqueues copies."""
        self.prepare(self._tensors)
        self.torn = True
        if self._plan is not None:
            with torch.inference_mode(False):
                copied = self._plan.replay()
            fuse_gates_again(self._fusing)
        else:
            copied = self._reload(self._tensors.items())
        self.torn = False
        return self.path, copied

    def stream(self, buckets: Iterable[tuple[int, torch.Tensor]], layout: Layout) -> int:
        """Make a version live bucket by bucket; return the bytes.

        ``buckets`` are (number, reusable uint8 tensor).

        Raises:
            WeightsError: ``buckets`` failed midway (torn), or they do not fit (not torn).
        """
        if self._layout != layout.digest:
            self.prepare(_meta_views(layout))
            self._layout = layout.digest
        self.torn = True
        copied = self._stream_plan(self._plan, buckets) if self._plan else self._reload(_copies(buckets, layout))
        self.torn = False
        return copied

    def pieces(self, layout: Layout) -> Pieces:
        """Return what the plan reads of ``layout``; raises WeightsError without a plan, with the reason."""
        if self._layout != layout.digest:
            self.prepare(_meta_views(layout))
            self._layout = layout.digest
        if self._plan is None:
            raise WeightsError(self.reason)
        return pieces_of(self._plan, len(layout.bucket_bytes))

    def swap_share(self, share: Share, shadow: FlatSnapshot) -> tuple[Path, int]:
        """Make a packed ``shadow`` live; return the path and the bytes. Only enqueues copies. Raises WeightsError."""
        self.prepare(self._tensors)
        self._layout = shadow.layout_digest
        if self._packed is None or self._packed[0] is not shadow:
            try:
                if self._plan is None:
                    raise SharesRefused(self.reason)
                self._packed = (shadow, packed(self._plan, share, shadow.buckets))
            except SharesRefused as refused:
                raise WeightsError(f"this rank's share does not fit its model: {refused}") from refused
        self.torn = True
        with torch.inference_mode(False):
            copied = self._packed[1].replay()
        fuse_gates_again(self._fusing)
        self.torn = False
        return "shares", copied

    def differences(self) -> int | None:
        """Return how many copies differ bitwise from the shadow, or None without a plan or shadow; slow, for tests."""
        if self._packed is not None:
            return self._packed[1].differences()
        return None if self._plan is None or self._layout else self._plan.differences()

    def compare(self, buckets: Iterable[tuple[int, torch.Tensor]]) -> int | None:
        """Return how many copies differ bitwise from streamed ``buckets``, or None without a plan; slow, for tests."""
        plan = self._plan
        return None if plan is None else sum(plan.part_differences(number, bucket) for number, bucket in buckets)

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        return self._model.load_weights(self._form.convert(tensors))

    # ---------------------------------------------------------------- by the plan

    def _traced(self, tensors: Mapping[str, torch.Tensor]) -> CopyPlan:
        before = _parameters(self._model)
        layers = quantised(self._model)
        with stand_ins(layers) as weights:
            plan = trace(self._load, tensors, _parameters(self._model), dict(self._model.named_buffers()))
        self._refuse_cut(first_cut((copy.source for copy in plan.copies), sources_of(tensors)), tensors)
        if layers:
            prove(layers)
            plan = QuantisingPlan(plan, layers, weights)
        if any(before.get(name) is not parameter for name, parameter in _parameters(self._model).items()):
            raise CopyPlanRefused("the loader registers new parameters instead of writing into those that it has")
        derived = _derived(self._model)
        if derived:
            raise CopyPlanRefused(derived)
        return plan

    def _refuse_cut(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        from vllm.distributed import get_tensor_model_parallel_world_size

        expert_parallel = self._config.parallel_config.enable_expert_parallel
        if name and get_tensor_model_parallel_world_size() == 1 and not expert_parallel:
            raise WeightsError(
                f"vLLM takes only a part of {name} {tuple(tensors[name].shape)}: its model has other "
                "sizes than the checkpoint's configuration says (of heads, for example); change policy.model, the version of vLLM, "
                "or rollout.engine"
            )

    def _stream_plan(self, plan: CopyPlan, buckets: Iterable[tuple[int, torch.Tensor]]) -> int:
        copied = 0
        with torch.inference_mode(False):
            for number, bucket in buckets:
                copied += plan.replay_part(number, bucket)
                self._wait()  # the next bucket reuses the buffer
            plan.replay_fills()
        fuse_gates_again(self._fusing)
        self._wait()
        return copied

    def _is_prepared_for(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        return (
            bool(self._tensors)
            and self._tensors.keys() == tensors.keys()
            and all(map(operator.is_, map(self._tensors.__getitem__, tensors), tensors.values()))
            and [parameter.data_ptr() for parameter in self._live] == self._addresses
        )

    def _say(self) -> None:
        if self._plan is not None:
            figures = {"copies": len(self._plan.copies), "fills": len(self._plan.fills), "bytes": self._plan.nbytes}
            log.info("weights will be swapped by a copy plan", extra=figures)
        else:
            log.warning("weights will be reloaded layer by layer, behind a pause", extra={"reason": self.reason})

    # ---------------------------------------------------------------- layer by layer

    def _reload(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> int:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        given = 0

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal given
            for name, tensor in pairs:
                given += tensor.nbytes
                yield name, tensor

        # It warns of layers without own weights; coverage is checked before.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        self._wait()
        with _loading(self._config), torch.device(self._device):
            initialize_layerwise_reload(self._model)
            with packing_experts_again(self._model, self._device):
                try:
                    with counting_direct_writes(self._model):
                        self._load(counted())
                finally:  # parameters must never stay on the meta device
                    finalize_layerwise_reload(self._model, self._config.model_config)
            process_tied(self._model)
            fuse_gates_again(self._fusing)
        self._wait()
        return given

    def _check_fit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Run the loader with meta tensors on non-live parameters; raises WeightsError if it fails or skips one."""
        stand_ins = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        live = (*self._model.parameters(), *self._model.buffers())
        with _checkpoint_form(self._model), Writes(live, stand_ins.values()) as writes:
            try:
                self._load(stand_ins.items())
            except Exception as error:  # loaders raise anything on unknown tensors
                reason = str(error) if isinstance(error, WeightsError) else repr(error)
                raise WeightsError(f"these are not weights of this model: {reason}") from error
            missing = [name for name, parameter in self._model.named_parameters() if not writes.reached(parameter)]
        self._refuse_cut(writes.cut(stand_ins), tensors)
        if missing and self._config.quant_config is None:
            raise WeightsError(
                f"the weights of {missing[0]} and {len(missing) - 1} more are missing: vLLM would keep the old "
                "ones; change policy.model, or rollout.engine"
            )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextlib.contextmanager
def _loading(vllm_config: Any) -> Iterator[None]:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(vllm_config), torch.inference_mode(False), torch.no_grad():
        yield


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def _unproven(name: str, module: nn.Module) -> str:
    held = getattr(module, "quant_method", None) is not None and method_of(module) not in _PLAIN
    return f"{name} uses its weights through {method_of(module)}" if held else ""


def _derived(model: nn.Module) -> str:
    live = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if method_of(module) == EXPERTS:
            if reason := changed(module):
                return f"{name} {reason}"
        elif reason := _unproven(name, module):
            return reason
        if hasattr(module, "cpu_linear"):
            return f"{name} holds its weight a second time, packed for the CPU"
        processes = callable(getattr(module, "process_weights_after_loading", None)) and kind != EXPERTS
        if processes and (kind != "Attention" or _derives_sinks(module.impl, live)):
            return f"{name} ({kind}) processes weights after loading"
    return ""


def _derives_sinks(attention: Any, live: Collection[int]) -> bool:
    """Return whether a kernel has attention sinks of its own, or may make some of the parameter's."""
    sinks = getattr(attention, "sinks", None)
    if sinks is None:
        return False
    plain = inherits_processing(type(attention), "AttentionImplBase")
    return not plain or sinks.untyped_storage()._cdata not in live


@contextlib.contextmanager
def _checkpoint_form(model: nn.Module) -> Iterator[None]:
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    held: dict[nn.Module, dict[str, Any]] = {module: dict(module._parameters) for module in model.modules()}
    made: dict[int, Any] = {}
    try:
        for module, live in held.items():
            for name, recorded in get_layerwise_info(module).restore_metadata[0].items():
                fresh = restore_layer_refs(to_meta_tensor(recorded), module)
                if hasattr(fresh, "weight_loader"):
                    fresh.weight_loader = _get_original_loader(fresh)
                module._parameters[name] = made.setdefault(id(live.get(name)), fresh) if name in live else fresh
        yield
    finally:
        for module, live in held.items():
            module._parameters.clear()
            module._parameters.update(live)


# ---------------------------------------------------------------- buckets


def _views(layout: Layout, bucket: int, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for entry in layout.tensors:
        if entry.bucket == bucket:
            flat = buffer[entry.offset : entry.offset + entry.nbytes]
            yield entry.name, flat.view(getattr(torch, entry.dtype)).view(entry.shape)


def _meta_views(layout: Layout) -> dict[str, torch.Tensor]:
    buckets = [torch.empty(size, dtype=torch.uint8, device="meta") for size in layout.bucket_bytes]
    return dict(pair for number, bucket in enumerate(buckets) for pair in _views(layout, number, bucket))


def _copies(buckets: Iterable[tuple[int, torch.Tensor]], layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """Copy each bucket's tensors, as layers keep them until their last one."""
    for number, bucket in buckets:
        for name, tensor in _views(layout, number, bucket):
            yield name, tensor.clone()
