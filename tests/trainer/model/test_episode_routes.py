"""The experts of an episode's turns reach exactly the tokens from which the turns were drawn, whatever tree the turns make."""

import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from penstock.services.episodes.messages import Message
from penstock.services.episodes.tree import Tree, Turn
from penstock.services.rollout.engines.engine import GenerationRequest
from penstock.services.rollout.engines.transformers.decoding import Batch, Tokens
from penstock.services.rollout.engines.transformers.routes import RouteRecorder
from penstock.services.rollout.episode_turns import drawn_of
from penstock.services.trainer.batch.packing import MicroBatch, PackedRow, micro_batch
from penstock.services.trainer.batch.shards import split
from penstock.services.trainer.model import experts
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.model.routing import replay
from penstock.services.trainer.model.routing.exchange import RouteExchange
from penstock.services.trainer.model.trunk import Packing
from penstock.shared.bus.messages import FinishReason, Int32Array, PolicyVersion, Sample, Sampling, no_ids
from penstock.shared.model import routes
from penstock.shared.model.routes import mixtures_of
from penstock.shared.peers.turns import DrawnTurn, read_drawn
from tests.support.expert_ranks import family

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = 1e-5
"""Nats, of a row in float32 and of decoding with a cache."""
FAMILIES = sorted(experts.PROVEN)
VOCABULARY = 90
MESSAGE = Message("assistant")


@dataclasses.dataclass(slots=True)
class Playing:
    """An episode's tree, with the ids before each of its turns."""

    tree: Tree
    turns: list[tuple[Turn, Int32Array]]

    def history(self, lot: np.random.Generator, opening: Int32Array) -> tuple[Int32Array, Turn | None]:
        """Return the ids of the next turn: of the last one, any other one, or all, repeated, continued or written again."""
        given = lot.integers(3, VOCABULARY, int(lot.integers(0, 4))).astype(np.int32)
        if not self.turns:
            return np.concatenate([opening, given]), None
        turn, before = self.turns[-1 if lot.random() < 0.6 else int(lot.integers(len(self.turns)))]
        kind = lot.choice(["continued", "drawn again", "written again"], p=[0.6, 0.2, 0.2])
        if kind == "continued":
            return np.concatenate([turn.segment.path, given]), turn
        if kind == "drawn again":
            return before, None
        whole = turn.segment.path
        return np.concatenate([whole[: int(lot.integers(1, len(whole)))], given]), None


def draw(model: Any, histories: Sequence[Int32Array], lot: np.random.Generator) -> list[DrawnTurn]:
    """Draw turns as a replica does, together, and send them."""
    requests = [
        GenerationRequest(ids, Sampling(1, int(lot.integers(1, 9)), 1.0), int(lot.integers(1 << 30)))
        for ids in histories
    ]
    decoding = Batch(model, requests, Tokens((1, 2)), torch.device("cpu"), RouteRecorder(model))
    finished: dict[int, Any] = {}
    with torch.inference_mode():
        while not decoding.finished:
            finished.update(decoding.step(PolicyVersion(0)))
    return [read_drawn(drawn_of(finished[place][0], has_routes=True).frame()) for place in range(len(requests))]


def play(model: Any, seed: int, episodes: int = 4, turns: int = 6) -> tuple[PackedRow, dict[bytes, bytes], list[bool]]:
    """Return a group of random episodes, the payloads of their claims, and which turns have routes, in sample order.

    Some turns have lost their routes, others were drawn and never answered.
    """
    lot = np.random.default_rng(seed)
    opening = lot.integers(3, VOCABULARY, 5).astype(np.int32)
    playing = [Playing(Tree(), []) for _ in range(episodes)]
    for number in range(turns):
        histories = [each.history(lot, opening) for each in playing]
        for each, (ids, after), drawn in zip(
            playing, histories, draw(model, [ids for ids, _ in histories], lot), strict=True
        ):
            if number and lot.random() < 0.1:
                continue
            if lot.random() < 0.15:
                drawn = dataclasses.replace(drawn, routes=b"")
            rest = ids if after is None else ids[len(after.segment.path) :]
            at, _ = each.tree.place(rest, after)
            each.turns.append((each.tree.add(at, drawn, after, (), MESSAGE), ids))
    samples = [sample_of(each.tree, b"%d" % place) for place, each in enumerate(playing)]
    payloads = {sample.routes: each.tree.routes() for sample, each in zip(samples, playing, strict=True)}
    known = [mark for each in playing for mark in marks(each)]
    row = PackedRow(no_ids(), tuple(samples), tuple(range(episodes)))
    return row, {claim: payload for claim, payload in payloads.items() if payload}, known


def marks(of: Playing) -> list[bool]:
    """Return whether each turn has routes, in the order of the segments."""
    rows = of.tree.rows()
    ordered = sorted((turn for turn, _ in of.turns), key=lambda turn: rows[id(turn.segment)])
    return [bool(turn.segment.drawn.routes) for turn in ordered if turn.segment.drawn is not None]


def sample_of(tree: Tree, claim: bytes) -> Sample:
    made = tree.columns()
    return Sample(
        made.token_ids, made.behavior_logprobs, made.version_spans, FinishReason.STOP, "",
        segments=made.segments, routes=claim,
    )  # fmt: skip


def turns_of(row: PackedRow) -> list[int]:
    """Return the tokens of each sampled segment, in sample order."""
    ends = [(sample, [*sample.segments[1:, 0].tolist(), len(sample.token_ids)]) for sample in row.samples]
    return [
        end - start
        for sample, of in ends
        for (start, _, is_sampled), end in zip(sample.segments.tolist(), of, strict=True)
        if is_sampled
    ]


def trainer_of(name: str, packing: Packing = "rows") -> Policy:
    policy = Policy(family(name), packing=packing)
    policy.trunk.replay = replay.install(policy.model)
    return policy.eval()


def taken(policy: Policy, batches: Sequence[MicroBatch], payloads: dict[bytes, bytes]) -> dict[str, float]:
    assert policy.trunk.replay is not None
    exchange = RouteExchange(policy.trunk.replay)
    exchange.offered = payloads
    return exchange.exchange(batches, [each for batch in batches for each in batch.routed])[0]


def chosen(policy: Policy, batch: MicroBatch) -> torch.Tensor:
    """Return the experts that the trainer chooses by itself for each token of a row (T × L × K)."""
    seen: list[torch.Tensor] = []
    hooks = [
        each.register_forward_pre_hook(lambda _, given: seen.append(given[1].clone()))
        for each in mixtures_of(policy.model).values()
    ]
    with torch.no_grad(), policy.trunk.routing_live():
        policy(batch)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_experts_are_the_trainers_own_at_every_token_from_which_a_turn_was_drawn(name: str) -> None:
    replica, policy = family(name).eval(), trainer_of(name)
    assert policy.trunk.replay is not None
    shapes = []
    for seed in range(6):
        row, payloads, known = play(replica, seed)
        batch, lengths = micro_batch([row]), turns_of(row)
        figures = taken(policy, [batch], payloads)
        replayed_TLK = policy.trunk.replay.routes_of(batch, torch.device("cpu"))
        assert replayed_TLK is not None
        own_TLK = chosen(policy, batch)
        columns = np.unique(batch.columns_N[np.repeat(known, lengths)])
        is_replayed_T = (replayed_TLK >= 0).all(-1).all(-1)
        assert is_replayed_T.nonzero()[:, 0].tolist() == columns.tolist(), "no more and no fewer"
        assert torch.equal(replayed_TLK[columns].sort(-1)[0], own_TLK[columns].sort(-1)[0].int())
        with torch.no_grad():
            logprobs_N = policy(batch).policy_logprobs_N
        # a layer's state after each token, and by chunks of 64: 2e-5
        assert np.abs(logprobs_N.numpy() - batch.behavior_logprobs_N).max() < 10 * EXACT
        assert figures == {"replayed_fraction": len(columns) / batch.tokens, "routed_live": known.count(False)}
        later = own_TLK[np.minimum(columns + 1, batch.tokens - 1)].sort(-1)[0]
        assert (replayed_TLK[columns].sort(-1)[0] != later).any(-1).float().mean() > 0.3, "a shift would be seen"
        shapes.append((len(columns) < batch.tokens - 1, not all(known), is_branched(row)))
    assert all(map(any, zip(*shapes, strict=True))), "given tokens, lost turns, branches"


def is_branched(row: PackedRow) -> bool:
    return any(np.bincount(sample.segments[1:, 1]).max() > 1 for sample in row.samples if len(sample.segments) > 1)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next"])
def test_sequences_and_parts_of_rows_have_the_routes_of_rows(name: str) -> None:
    """Given other experts than its own, a trainer gives the same logprobs, whatever computes its rows."""
    replica, (rows, sequences) = family(name).eval(), (trainer_of(name), trainer_of(name, "sequences"))
    row, payloads, known = play(replica, seed=11)
    lot = np.random.default_rng(0)
    others = {claim: other_experts(payload, row, claim, rows, lot) for claim, payload in payloads.items()}
    batch = micro_batch([row])
    with torch.no_grad():
        live_N = rows(batch).policy_logprobs_N
        taken(rows, [batch], others)
        ours_N = rows(batch).policy_logprobs_N
        apart = micro_batch([dataclasses.replace(row, shares_prompt=False)])
        for policy, of in ((sequences, batch), (rows, apart), (sequences, apart)):
            figures = taken(policy, [of], others)
            assert figures["routed_live"] == known.count(False)
            assert (policy(of).policy_logprobs_N - ours_N).abs().max() < 10 * EXACT
    assert (ours_N - live_N).abs().max() > 1e-2
    assert rows.trunk.replay is not None
    taken(rows, [batch], others)
    whole_TLK = rows.trunk.replay.routes_of(batch, torch.device("cpu"))
    parts = [rows.trunk.replay.routes_of(each.computed, torch.device("cpu")) for each in split(batch, 2)]
    assert whole_TLK is not None
    empty_TLK = torch.full_like(whole_TLK[: split(batch, 2)[0].tokens], -1)
    joined_TLK = torch.cat([empty_TLK if part is None else part for part in parts])
    assert torch.equal(joined_TLK[: batch.tokens], whole_TLK)


def other_experts(payload: bytes, row: PackedRow, claim: bytes, policy: Policy, lot: np.random.Generator) -> bytes:
    """Return a payload of as many random experts."""
    plan = policy.trunk.replay
    assert plan is not None
    (sample,) = (each for each in row.samples if each.routes == claim)
    turns = tuple(turns_of(dataclasses.replace(row, samples=(sample,))))
    recorded, _ = routes.split(payload, turns)
    drawn = lot.random((int(recorded.sum()), plan.decoder_layers, plan.experts)).argsort(-1)[..., : plan.top_k]
    return payload[: len(turns)] + drawn.astype(np.uint8).tobytes()


@pytest.mark.usefixtures("one_rank")
def test_a_lost_or_wrong_record_leaves_its_turns_to_the_live_routers() -> None:
    replica, policy = family("qwen3_moe").eval(), trainer_of("qwen3_moe")
    row, payloads, known = play(replica, seed=3)
    batch, first = micro_batch([row]), row.samples[0].routes
    turns = len(turns_of(dataclasses.replace(row, samples=row.samples[:1])))
    lost_before = known[:turns].count(False)
    for wrong in (None, payloads[first][:-1], payloads[first][1:], b"\2" + payloads[first][1:], b"", b"\0" * turns):
        offered = {claim: payload for claim, payload in payloads.items() if claim != first}
        if wrong is not None:
            offered[first] = wrong
        figures = taken(policy, [batch], offered)
        assert figures["routed_live"] == known.count(False) + turns - lost_before, wrong
        assert policy.trunk.replay is not None
        routes_TLK = policy.trunk.replay.routes_of(batch, torch.device("cpu"))
        assert routes_TLK is not None
        own = batch.columns_N[: row.samples[0].sampled_tokens]
        shared = batch.columns_N[row.samples[0].sampled_tokens :]
        assert (routes_TLK[np.setdiff1d(own, shared)] == -1).all()


def test_a_turn_with_other_bytes_a_token_has_no_routes() -> None:
    assert routes.join([(2, b"abcd"), (1, b"xyz"), (3, b""), (1, b"ef")]) == b"\1\0\0\1abcdef"
    assert routes.join([(2, b"abc"), (1, b"x")]) == b"\0\1x"
    assert routes.join([(2, b"ab"), (1, b"xy"), (3, b"abcdef")]) == b"\0\1\1xyabcdef", "a first one spoils no others"
    assert routes.join([(2, b""), (1, b"")]) == routes.join([]) == b""
    recorded, rest = routes.split(b"\1\0\0\1abcdef", (2, 1, 3, 1))
    assert (recorded.tolist(), bytes(rest)) == ([True, True, False, False, False, False, True], b"abcdef")
    for wrong in (b"\1\0\0", b"\1\0\0\3abcdef"):
        with pytest.raises(ValueError, match="expected 1 or 0 for each of 4 turns, found others"):
            routes.split(wrong, (2, 1, 3, 1))


def test_turns_that_do_not_fit_into_a_frame_and_those_of_evaluations_have_no_routes() -> None:
    (drawn,) = draw_one()
    assert drawn_of(drawn, has_routes=True).routes == drawn.routes[-len(drawn.token_ids) :].tobytes()
    assert drawn_of(drawn).routes == b""
    room = drawn.routes[-len(drawn.token_ids) :].nbytes
    beside = dataclasses.replace(drawn, support_ids=np.zeros(1, np.int32))
    with mock.patch("penstock.shared.peers.frames.PART_BYTES", room):
        assert drawn_of(drawn, has_routes=True).routes
        assert drawn_of(beside, has_routes=True).routes == b"", "the tokens that could be drawn are in the frame, too"


@torch.inference_mode()
def draw_one() -> Any:
    model, request = family("mixtral").eval(), GenerationRequest(np.array([3, 4], np.int32), Sampling(1, 4, 1.0), 0)
    decoding = Batch(model, [request], Tokens((1,)), torch.device("cpu"), RouteRecorder(model))
    while not (finished := decoding.step(PolicyVersion(0))):
        pass
    return finished[0][1]
