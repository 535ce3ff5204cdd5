"""Experts of transformers' mixtures, computed by groups, and expert parallelism: each rank keeps E/N experts of every mixture
layer, and tokens travel to them.

::

    router of transformers ─▶ expert ids, weights ─▶ all-to-all: a token once to each rank ─▶ this rank's experts
                                                                                                    │
    hidden states ◀─ sum over ranks ◀─ all-to-all ◀─ weighted sum of a token's experts here ◀───────┘

N ranks in a row share one copy (DeepSpeed's ``ep_size_N`` groups); ranks with the same experts add their gradients.
Routers, shared experts and all else are transformers' and on every rank. Names stay; a divided weight is the slice
[E/N, …] of the checkpoint's [E, …]. All ranks call each layer equally often (Lepikhin et al. 2021, arXiv:2006.16668).

Shapes: ``T`` tokens of this rank, ``K`` experts per token, ``D`` hidden size, ``R`` tokens that this rank's experts
receive, ``E`` experts, ``N`` ranks of a group, ``C`` 2K: weights and ids.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.services.trainer.model.layers.gather import Copies, copies_there, gather_rows, sum_rows
from penstock.services.trainer.model.layers.ulysses import exchange
from penstock.services.trainer.model.routing import expert_groups
from penstock.shared.errors import SettingsError
from penstock.shared.model.routes import mixtures_of
from penstock.shared.settings.trainer import PROVEN as PROVEN


class _Grouped(nn.Module):
    """Mixed into a layer's experts by :func:`install`."""

    num_experts: int
    is_reference = False
    """Compute as transformers does."""

    def forward(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if self.is_reference:
            out_TD: Tensor = super().forward(hidden_TD, index_TK, weights_TK)
            return out_TD
        groups = expert_groups.groups_of(index_TK, self.num_experts, index_TK.numel())
        return expert_groups.compute(self, hidden_TD, weights_TK, groups)


class _Divided(_Grouped):
    """Each rank has some of the experts."""

    whole_experts: int
    _is_whole = False
    tokens_E: Tensor
    """Assignments by expert, of those that came to this rank, since the last :func:`take_imbalance`."""

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Called by DeepSpeed; the groups exist already."""

    def forward(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, *gathers: bool) -> Tensor:
        if not self.is_reference:
            return self._exchanged(hidden_TD, index_TK, weights_TK)
        if self._is_whole:
            return super().forward(hidden_TD, index_TK, weights_TK)
        if gathers:
            return self._gathered(hidden_TD, index_TK, weights_TK)
        # what a backward pass needs is gathered again, by a call of this module with its hooks
        out_TD: Tensor = checkpoint(self, hidden_TD, index_TK, weights_TK, True, use_reentrant=False)
        return out_TD

    def _exchanged(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        group, top_k = _group(self), index_TK.shape[1]
        first = dist.get_rank(group) * self.num_experts
        sent, received, choices, tokens = self._ways(index_TK, group)
        # ids are exact in float32; one exchange brings them and the weights
        wide = torch.promote_types(weights_TK.dtype, torch.float32)
        choices_TC = torch.cat([weights_TK.to(wide), index_TK.to(wide)], 1)
        choices_RC = exchange(gather_rows(choices_TC, tokens), group, received, sent)
        rows_RD = exchange(gather_rows(hidden_TD, tokens), group, received, sent)
        own_RK = choices_RC.detach()[:, top_k:].long() - first
        own_RK = torch.where((own_RK >= 0) & (own_RK < self.num_experts), own_RK, self.num_experts)
        groups = expert_groups.groups_of(own_RK, self.num_experts, choices)
        self.tokens_E[first : first + self.num_experts] += groups.experts.ends.diff()
        weights_RK = choices_RC[:, :top_k].to(weights_TK.dtype)
        out_RD = expert_groups.compute(self, rows_RD, weights_RK, groups)
        return sum_rows(exchange(out_RD, group, sent, received), tokens)

    def _ways(self, index_TK: Tensor, group: Any) -> tuple[list[int], list[int], int, Copies]:
        """Return how many tokens go to each rank and come from it, the choices of experts here, and the tokens that go by rank."""
        ranks = torch.arange(dist.get_world_size(group), device=index_TK.device)
        choices_TN = (index_TK[..., None] // self.num_experts == ranks).sum(1)
        going_N2 = torch.stack([(choices_TN > 0).sum(0), choices_TN.sum(0)], 1)
        coming_N2 = torch.empty_like(going_N2)
        dist.all_to_all_single(coming_N2, going_N2, group=group)
        sent, received, choices = torch.stack([going_N2[:, 0], *coming_N2.T]).tolist()
        by_rank = torch.argsort((choices_TN.T == 0).flatten().byte(), stable=True)[: sum(sent)]
        return sent, received, sum(choices), copies_there(by_rank % len(index_TK), len(index_TK))

    def _gathered(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        whole = {name: _Gather.apply(weight, _group(self)) for name, weight in self.named_parameters()}  # type: ignore[no-untyped-call]
        own, self.num_experts, self._is_whole = self.num_experts, self.whole_experts, True
        try:
            out_TD: Tensor = torch.func.functional_call(self, whole, (hidden_TD, index_TK, weights_TK))
        finally:
            self.num_experts, self._is_whole = own, False
        return out_TD


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


def install(model: Any, ranks: int, zero_stage: int) -> None:
    """Compute the experts of ``model`` by groups, and keep this rank's of them, among ``ranks`` ranks; idempotent, collective.

    With one rank those of families that are not in :data:`PROVEN`, or of a folder's own code, stay as they are. At ZeRO
    stage 3 each weight of them is then divided among the ranks that have the same experts.

    Raises:
        SettingsError: the model has no experts that are known to be divisible by ``ranks``.
    """
    mixtures = list(mixtures_of(model).values())
    if any(isinstance(module, _Grouped) for module in mixtures):
        return
    made: Any = _class
    if ranks == 1:
        for module in mixtures if _are_proven(model, mixtures) else ():
            module.__class__ = made(_Grouped, type(module))
        return
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
    for module in mixtures:
        name, whole = f"ep_size_{ranks}", module.num_experts
        is_trained = any(weight.requires_grad for weight in module.parameters())
        module.__class__ = made(_Divided, type(module), known=is_trained and zero_stage < 3)
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


def _are_proven(model: Any, mixtures: list[Any]) -> bool:
    own = any(not type(module).__module__.startswith("transformers.models.") for module in mixtures)
    return model.config.model_type in PROVEN and not own


def _refusal(model: Any, mixtures: list[Any], ranks: int) -> str:
    family = str(model.config.model_type)
    if not mixtures:
        return f"expected a mixture of experts with trainer.expert_parallel = {ranks}, found {family!r}"
    if not _are_proven(model, mixtures):
        code = f"a folder's own code of {family!r}" if family in PROVEN else repr(family)
        return f"trainer.expert_parallel = {ranks} is not tested with {code}, but with {', '.join(sorted(PROVEN))}"
    for module in mixtures:
        sizes = {len(weight) for weight in module.parameters()}
        if sizes != {module.num_experts} or module.num_experts % ranks:
            return f"expected experts that trainer.expert_parallel = {ranks} divides, found {module.num_experts}"
    return ""


@functools.cache
def _class(of: type[nn.Module], experts: type[nn.Module], *, known: bool = False) -> type[nn.Module]:
    """Return ``experts``' class with ``of``, ``known`` to DeepSpeed as a mixture: it expects their weights in the optimizer then,
    and refuses them at stage 3, where the weights' marks suffice.
    """
    more: tuple[Any, ...] = ()
    if known:
        from deepspeed.moe.layer import MoE

        more = (MoE,)
    return type(f"{of.__name__[1:]}{experts.__name__}", (of, experts, *more), {})


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
def unmodified(model: nn.Module) -> Iterator[None]:
    """Compute as transformers does within the block, with the divided experts of each layer gathered for its call; collective."""
    layers = [module for module in model.modules() if isinstance(module, _Grouped)]
    try:
        for layer in layers:
            layer.is_reference = True
        yield
    finally:
        for layer in layers:
            layer.is_reference = False


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
