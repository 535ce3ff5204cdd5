"""Copy plans: traces prove or refuse, and a replay equals loading."""

from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.services.rollout.engines.vllm.swap.byte_coverage import (
    TouchedTwice,
    first_missing,
    intervals,
    merged,
    union,
)
from penstock.services.rollout.engines.vllm.swap.copies import CopyPlan
from penstock.services.rollout.engines.vllm.swap.copy_plan import (
    CopyPlanRefused,
    LoaderRefused,
    Writes,
    first_cut,
    sources_of,
    trace,
)

Pairs = Iterable[tuple[str, Tensor]]


class Fused(nn.Module):
    """Fused rows, a tensor-parallel column shard, a padded and tied vocabulary."""

    def __init__(self, rank: int = 0, ranks: int = 1, width: int = 8, vocabulary: int = 5, padded: int = 8) -> None:
        super().__init__()
        self.rank, self.ranks, self.width, self.vocabulary = rank, ranks, width, vocabulary
        self.rows = width // ranks
        self.qkv = nn.Parameter(torch.full((3 * self.rows, width), 9.0), requires_grad=False)
        self.out = nn.Parameter(torch.full((width, self.rows), 9.0), requires_grad=False)
        self.embedding = nn.Parameter(torch.full((padded, width), 9.0), requires_grad=False)
        self.head = self.embedding
        self.norm = nn.Parameter(torch.full((width,), 9.0), requires_grad=False)

    def load_weights(self, weights: Pairs) -> None:
        for name, tensor in weights:
            if name in "qkv":
                shard = tensor.narrow(0, self.rank * self.rows, self.rows)
                self.qkv.data.narrow(0, "qkv".index(name) * self.rows, self.rows).copy_(shard)
            elif name == "out":
                self.out.data.copy_(tensor.chunk(self.ranks, dim=1)[self.rank])
            elif name == "embedding":
                self.embedding[: self.vocabulary].data.copy_(tensor)
                self.embedding[self.vocabulary :].data.fill_(0)
            elif name == "norm":
                self.norm.data.copy_(tensor.reshape(-1))

    def parameters_by_name(self) -> dict[str, Tensor]:
        return dict(self.named_parameters(remove_duplicate=False))


def shadow(layer: Fused, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], dict[str, Tensor]]:
    width = layer.width
    shapes = {
        "q": (width, width),
        "k": (width, width),
        "v": (width, width),
        "out": (width, width),
        "embedding": (layer.vocabulary, width),
        "norm": (1, width),
    }
    buckets = [torch.zeros(4 * width * width * dtype.itemsize, dtype=torch.uint8) for _ in range(2)]
    tensors, place = {}, [0, 0]
    for name, shape in shapes.items():
        bucket = 0 if name in "qkv" else 1
        size = torch.Size(shape).numel() * dtype.itemsize
        tensors[name] = buckets[bucket][place[bucket] : place[bucket] + size].view(dtype).view(shape)
        place[bucket] += size
    return buckets, tensors


def randomize(tensors: dict[str, Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))


def loaded(like: Fused, tensors: dict[str, Tensor]) -> Fused:
    fresh = Fused(like.rank, like.ranks, like.width, like.vocabulary, len(like.embedding))
    fresh.load_weights(tensors.items())
    return fresh


def same(layer: Fused, other: Fused) -> bool:
    others = other.parameters_by_name()
    return all(torch.equal(tensor, others[name]) for name, tensor in layer.parameters_by_name().items())


def plan_of(layer: Fused, tensors: dict[str, Tensor]) -> CopyPlan:
    return trace(layer.load_weights, tensors, layer.parameters_by_name())


@settings(max_examples=40)
@given(
    ranks=st.sampled_from([1, 2, 4]),
    width=st.sampled_from([4, 8, 12]),
    vocabulary=st.integers(1, 9),
    padding=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_replaying_a_plan_is_loading(
    ranks: int, width: int, vocabulary: int, padding: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    layer = Fused(data.draw(st.integers(0, ranks - 1)), ranks, width, min(vocabulary, 4 * width), vocabulary + padding)
    _, tensors = shadow(layer, dtype)
    plan = plan_of(layer, tensors)
    for seed in (1, 2):
        randomize(tensors, seed)
        plan.replay()
        assert same(layer, loaded(layer, tensors))
        assert plan.differences() == 0


def test_tracing_changes_nothing() -> None:
    layer = Fused()
    _, tensors = shadow(layer)
    randomize(tensors, 1)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    plan_of(layer, tensors)
    assert all((parameter == 9.0).all() for parameter in layer.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    assert not any(hasattr(tensor, "shard_id") for tensor in tensors.values())


def test_a_bucket_is_replayed_from_a_reused_buffer() -> None:
    layer = Fused(rank=1, ranks=2)
    buckets, tensors = shadow(layer)
    _, places = shadow(layer)
    plan = plan_of(layer, places)
    randomize(tensors, 3)
    buffer = torch.empty(16 + len(buckets[0]), dtype=torch.uint8)[16:]
    copied = 0
    for part, bucket in enumerate(buckets):
        buffer.copy_(bucket)
        copied += plan.replay_part(part, buffer)
    plan.replay_fills()
    assert same(layer, loaded(layer, tensors))
    assert plan.differences() > 0, "the places that it was traced with hold zeros"
    assert copied == plan.nbytes
    assert plan.parts == 2


def test_a_plan_may_be_traced_without_a_shadow() -> None:
    layer = Fused()
    buckets, tensors = shadow(layer)
    meta = [bucket.to("meta") for bucket in buckets]
    places = {
        name: meta[0 if name in "qkv" else 1][tensor.storage_offset() * 4 :][: tensor.nbytes]
        .view(torch.float32)
        .view(tensor.shape)
        for name, tensor in tensors.items()
    }
    plan = plan_of(layer, places)
    randomize(tensors, 4)
    for part, bucket in enumerate(buckets):
        plan.replay_part(part, bucket)
    plan.replay_fills()
    assert same(layer, loaded(layer, tensors))


def test_neighbours_on_both_sides_are_one_copy() -> None:
    layer = Fused()
    _, tensors = shadow(layer)
    plan = plan_of(layer, tensors)
    assert [copy.source.nbytes for copy in plan.copies_of(0)] == [3 * 8 * 8 * 4]
    assert plan.nbytes == (3 * 64 + 64 + 5 * 8 + 8) * 4
    assert len(plan.fills) == 1


def test_a_cast_between_floating_point_types_is_a_copy() -> None:
    layer = Fused()
    _, tensors = shadow(layer, torch.bfloat16)
    plan = plan_of(layer, tensors)
    randomize(tensors, 5)
    plan.replay()
    assert same(layer, loaded(layer, tensors))


def test_experts_that_are_cut_from_a_stacked_tensor_are_copies_of_it() -> None:
    """As transformers cuts them: halves made contiguous, then one expert each; one rank of two takes half of its rows."""
    fused, down = torch.full((3, 4, 5), 9.0), torch.full((3, 5, 2), 9.0)
    tensors = {"gate_up": torch.randn(3, 8, 5), "down": torch.randn(3, 5, 4)}

    def load(pairs: Pairs) -> None:
        (_, gate_up), (_, whole) = pairs
        for half, values in enumerate(gate_up.chunk(2, dim=1)):
            for expert, rows in enumerate(values.contiguous().chunk(3, dim=0)):
                fused[expert, 2 * half : 2 * half + 2].copy_(rows.squeeze().narrow(0, 2, 2))
        down.copy_(whole.narrow(2, 2, 2).contiguous())

    plan = trace(load, tensors, {"fused": fused, "down": down})
    assert bool((fused == 9.0).all())
    plan.replay()
    gate, up = tensors["gate_up"].chunk(2, dim=1)
    assert torch.equal(fused, torch.cat([gate[:, 2:], up[:, 2:]], dim=1))
    assert torch.equal(down, tensors["down"][:, :, 2:])
    assert plan.nbytes == fused.nbytes + down.nbytes


def test_a_copy_whose_own_order_a_loader_needs_is_refused() -> None:
    weight = torch.zeros(12)

    def load(pairs: Pairs) -> None:
        for _, tensor in pairs:
            weight.copy_(tensor.t().contiguous().view(12))

    assert "refused the tensors" in reason(load, {"weight": weight}, a=torch.randn(3, 4))


def reason(load: Callable[[Pairs], object], parameters: dict[str, Tensor], **tensors: Tensor) -> str:
    with pytest.raises(CopyPlanRefused) as refused:
        trace(load, tensors, parameters)
    return str(refused.value)


def test_bytes_that_no_tensor_covers_are_named() -> None:
    weight = torch.zeros(4, 2)

    def load(pairs: Pairs) -> None:
        for _, tensor in pairs:
            weight[:3].copy_(tensor)

    assert reason(load, {"layer.weight": weight}, a=torch.ones(3, 2)) == (
        "the tensors do not cover layer.weight, from its byte 24 on"
    )


def test_a_parameter_without_a_tensor_is_named() -> None:
    layer = Fused()
    _, tensors = shadow(layer)
    del tensors["norm"]
    with pytest.raises(CopyPlanRefused, match="do not cover norm, from its byte 0 on"):
        plan_of(layer, tensors)


def test_bytes_that_are_written_twice_are_refused() -> None:
    weight = torch.zeros(4)

    def load(pairs: Pairs) -> None:
        for _, tensor in pairs:
            weight.copy_(tensor)

    assert "writes weight twice" in reason(load, {"weight": weight}, a=torch.ones(4), b=torch.ones(4))


COMPUTED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "computed from a tensor": lambda weight, tensor: weight.copy_(torch.cat([tensor[:2], tensor[2:]])),
    "what it computed": lambda weight, tensor: weight.copy_(-tensor),
    "it computed from": lambda weight, tensor: weight.copy_(torch.zeros(4).copy_(tensor)),
    "not come from the tensors": lambda weight, tensor: weight.copy_(torch.ones(4)),
    "aten.add_": lambda weight, tensor: weight.add_(tensor),
    "aten.index_copy_": lambda weight, tensor: weight.index_copy_(0, torch.arange(4), tensor),
    "decides by the values": lambda weight, tensor: weight.copy_(tensor) if tensor.sum() > 0 else None,
    "by the values of a tensor": lambda weight, tensor: weight.fill_(tensor[0].item()),
    "writes into the shadow": lambda weight, tensor: tensor.mul_(2),
    "or into a copy of it": lambda weight, tensor: weight.copy_(tensor.clone().mul_(2)),
    "turns torch.float32 into torch.int32": lambda weight, tensor: weight.view(torch.int32).copy_(tensor),
}


@pytest.mark.parametrize("expected", list(COMPUTED))
def test_what_is_no_plain_copy_is_refused(expected: str) -> None:
    weight = torch.full((4,), 9.0)

    def load(pairs: Pairs) -> None:
        for _, tensor in pairs:
            COMPUTED[expected](weight, tensor)

    shadowed = torch.ones(4)
    assert expected in reason(load, {"weight": weight}, a=shadowed)
    assert weight.tolist() == [9.0] * 4
    assert shadowed.tolist() == [1.0] * 4


def test_a_refusal_that_the_loader_swallows_is_a_refusal() -> None:
    weight = torch.zeros(4)

    def load(pairs: Pairs) -> None:
        for _, tensor in pairs:
            try:
                weight.add_(tensor)
            except CopyPlanRefused:
                weight.copy_(tensor)

    assert "aten.add_" in reason(load, {"weight": weight}, a=torch.ones(4))


def test_a_loader_that_replaces_a_parameter_is_undone_and_refused() -> None:
    weight = nn.Parameter(torch.zeros(4), requires_grad=False)

    def load(pairs: Pairs) -> None:
        for _, tensor in pairs:
            weight.data = tensor

    assert "replaces the parameter weight" in reason(load, {"weight": weight}, a=torch.ones(4))
    assert weight.tolist() == [0.0] * 4


def test_an_empty_parameter_was_repacked() -> None:
    assert "the parameter weight is empty" in reason(lambda pairs: None, {"weight": torch.empty(0)}, a=torch.ones(4))


def test_a_loader_that_raises_is_told_apart() -> None:
    def load(pairs: Pairs) -> None:
        raise ValueError("no such name")

    with pytest.raises(LoaderRefused, match="no such name"):
        trace(load, {"a": torch.ones(4)}, {"weight": torch.zeros(4)})


def test_a_buffer_is_loaded_as_a_whole_or_not_at_all() -> None:
    weight, buffer, other = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    tensors = {"a": torch.arange(4.0), "b": torch.arange(4.0)}

    def load(pairs: Pairs) -> None:
        for target, (_, tensor) in zip((weight, buffer), pairs, strict=True):
            target.copy_(tensor)

    def load_half(pairs: Pairs) -> None:
        (_, first), (_, second) = pairs
        weight.copy_(first)
        buffer[:2].copy_(second[:2])

    plan = trace(load, tensors, {"weight": weight}, {"buffer": buffer, "other": other})
    plan.replay()
    assert buffer.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert other.tolist() == [0.0] * 4
    with pytest.raises(CopyPlanRefused, match="do not cover buffer, from its byte 8 on"):
        trace(load_half, tensors, {"weight": weight}, {"buffer": buffer})
    assert "neither parameter nor buffer" in reason(load, {"weight": weight}, **tensors)


def test_a_strided_parameter_is_covered_by_its_own_bytes() -> None:
    storage = torch.full((4, 6), 9.0)
    left, right = storage[:, :2], storage[:, 2:]

    def load(pairs: Pairs) -> None:
        for target, (_, tensor) in zip((left, right), pairs, strict=True):
            target.copy_(tensor)

    tensors = {"a": torch.randn(4, 2), "b": torch.randn(4, 4)}
    trace(load, tensors, {"left": left, "right": right}).replay()
    assert torch.equal(storage, torch.cat([tensors["a"], tensors["b"]], dim=1))


def test_the_runs_of_a_view_are_its_bytes() -> None:
    assert intervals(100, (3, 4), (10, 1), 2).tolist() == [[100, 108], [120, 128], [140, 148]]
    assert intervals(0, (3, 4), (4, 1), 2).tolist() == [[0, 24]]
    assert intervals(0, (4, 3), (1, 4), 2).tolist() == [[0, 24]]
    assert intervals(8, (0, 4), (4, 1), 2).tolist() == []


def test_a_union_holds_each_byte_once() -> None:
    held = union([intervals(0, (2, 1), (4, 1), 2), intervals(2, (3,), (1,), 2)])
    assert held.tolist() == [[0, 10]]
    assert first_missing(held, intervals(4, (3,), (1,), 2)) is None
    assert first_missing(held, intervals(4, (4,), (1,), 2)) == 10
    with pytest.raises(TouchedTwice) as twice:
        union([held, intervals(9, (1,), (1,), 1)])
    assert twice.value.byte == 9


def test_an_expanded_view_touches_its_bytes_twice() -> None:
    with pytest.raises(TouchedTwice):
        union([intervals(0, (3, 2), (0, 1), 4)])


def test_intervals_that_overlap_are_merged() -> None:
    parts = [intervals(offset, (size,), (1,), 1) for offset, size in ((10, 4), (0, 8), (2, 3), (8, 2), (20, 1))]
    assert merged(parts).tolist() == [[0, 14], [20, 21]]
    assert merged([]).tolist() == []


def test_a_tensor_that_a_loader_cuts_is_named() -> None:
    def load(pairs: Pairs) -> None:
        named = dict(pairs)
        weight[:2].copy_(named["wide"].narrow(0, 0, 2))
        weight[2:].copy_(named["whole"][:1].expand(2, 3))

    tensors = {"unread": torch.ones(1), "whole": torch.ones(1, 3), "wide": torch.ones(4, 3)}
    weight = torch.empty(4, 3)
    plan = trace(load, tensors, {"weight": weight})
    assert first_cut((copy.source for copy in plan.copies), sources_of(tensors)) == "wide"
    with Writes([weight], tensors.values()) as writes:
        load(iter(tensors.items()))
    assert writes.cut(tensors) == "wide"
    assert writes.cut({"unread": tensors["unread"], "whole": tensors["whole"]}) == ""


def test_writes_are_remembered_and_what_is_live_keeps_its_values() -> None:
    live, fresh, other = torch.ones(4), torch.empty(4, device="meta"), torch.empty(4, device="meta")
    with Writes([live]) as writes:
        live[1:3].copy_(torch.empty(2, device="meta"))
        live.zero_()
        fresh.copy_(torch.empty(4, device="meta"))
        with pytest.raises(RuntimeError, match="must match the existing size"):
            live.copy_(torch.empty(5, device="meta"))
    assert live.tolist() == [1.0] * 4
    assert [writes.reached(tensor) for tensor in (live, fresh, other)] == [True, True, False]
