"""Laws of shares: what the ranks' plans read is packed, received, verified and swapped in."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.services.rollout.engines.vllm.start import _is_bucketed
from penstock.services.rollout.engines.vllm.swap.copy_plan import trace
from penstock.services.rollout.engines.vllm.swap.share_plan import SharesRefused, agree, packed, pieces_of
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.checksum import checksum, text
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import Layout, plan_layout
from penstock.shared.weights.format.shares import Share, Sums, check_sums, decode, encode, pack
from tests.rollout.engines.vllm.test_weight_swap import needs_vllm
from tests.support import forge

CPU = torch.device("cpu")
WIDTH = 7
"""Odd, so that pieces begin and end within 64-bit words."""


def policy(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"norm": (5,), "up": (8, WIDTH), "down": (WIDTH, 8), "key": (4, WIDTH), "cast": (4, 2)}
    return {name: torch.randn(shape, generator=random).to(torch.bfloat16) for name, shape in shapes.items()}


def layout_of(tensors: dict[str, Tensor]) -> Layout:
    return plan_layout(((name, "bfloat16", tuple(tensor.shape)) for name, tensor in tensors.items()), 600)


class Rank:
    """A rank's parameters: rows of up, columns of down turned over, one of two keys, a cast."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.parameters = {
            "norm": torch.zeros(5, dtype=torch.bfloat16),
            "fused": torch.zeros(8 // ranks + max(2, 4 // ranks), WIDTH, dtype=torch.bfloat16),
            "down": torch.zeros(8 // ranks, WIDTH, dtype=torch.bfloat16),
            "cast": torch.zeros(4 // ranks, 2, dtype=torch.float32),
        }

    def load(self, tensors: dict[str, Tensor], into: dict[str, Tensor]) -> None:
        rows, rank = 8 // self.ranks, self.rank
        into["norm"].copy_(tensors["norm"])
        into["fused"][:rows].copy_(tensors["up"][rank * rows : (rank + 1) * rows])
        keys = max(2, 4 // self.ranks)
        head = rank * 4 // self.ranks // keys * keys
        into["fused"][rows:].copy_(tensors["key"][head : head + keys])
        into["down"].copy_(tensors["down"][:, rank * rows : (rank + 1) * rows].t())
        into["cast"].copy_(tensors["cast"].narrow(0, rank * 4 // self.ranks, 4 // self.ranks))

    def plan(self, tensors: dict[str, Tensor]):  # type: ignore[no-untyped-def]
        return trace(lambda pairs: self.load(dict(pairs), self.parameters), tensors, self.parameters)


def planned(ranks: int) -> tuple[Layout, list[Rank], list[Share]]:
    layout = layout_of(policy(0))
    shot, held = FlatSnapshot(layout, CPU), [Rank(rank, ranks) for rank in range(ranks)]
    pieces = [pieces_of(rank.plan(shot.tensors()), len(layout.bucket_bytes)) for rank in held]
    return layout, held, agree(layout, [decode(encode(each), layout) for each in pieces])


def sums_of(share: Share, layout: Layout, slots: list[Tensor]) -> Sums:
    sums: dict[str, list[str]] = {}
    for name in share.names:
        for number, nbytes in enumerate(layout.bucket_bytes):
            empty = torch.full((nbytes,), 7, dtype=torch.uint8)
            held = share.spread(number, name, slots[number], empty)
            sums.setdefault(name, []).append(text(checksum(empty) if held else torch.zeros((), dtype=torch.int64)))
    return sums


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_packed_share_of_every_rank_is_swapped_in_as_the_loader_would(ranks: int) -> None:
    layout, held, shares = planned(ranks)
    assert len(layout.bucket_bytes) > 1
    for seed in (1, 2):
        tensors = policy(seed)
        source = FlatSnapshot(layout, CPU)
        header = source.fill(list(tensors.items()), PolicyVersion(seed), seed)
        sums = []
        for rank, share in zip(held, shares, strict=True):
            shadow = FlatSnapshot(layout, CPU, packed=share)
            for pieces, bucket, slot in zip(share.pieces, source.buckets, shadow.buckets, strict=True):
                pack(pieces, bucket, slot)
            packed(rank.plan(source.tensors()), share, shadow.buckets).replay()
            expected = Rank(rank.rank, ranks)
            expected.load(tensors, expected.parameters)
            for name, parameter in expected.parameters.items():
                assert torch.equal(rank.parameters[name], parameter), name
            sums.append(sums_of(share, layout, list(shadow.buckets)))
        check_sums(sums, header.checksums, "here")


def test_any_flipped_byte_of_any_rank_is_found_by_the_headers_checksums() -> None:
    layout, _, shares = planned(4)
    source = FlatSnapshot(layout, CPU)
    header = source.fill(list(policy(3).items()), PolicyVersion(1), 1)
    slots = [[torch.zeros(size, dtype=torch.uint8) for size in share.slots] for share in shares]
    for share, own in zip(shares, slots, strict=True):
        for pieces, bucket, slot in zip(share.pieces, source.buckets, own, strict=True):
            pack(pieces, bucket, slot)
    sums = [sums_of(share, layout, own) for share, own in zip(shares, slots, strict=True)]
    check_sums(sums, header.checksums, "here")
    for rank, share in enumerate(shares):
        for number, pieces in enumerate(share.pieces):
            if not pieces:
                continue
            slots[rank][number][pieces[0].nbytes - 1] ^= 1
            damaged = [sums_of(share, layout, slots[rank]) if place == rank else of for place, of in enumerate(sums)]
            with pytest.raises(WeightsError, match="damaged"):
                check_sums(damaged, header.checksums, "here")
            slots[rank][number][pieces[0].nbytes - 1] ^= 1


def test_what_does_not_divide_the_weights_is_refused_by_name() -> None:
    layout, _, shares = planned(2)
    without = tuple(tuple(piece for piece in bucket if piece.nbytes != 10) for bucket in shares[0].pieces)
    other = tuple(tuple(piece for piece in bucket if piece.nbytes != 10) for bucket in shares[1].pieces)
    with pytest.raises(SharesRefused, match="no rank needs byte 0 of norm"):
        agree(layout, [without, other])
    whole = planned(1)[2][0].pieces
    with pytest.raises(SharesRefused, match=r"ranks need overlapping parts of (up|down)"):
        agree(layout, [whole, shares[1].pieces])


@pytest.mark.parametrize(
    "rows",
    [
        b"[[[0,4096]]]",
        b"[[[-8,8]]]",
        b"[[[0,8,[3,300]]]]",
        b"[[[0,8,[0,8]]]]",
        b"[[[0,8,[1e9,0]]]]",
        b'[[["0",8]]]',
        b"[[[0,256],[0,256]]]",
        b"[[],[]]",
        b"{}",
        b"not pieces",
    ],
)
def test_pieces_outside_the_layout_are_refused(rows: bytes) -> None:
    layout = plan_layout([("only", "uint8", (300,))])
    assert layout.bucket_bytes == (512,)
    assert decode(b"[[[0,256],[256,8,[2,16]]]]", layout)[0][1].nbytes == 16
    with pytest.raises(WeightsError, match="pieces of a rank's share"):
        decode(rows.replace(b"256", b"400"), layout)


@pytest.mark.parametrize(
    ("ranks", "free", "bucketed"), [(1, 0.6, True), (1, 1.1, False), (2, 0.6, False), (2, 0.4, True)]
)
def test_a_shadow_needs_room_for_a_ranks_share(ranks: int, free: float, *, bucketed: bool) -> None:
    policy_bytes = 100 << 30
    worker = {"device": "cuda", "policy_bytes": policy_bytes, "free_bytes": int(free * policy_bytes)}
    assert _is_bucketed("auto", [{"rank": rank, **worker} for rank in range(ranks)]) == bucketed


CASES = ("qwen2/1/1", "qwen2/2/3", "qwen3/4/3", "phi3/2/1", "phi3/4/2", "gemma2/2/2", "gpt_neox/4/3")
MIXTURES = (
    "qwen3_moe/2/1",
    "qwen3_moe+ep/4/2",
    "qwen2_moe/4/1",
    "mixtral/2/3",
    "olmoe/4/1",
    "granitemoe/2/2",
    "gpt_oss/1/1",
)


@cache
def seen() -> dict[str, dict[str, Any]]:
    return forge.scenes("tests.support.vllm_shares", *CASES, *MIXTURES, timeout_s=400)[-1]


@pytest.mark.slow
@pytest.mark.timeout(500)
@needs_vllm
@pytest.mark.parametrize("case", CASES + MIXTURES)
def test_real_models_of_all_ranks_are_those_of_vllms_own_loader_after_each_pull(case: str) -> None:
    """Family / ranks / sources."""
    results = seen()[case]
    assert results.get("error", "") == ""
    assert results["path"] == ("plan" if "/1/" in case else "shares")
    assert results["right"] == [True, True]
    ranks = int(case.split("/")[1])
    assert 1.0 <= results["of_fair_share"] < (1.05 if ranks < 4 else 1.2), "four ranks hold two key-value heads twice"
