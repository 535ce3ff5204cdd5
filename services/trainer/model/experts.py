"""Expert parallelism: each rank keeps E/N experts of every mixture layer, and tokens travel to them.

::

    router of transformers ─▶ expert ids, weights ─▶ sort by expert ─▶ all-to-all ─▶ experts of transformers, this rank's
                                                                                            │
    hidden states ◀─ weighted sum of a token's K experts ◀─ all-to-all ◀────────────────────┘

N ranks in a row share one copy (DeepSpeed's ``ep_size_N`` groups); ranks with the same experts add their gradients.
Routers, shared experts and all else are transformers' and on every rank. Names stay; a divided weight is the slice
[E/N, …] of the checkpoint's [E, …]. All ranks call each layer equally often (Lepikhin et al. 2021, arXiv:2006.16668).

Shapes: ``T`` tokens of this rank, ``K`` experts per token, ``D`` hidden size, ``R`` rows that this rank's experts
receive, ``E`` experts, ``N`` ranks of a group.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.services.trainer.model.layers.ulysses import exchange
from penstock.shared.errors import SettingsError
from penstock.shared.model.routes import mixtures_of
from penstock.shared.settings.trainer import PROVEN as PROVEN


class _Divided(nn.Module):
    """Mixed into a layer's experts by :func:`divide`."""

    config: Any
    num_experts: int
    whole_experts: int
    tokens_E: Tensor
    """Assignments by expert, of this rank's tokens, since the last :func:`take_imbalance`."""
    is_gathered = _is_inside = False

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Called by DeepSpeed; the groups exist already."""

    def forward(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, *gathers: bool) -> Tensor:
        out_TD: Tensor
        if self._is_inside:
            out_TD = super().forward(hidden_TD, index_TK, weights_TK)
        elif gathers:
            out_TD = self._gathered(hidden_TD, index_TK, weights_TK)
        elif self.is_gathered:  # what a backward pass needs is gathered again, by a call of this module with its hooks
            out_TD = checkpoint(self, hidden_TD, index_TK, weights_TK, True, use_reentrant=False)
        else:
            out_TD = self._exchanged(hidden_TD, index_TK, weights_TK)
        return out_TD

    def _exchanged(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        group, flat = _group(self), index_TK.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts_E = torch.bincount(flat, minlength=self.whole_experts)
        self.tokens_E += counts_E
        arriving_E = torch.empty_like(counts_E)  # by source, then by this rank's expert
        dist.all_to_all_single(arriving_E, counts_E, group=group)
        sent, received = (each.view(-1, self.num_experts).sum(1).tolist() for each in (counts_E, arriving_E))
        rows_RD = exchange(hidden_TD[order // index_TK.shape[1]], group, received, sent)
        own = torch.arange(self.num_experts, device=flat.device).repeat(len(sent))
        computed_RD = self._computed(rows_RD, own.repeat_interleave(arriving_E))
        sorted_SD = exchange(computed_RD, group, sent, received)
        place_S = torch.empty_like(order)
        place_S[order] = torch.arange(len(order), device=flat.device)
        # weights and sums as in transformers' grouped experts
        weighted_SD = sorted_SD[place_S] * weights_TK.reshape(-1, 1)
        out_TD: Tensor = weighted_SD.view(*index_TK.shape, -1).sum(1).to(hidden_TD.dtype)
        return out_TD

    def _computed(self, rows_RD: Tensor, expert_R: Tensor) -> Tensor:
        """Return this rank's experts' results; without rows, a pass of one of zeros reaches the weights."""
        if not (count := len(rows_RD)):
            rows_RD = torch.cat([rows_RD, rows_RD.new_zeros(1, rows_RD.shape[1])])
            expert_R = expert_R.new_zeros(1)
        with self._inside(self.num_experts):
            out_RD: Tensor = self(rows_RD, expert_R[:, None], rows_RD.new_ones(len(rows_RD), 1))
        return out_RD[:count]

    def _gathered(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        whole = {name: _Gather.apply(weight, _group(self)) for name, weight in self.named_parameters()}  # type: ignore[no-untyped-call]
        with self._inside(self.whole_experts):
            out_TD: Tensor = torch.func.functional_call(self, whole, (hidden_TD, index_TK, weights_TK))
        return out_TD

    @contextlib.contextmanager
    def _inside(self, experts: int) -> Iterator[None]:
        own, self.num_experts, self._is_inside = self.num_experts, experts, True
        try:
            yield
        finally:
            self.num_experts, self._is_inside = own, False


class _Gather(torch.autograd.Function):
    """All experts of a weight; their gradients are added over the ranks."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.experts = group, len(weight)
        return _all(weight, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        whole = gradients[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)
        first = dist.get_rank(ctx.group) * ctx.experts
        return whole[first : first + ctx.experts], None


def divide(model: Any, ranks: int, zero_stage: int) -> None:
    """Keep this rank's experts of ``model``, among ``ranks`` ranks; idempotent, collective.

    At ZeRO stage 3 each weight of them is then divided among the ranks that have the same experts.

    Raises:
        SettingsError: the model has no experts that are known to be divisible by ``ranks``.
    """
    if ranks == 1 or layers_of(model):
        return
    mixtures = list(mixtures_of(model).values())
    if reason := _refusal(model, mixtures, ranks):
        raise SettingsError(f"{reason}: set trainer.expert_parallel to 1")
    if any(getattr(module, "base_layer", None) in mixtures for module in model.modules()):
        raise SettingsError(
            f"expected no adapters of experts with trainer.expert_parallel = {ranks}, found some: set it to 1, or name other layers in "
            'policy.lora.target_modules, such as ["q_proj", "v_proj"]'
        )
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.init_distributed(dist_init_required=False)
    groups._create_expert_and_data_parallel(ranks)
    made: Any = _divided
    for module in mixtures:
        name, whole = f"ep_size_{ranks}", module.num_experts
        is_trained = any(weight.requires_grad for weight in module.parameters())
        module.__class__ = made(type(module), known=is_trained and zero_stage < 3)
        module.whole_experts, module.num_experts = whole, whole // ranks
        for weight in module.parameters():
            weight.allreduce, weight.group_name = False, name  # DeepSpeed's marks
            if zero_stage == 3:
                weight.ds_zero_placement_family, weight.ds_zero_partition_group_name = "autoep_expert", name
                weight.ds_zero_partition_process_group = group_of(weight, same=True)
            place = dist.get_rank(group_of(weight)) * module.num_experts
            weight.data = weight.data[place : place + module.num_experts].clone()
        module.register_buffer("tokens_E", torch.zeros(whole, dtype=torch.int64), persistent=False)


def check_division(model: nn.Module) -> None:
    """Raise SettingsError if this DeepSpeed divided weights of experts among ranks that have others (stage 3)."""
    for weight in model.parameters():
        own = getattr(weight, "ds_zero_partition_process_group", None)
        if own is not None and getattr(weight, "ds_process_group", None) is not own:
            raise SettingsError(
                "expected a DeepSpeed that divides a weight among ranks of its own with trainer.expert_parallel and trainer.zero_stage = 3, "
                "which 0.19.8 does, found an older one: update deepspeed, or lower trainer.zero_stage"
            )


def _refusal(model: Any, mixtures: list[Any], ranks: int) -> str:
    family = str(model.config.model_type)
    if not mixtures:
        return f"expected a mixture of experts with trainer.expert_parallel = {ranks}, found {family!r}"
    if family not in PROVEN:
        return f"trainer.expert_parallel = {ranks} is not tested with {family!r}, but with {', '.join(sorted(PROVEN))}"
    for module in mixtures:
        sizes = {len(weight) for weight in module.parameters()}
        if sizes != {module.num_experts} or module.num_experts % ranks:
            return f"expected experts that trainer.expert_parallel = {ranks} divides, found {module.num_experts}"
    return ""


@functools.cache
def _divided(experts: type[nn.Module], *, known: bool) -> type[nn.Module]:
    """Return ``experts``' class with :class:`_Divided`, ``known`` to DeepSpeed as a mixture: it expects their weights in the
    optimizer then, and refuses them at stage 3, where the weights' marks suffice.
    """
    from deepspeed.moe.layer import MoE

    return type(f"Divided{experts.__name__}", (_Divided, experts, MoE) if known else (_Divided, experts), {})


def layers_of(model: nn.Module) -> list[Any]:
    """Return the experts of the layers that are divided."""
    return [module for module in model.modules() if isinstance(module, _Divided)]


def group_of(weight: Tensor, *, same: bool = False) -> Any:
    """Return the group of ranks that share the experts of ``weight``, or that have the ``same`` ones; None: it is not divided."""
    if getattr(weight, "allreduce", True):
        return None
    from deepspeed.utils import groups

    of = groups._get_expert_data_parallel_group if same else groups._get_expert_parallel_group
    return of(group_name(weight))


def group_name(weight: Tensor) -> str:
    """Return DeepSpeed's name of :func:`group_of`."""
    return str(weight.group_name)  # type: ignore[attr-defined]


def _group(module: nn.Module) -> Any:
    return group_of(next(module.parameters()))


def whole(weight: Tensor) -> Tensor:
    """Return a weight with all experts; collective if it is divided."""
    group = group_of(weight)
    return weight.detach() if group is None else _all(weight.detach(), group)


def whole_shape(weight: Tensor) -> tuple[int, ...]:
    """Return the shape of a weight with all experts, also of one that ZeRO stage 3 divides."""
    group, shape = group_of(weight), tuple(getattr(weight, "ds_shape", weight.shape))
    return shape if group is None else (shape[0] * dist.get_world_size(group), *shape[1:])


def first_number(weight: Tensor) -> int:
    """Return the place in the flat weight with all experts at which this rank's begin."""
    group = group_of(weight)
    return 0 if group is None else dist.get_rank(group) * int(getattr(weight, "ds_numel", weight.numel()))


def _all(part: Tensor, group: Any) -> Tensor:
    gathered = part.new_empty(dist.get_world_size(group) * len(part), *part.shape[1:])
    dist.all_gather_into_tensor(gathered, part.contiguous(), group=group)
    return gathered


@contextlib.contextmanager
def undivided(model: nn.Module) -> Iterator[None]:
    """Compute as transformers does within the block, with each layer's experts gathered for its call; collective."""
    layers = layers_of(model)
    try:
        for layer in layers:
            layer.is_gathered = True
        yield
    finally:
        for layer in layers:
            layer.is_gathered = False


def take_imbalance(model: nn.Module) -> dict[str, float]:
    """Return the mean over layers of the busiest expert's tokens by the mean, since the last call; collective."""
    if not (layers := layers_of(model)):
        return {}
    tokens_LE = torch.stack([layer.tokens_E for layer in layers]).double()
    dist.all_reduce(tokens_LE)
    for layer in layers:
        layer.tokens_E.zero_()
    busiest_L, mean_L = tokens_LE.max(1).values, tokens_LE.mean(1)
    return {"expert_imbalance": float((busiest_L / mean_L).mean())}


@contextlib.contextmanager
def saved_by_rank(engine: Any) -> Iterator[None]:
    """Let DeepSpeed save and load as without mixtures: rank 0's model, and each rank's optimizer, which has the experts."""
    has, engine.has_moe_layers = engine.has_moe_layers, False
    try:
        yield
    finally:
        engine.has_moe_layers = has
