"""What uses DeepSpeed: gradients over micro-batches and ranks, optimizer, checkpoints.

The loss is a sum over tokens divided by the tokens of the *global* batch. DeepSpeed averages gradients over ranks,
hence the factor ``ranks``. At ZeRO stage 3, every rank iterates :meth:`TrainingEngine.tensors` at the same point of its
loop. Frozen weights (see ``adapter``) are in no optimizer or checkpoint.
"""

import contextlib
import logging
import math
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.services.trainer.checkpoint import pickles
from penstock.services.trainer.model import adapter, experts
from penstock.services.trainer.model.memory import layerwise, recomputation, whole_layers
from penstock.services.trainer.model.memory.recomputation import Kept, Recomputation
from penstock.services.trainer.model.memory.residency import Residency
from penstock.services.trainer.model.memory.storages import Storages, tensors_in
from penstock.services.trainer.model.named_tensors import Published, in_groups, published, unique
from penstock.services.trainer.model.optimizer import adamw, bucket_of, check_sizes, set_options
from penstock.services.trainer.model.saving import whole_weights
from penstock.services.trainer.model.saving.ranges import load_ranges, ranges_of
from penstock.services.trainer.model.saving.writer import Writer, Written
from penstock.services.trainer.rank_group import host_group, meet_at_storage
from penstock.shared.errors import SettingsError, WeightsError
from penstock.shared.files import durable
from penstock.shared.model.flops import ModelSizes
from penstock.shared.process import memory_timeline
from penstock.shared.process.importing import importing, uncompiled
from penstock.shared.settings import Settings

log = logging.getLogger(__name__)

T = TypeVar("T")

_TAG = "engine"
_OTHER_GROUPS = ("parameter-alignment layout", "parameter group")
"""Of DeepSpeed's and torch's sentences."""
_READ_FROM_OUTSIDE = frozenset({"dt_proj"})
_ASIDE_BYTES = 1 << 30
"""Of the host's memory, which stay free beside the copy of a checkpoint."""


def numbered(device: str) -> torch.device:
    """Return the device with its number, for threads too, whose current one is the first."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def pick_device(setting: str) -> str:
    """Return ``cuda`` or ``cpu``; SettingsError if the required GPU is missing."""
    if setting == "cuda" and not torch.cuda.is_available():
        raise SettingsError("run.device = 'cuda' needs a GPU that torch can use: change run.device")
    return "cuda" if setting == "cuda" or (setting == "auto" and torch.cuda.is_available()) else "cpu"


def make_deterministic(device: str) -> None:
    """Make torch deterministic on GPUs (else RuntimeError); call before the first operation."""
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # for debugging, and slow


def place(policy: nn.Module, settings: Settings, device: str) -> nn.Module:
    """Return ``policy`` on ``device``, with experts grouped and divided, and activation checkpointing as set; idempotent.

    At ZeRO stage 3 its weights stay where they are, as no device may hold them whole (``memory/layerwise``).
    """
    if settings.trainer.expert_parallel > 1:
        import_deepspeed(device)
    experts.install(policy.model, settings.trainer.expert_parallel, settings.trainer.zero_stage)
    if settings.trainer.zero_stage < 3:
        policy.to(torch.device(device))
    recomputation.enable(policy.model, settings.trainer.gradient_checkpointing, device)
    return policy


class TrainingEngine:
    def __init__(self, policy: nn.Module, settings: Settings, device: str) -> None:
        deepspeed = import_deepspeed(device)
        self.ranks = dist.get_world_size()
        self.device = numbered(device)
        self.policy = place(policy, settings, device)
        self.policy.train()  # the modules concerned depend on checkpointing (``stochastic_layers``)
        parameters = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self._trainer = settings.trainer
        self._sharded = settings.trainer.zero_stage == 3
        self._has_experts = bool(experts.layers_of(self.policy))
        keeps_all = not recomputation.is_enabled(self.policy)
        config = _config(settings, self.ranks, bucket_of(parameters, settings.trainer), keeps_all=keeps_all)
        if self._sharded:
            with layerwise.looked_at(self.policy, settings, self.device):
                whole_layers.mark(self.policy, settings.trainer.deepspeed.get("zero_optimization", {}))
            layerwise.divide(self.policy, config, self.device)
            experts.check_division(self.policy)
        with uncompiled():  # DeepSpeed and bitsandbytes import an optimizer that calls torch's compiler
            engine, _, _, _ = deepspeed.initialize(
                model=self.policy,
                model_parameters=parameters,
                optimizer=adamw(parameters, settings.trainer, device),
                config=config,
            )
        check_sizes(engine.optimizer, settings.trainer)
        self._engine: Any = engine
        experts.take_imbalance(self.policy)  # of the self-test
        if self._sharded:
            _gather_with_parents(self.policy)
        elif settings.trainer.zero_stage and settings.trainer.offload == "none":
            _check_the_norm_alone(engine.optimizer)
        self._plain_optimizer = settings.trainer.zero_stage == 0 and settings.policy.dtype == "float32"
        self._frozen = not all(parameter.requires_grad for parameter in self.policy.parameters())
        self._writer = Writer(engine.checkpoint_engine, self.device)
        if self._sharded:
            _meet_before_gathering(engine.optimizer)
        automatic = settings.trainer.gradient_checkpointing == "auto"
        most = settings.trainer.micro_batch_tokens
        self.residency = Residency(self.policy, self.device, engine.optimizer)
        self._recomputation = Recomputation(self.policy, most, self.device, sharded=self._sharded, automatic=automatic)

    def forward(self, batch: Any) -> Any:
        with self._recomputation.watching(batch.tokens):
            return self._engine(batch)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add a micro-batch's gradients; ``last`` reduces them over ranks."""
        self._engine.set_gradient_accumulation_boundary(is_boundary=last)
        with self._recomputation.watching():
            self._engine.backward(loss, scale_wrt_gas=False)
        if not last:
            self._engine.step()  # counts the micro-batch, changes nothing

    def step(self, learning_rate: float) -> float:
        """Update the weights if the gradient is finite; return its global norm before clipping."""
        self.residency.follow()
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = self._step_plainly() if self._plain_optimizer else self._step()
        self._recomputation.adapt()
        return norm

    def _step(self) -> float:
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        if not self._engine.was_step_applied():
            return math.inf
        return float(norm) if norm is not None else 0.0

    def _step_plainly(self) -> float:
        """Step in float32 without ZeRO: gradients are whole, and DeepSpeed does not check the norm."""
        gradients = [parameter.grad for parameter in self.policy.parameters() if parameter.grad is not None]
        norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm()) if gradients else 0.0
        if not math.isfinite(norm):
            self._engine.zero_grad()
            return math.inf
        self._engine.step()
        return norm

    @contextlib.contextmanager
    def gradients_discarded(self) -> Iterator[None]:
        """Discard the gradients of backward passes (the last with ``last``) within the block; collective.

        They become non-finite, so :meth:`step` changes nothing.
        """
        trained: list[Any] = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        hooks = [parameter.register_hook(lambda gradient: torch.full_like(gradient, math.nan)) for parameter in trained]
        try:
            yield
            with _without_warnings():  # DeepSpeed warns of each skipped step
                norm = self.step(self._engine.optimizer.param_groups[0]["lr"])
        finally:
            for hook in hooks:
                hook.remove()
        if math.isfinite(norm):
            raise RuntimeError(
                f"expected discarded gradients to be left out of the weights, found a step of norm {norm}"
            )

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's optimizer, for its memory (``memory``)."""
        return self._engine.optimizer

    @property
    def kept(self) -> Kept:
        """Activations that the backward pass does not compute again."""
        return self._recomputation.kept

    @property
    def recovers(self) -> bool:
        """Whether one rank's forward pass may fail, without hanging others as at ZeRO stage 3 and with divided experts."""
        return not self._sharded and not self._has_experts

    def on_any_rank(self, condition: bool) -> bool:
        """Return whether ``condition`` holds on any rank; collective."""
        if self.ranks == 1:
            return condition
        flag = torch.tensor([int(condition)], dtype=torch.int64)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=host_group())
        return bool(flag.item())

    def ranks_where(self, condition: bool) -> tuple[int, ...]:
        """Return the ranks on which ``condition`` holds, ascending; collective."""
        if self.ranks == 1:
            return (0,) if condition else ()
        flags = torch.zeros(self.ranks, dtype=torch.int64)
        flags[dist.get_rank()] = int(condition)
        dist.all_reduce(flags, group=host_group())
        return tuple(rank for rank, flag in enumerate(flags.tolist()) if flag)

    @property
    def model(self) -> Any:
        """The Hugging Face model, perhaps with adapters."""
        return self.policy.model

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def sizes(self) -> ModelSizes:
        policy: Any = self.policy
        sizes: ModelSizes = policy.sizes
        return sizes

    @property
    def shares_prompts(self) -> bool:
        """Whether a group's prompt is computed once for all completions."""
        policy: Any = self.policy
        return bool(policy.trunk.packing == "rows")

    def evaluate(self, batch: object) -> Any:
        """Run without gradients or dropout; collective."""
        self._engine.eval()
        try:
            with torch.no_grad():
                out = self._engine(batch)
        finally:
            self._engine.train()
        if self._sharded:  # DeepSpeed has gathered weights ahead, for a backward pass that does not come
            self._engine.optimizer.empty_partition_cache()
        return out

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Return the model's whole tensors under Hugging Face names, tied ones once, adapters merged in.

        May be an iterator, which all ranks exhaust at ZeRO stage 3 and with divided experts; whole until the next.
        """
        whole = self._whole(published(self.model))
        return whole if self._sharded or self._has_experts or self._frozen else list(whole)

    def factors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters' whole tensors under PEFT names; as :meth:`tensors`."""
        named = [(name, tensor) for name, tensor in unique(self.model) if adapter.is_factor(name)]
        return self._whole([Published(adapter.file_name(name), tensor) for name, tensor in named])

    def _whole(self, parts: Iterable[Published]) -> Iterator[tuple[str, Tensor]]:
        for group in in_groups(parts):
            with self._gathered([tensor for part in group for tensor in part.needed]):
                for part in group:
                    yield part.name, part.merged() if part.update else experts.whole(part.tensor)

    def shapes(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Yield name, number type and shape of each of :meth:`tensors`, without gathering."""
        for part in published(self.model):
            yield part.name, part.tensor.dtype, experts.whole_shape(part.tensor)

    def take_part(self, *, factors: bool = False) -> None:
        """Help gather while rank 0 iterates :meth:`tensors` or :meth:`factors`."""
        if self._sharded or self._has_experts:
            for _ in self.factors() if factors else self.tensors():
                pass

    def _gathered(self, tensors: list[Tensor]) -> contextlib.AbstractContextManager[object]:
        if not self._sharded:
            return contextlib.nullcontext()
        import deepspeed

        gathered: contextlib.AbstractContextManager[object] = deepspeed.zero.GatheredParameters(
            [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
        )
        return gathered

    def save(self, folder: Path) -> Callable[[], Written]:
        """Copy model and optimizer state to the host's memory; collective. Return what writes it, for any thread.

        If the host has no memory for it, it is written here.
        """
        self.residency.follow()
        error, copies = self._check_room(folder)
        ranges = ranges_of(self._engine.optimizer) if self._trainer.zero_stage else None
        self._writer.begin(error, copies=copies, ranges=ranges)
        with experts.saved_by_rank(self._engine):
            self._engine.save_checkpoint(
                str(folder), tag=_TAG, save_latest=False, exclude_frozen_parameters=self._frozen
            )
        return self._writer.write

    def _check_room(self, folder: Path) -> tuple[str, bool]:
        """Return why the ranks that write to this rank's disk, at the same time, cannot, or "", and whether its host has memory for
        the copies of all its ranks; collective.
        """
        there, host = durable.existing(folder), socket.gethostname()
        disk, free_bytes = f"{host} {there.stat().st_dev}", durable.usable_bytes(there)
        storages, optimizer = Storages(), self._engine.optimizer
        masters = getattr(optimizer, "fp32_partitioned_groups_flat", [])  # at stage 3
        own_bytes = storages.add(tensors_in([_states(optimizer), optimizer.param_groups, masters]))
        if not dist.get_rank() and not self._sharded:  # at stage 3 the optimizer has the weights
            own_bytes += storages.add(part for part in self.policy.parameters() if part.requires_grad)
        of_ranks = self.gathered((host, disk, own_bytes, own_bytes - self._writer.kept_bytes))
        copied = sum(max(0, nbytes) for of, _, _, nbytes in of_ranks if of == host)
        copies = copied <= memory_timeline.host_bytes()[1] - _ASIDE_BYTES
        if not copies:
            log.warning("training waits for its checkpoint", extra={"reason": _no_memory(copied)})
        needed = sum(nbytes for _, of, nbytes, _ in of_ranks if of == disk)
        if self.ranks == 1 or needed <= free_bytes:
            return "", copies
        return f"{folder} needs {needed:,} bytes of all ranks, and {free_bytes:,} are free for them", copies

    def gathered(self, value: T) -> list[T]:
        """Return every rank's ``value``; collective."""
        if self.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=host_group())
        return values

    def load(self, folder: Path, *, of_others: bool = False) -> None:
        """Read what :meth:`save` wrote, perhaps ``of_others``: other ranks, or those of another ZeRO stage or
        division of experts; collective.

        Raises:
            SettingsError: a file holds code, or it cannot be read by these ranks.
        """
        self.residency.follow()
        self._forget_states()
        if of_others and not self._trainer.zero_stage:
            raise SettingsError(
                f"the checkpoint in {folder} is of another trainer.zero_stage, and 0 cannot continue it: set trainer.zero_stage to 1 or more"
            )
        try:
            loaded = pickles.loading(folder, lambda: self._load(folder, of_others=of_others))
        except WeightsError as error:
            raise SettingsError(f"{error}: put an intact copy in its place, or roll back to another version") from error
        except (RuntimeError, ValueError) as error:
            if not any(words in str(error) for words in _OTHER_GROUPS):
                raise
            raise SettingsError(
                f"the checkpoint in {folder} has the optimizer's states in other groups than this run: continue with the "
                "version of Penstock that wrote it, and with its trainer.weight_decay (0 or not), or start a run from its weights"
            ) from error
        if not loaded:
            raise RuntimeError(f"no DeepSpeed checkpoint in {folder}")
        set_options(self._engine.optimizer, self._trainer)
        _unmap(self._engine.optimizer)

    def _load(self, folder: Path, *, of_others: bool) -> bool:
        if of_others:
            load_ranges(self._engine.optimizer, folder)
            return True
        strict = not self._frozen
        with experts.saved_by_rank(self._engine):
            loaded, _ = self._engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=strict)
        if self._has_experts and not self._sharded:  # the model is rank 0's
            self._engine.optimizer.update_lp_params()
        return loaded is not None

    def _forget_states(self) -> None:
        """Free the optimizer's states, beside which the loaded ones would need as much memory again."""
        for parameter in self.policy.parameters():
            mapping = getattr(parameter, "_hp_mapping", None)  # has views of them
            (getattr(mapping, "optim_fragment", None) or {}).clear()
        _states(self._engine.optimizer).clear()


def _no_memory(nbytes: float) -> str:
    return (
        f"a copy of what it saves needs {nbytes / 2**30:.1f} GiB of the host's memory, which is not free: it is written at once; use a "
        "host with more memory, or raise trainer.checkpoint_every_steps"
    )


def _states(optimizer: Any) -> Any:
    """Return the states of the optimizer inside DeepSpeed's, if there is one."""
    return getattr(optimizer, "optimizer", optimizer).state


def _unmap(optimizer: Any) -> None:
    """Copy states that still are maps of a checkpoint's file, whose space is free only without them."""
    for states in _states(optimizer).values():
        for name, value in states.items():
            if torch.is_tensor(value) and value.device.type == "cpu":
                states[name] = value.clone()


def saved_tensors(folder: Path, zero_stage: int, expert_parallel: int = 1) -> dict[str, Tensor]:
    """Return a checkpoint's whole tensors, on the CPU, by ``Policy``'s parameter names without its prefix.

    Raises:
        WeightsError: a file holds code.
        SettingsError: with divided experts, a file does not say what it holds.
    """
    import_deepspeed("cpu")
    tensors = pickles.loading(folder, lambda: whole_weights.read(folder / _TAG, zero_stage, expert_parallel))
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _gather_with_parents(policy: nn.Module) -> None:
    """Gather with a recurrent layer the weights that it reads from submodules without calling them."""
    import deepspeed

    for layer in policy.modules():
        for name, inner in layer.named_children():
            if isinstance(inner, nn.Conv1d) or name in _READ_FROM_OUTSIDE:
                for parameter in inner.parameters():
                    deepspeed.zero.register_external_parameter(layer, parameter)


def _meet_before_gathering(optimizer: Any) -> None:
    """Let ranks meet once all have written a checkpoint, after which DeepSpeed gathers small weights again."""
    gather = optimizer.checkpoint_event_epilogue

    def meet_and_gather() -> None:
        meet_at_storage()
        gather()

    optimizer.checkpoint_event_epilogue = meet_and_gather


def _check_the_norm_alone(optimizer: Any) -> None:
    """Skip DeepSpeed's finiteness check of each gradient (seven kernels each); the norm suffices."""
    optimizer.check_overflow = lambda **_: None


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def import_deepspeed(device: str) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    with importing():
        import deepspeed
        from deepspeed import ops

    if device == "cpu":
        # would be compiled at run time
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    pickles.restrict_loading()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def _config(settings: Settings, ranks: int, bucket: int, *, keeps_all: bool) -> dict[str, Any]:
    trainer = settings.trainer
    zero: dict[str, Any] = {"stage": trainer.zero_stage}
    # DeepSpeed's own linear layer frees whole weights until the backward pass; checkpointing does so anyway, and
    # would compute each layer's last product again.
    own: dict[str, Any] = {"memory_efficient_linear": keeps_all, "leaf_module": {"classes": []}}  # see ``whole_layers``
    own["reduce_bucket_size"] = bucket
    pinned = {"device": "cpu", "pin_memory": pick_device(settings.run.device) == "cuda"}
    if trainer.offload != "none":
        zero["offload_optimizer"] = pinned
    if trainer.offload == "all":
        zero["offload_param"] = pinned
    # a flat copy of all gradients at the end of the backward pass, which only reducing them over ranks needs
    flat = {"contiguous_gradients": False} if trainer.zero_stage == 1 and ranks == 1 else {}
    return {
        **trainer.deepspeed,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # boundaries are set by hand
        "gradient_clipping": trainer.max_grad_norm,
        "bf16": {"enabled": settings.policy.dtype == "bfloat16"},
        "zero_optimization": {**own, **flat, **trainer.deepspeed.get("zero_optimization", {}), **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own is compiled at run time
        "steps_per_print": 2**31 - 1,
    }
