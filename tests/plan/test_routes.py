"""Memory of routes in the plan is what the services allocate for them."""

import dataclasses
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.cli.plan import make
from penstock.services.episodes.messages import Message
from penstock.services.episodes.tree import Tree
from penstock.services.plan import report, routes
from penstock.services.plan.hardware import GIB
from penstock.services.plan.memory import EngineOptions, TrainerOptions, engine_memory, trainer_table
from penstock.services.plan.shapes import from_config, shape_of
from penstock.services.plan.workload import Lengths, Workload
from penstock.services.rollout.engines.vllm.routing.route_record import PAGE, RouteRecord
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.model.routing.exchange import RouteExchange
from penstock.services.trainer.model.routing.replay import RouterReplay
from penstock.shared.bus.messages import FinishReason, Sample
from penstock.shared.peers.turns import DrawnTurn
from penstock.shared.settings import load

LAYERS, TOP, EXPERTS = 6, 4, 64
SIZES = {
    "num_hidden_layers": LAYERS, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 100, "intermediate_size": 64,
    "num_experts": EXPERTS, "num_experts_per_tok": TOP,
}  # fmt: skip


def workload(tokens: int, samples: int = 8, **sizes: int) -> Workload:
    shape = from_config({**SIZES, **sizes}, "mixture")
    made = Workload(shape, 2, 1, samples, 5, Lengths(tokens, tokens, 0.0), 1, 100, 1.0, None, False, 0)
    return dataclasses.replace(made, replays=True)


def test_a_token_has_an_id_for_each_layer_and_expert_of_two_bytes_above_256_experts() -> None:
    shapes = [shape_of("30b-a3b"), from_config({**SIZES, "num_experts": 257}, "large"), shape_of("7b")]
    assert [(shape.routes, shape.route_bytes) for shape in shapes] == [(384, 1), (24, 2), (0, 1)]


@pytest.mark.parametrize(("requests", "tokens", "at_once"), [(1, 16, 1), (40, 900, 40), (40, 900, 3), (200, 3000, 7)])
def test_an_engines_record_takes_what_is_planned_at_most(
    requests: int, tokens: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, record_pages = [0], RouteRecord._pages

    def pages(record: RouteRecord, count: int) -> torch.Tensor:
        made = record_pages(record, count)
        held = getattr(record, "_pool", made[:0])
        taken.append(made.nbytes + held.nbytes)
        return made

    monkeypatch.setattr(RouteRecord, "_pages", pages)
    record, row_tokens = RouteRecord(torch.zeros(8, LAYERS, TOP, dtype=torch.uint8), "uint8"), 4096
    record.grow(requests, row_tokens, (0, row_tokens))
    for first in range(0, requests, at_once):  # some begin while others are long already
        row_n = np.arange(first, min(first + at_once, requests))
        for place in range(0, tokens, PAGE):
            record.reserve(row_n * row_tokens + place, row_tokens)
    planned = routes.record_bytes(workload(tokens), requests, math.inf)
    assert planned / 3.1 < max(taken) <= planned
    assert routes.record_bytes(dataclasses.replace(workload(tokens), replays=False), requests, math.inf) == 0.0


def test_a_record_is_of_no_more_tokens_than_the_cache_has_room_for() -> None:
    assert routes.record_bytes(workload(131_072), 64, 1e6) < 0.13 * routes.record_bytes(workload(131_072), 64, math.inf)


def sample(tokens: int, claim: bytes) -> Sample:
    ids = np.zeros(tokens, np.int32)
    return Sample(ids, ids.astype(np.float32), np.zeros((1, 2), np.int32), FinishReason.STOP, "", routes=claim)


def chosen(tokens: int) -> bytes:
    return bytes(np.broadcast_to(np.arange(TOP, dtype=np.uint8), (tokens, LAYERS, TOP)).tobytes())


@pytest.mark.usefixtures("one_rank")
def test_the_trainers_host_and_gpu_take_what_is_planned() -> None:
    work, replay = workload(3000), RouterReplay(tuple(range(LAYERS)), LAYERS, EXPERTS, TOP)
    claims = [b"%d" % number for number in range(work.samples)]
    rows = [PackedRow(np.zeros(5, np.int32), (sample(3000, claim),), (0,)) for claim in claims]
    batches = [micro_batch([row]) for row in rows]
    exchange = RouteExchange(replay)
    tracemalloc.start()
    try:
        exchange.offered = {claim: chosen(3004) for claim in claims}
        figures, _ = exchange.exchange(batches, [each for batch in batches for each in batch.routed])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert figures["routed_live"] == 0
    assert peak_bytes == pytest.approx(routes.host_bytes(work, 1), rel=0.25)  # of small objects, and a sample's check
    routes_TLK: Any = replay.routes_of(batches[0], torch.device("cpu"))
    assert routes_TLK.nbytes == routes.pass_bytes(work, batches[0].tokens)


def test_the_plan_counts_routes_on_gpus_and_hosts() -> None:
    flags = ["--sampling.max_new_tokens=4096", "--rollout.engine=vllm", "--trainer.router_replay=true"]
    with_routes, without = (make(load(None, of), "16xH200", "30b-a3b") for of in (flags, flags[:2]))
    assert "   experts of tokens take up to " in report.text(with_routes)
    assert "experts of tokens" not in report.text(without)
    options = EngineOptions(sequences=256)
    on_gpu = [
        {part.name: part.nbytes for part in engine_memory(plan.planner.work, options, 132 * GIB, 140 * GIB).components}
        for plan in (with_routes, without)
    ]
    record_bytes = on_gpu[0][routes.NAME]
    assert record_bytes == pytest.approx(3 * 256 * (4096 + 128) * 384, rel=0.001)
    assert on_gpu[1][routes.NAME] == 0
    tables = [trainer_table(plan.planner.work, TrainerOptions(8, 3), 132 * GIB)[0] for plan in (with_routes, without)]
    of_pass = [
        sum(part.nbytes for part in table["forward and backward"] if part.name == "experts of tokens")
        for table in tables
    ]
    assert of_pass == [16_384 * 384 * 4, 0]


def test_experts_of_episodes_are_planned_where_they_are_kept_and_of_a_turn_on_gpus() -> None:
    agent = ["--episodes.environment=e:E", "--episodes.max_turns=8", '--reward.scorers=[{kind = "environment"}]']
    flags = [*agent, "--sampling.max_new_tokens=512", "--rollout.engine=vllm", "--trainer.router_replay=true"]
    plan = make(load(None, flags), "16xH200", "30b-a3b", turns="4,600,2.5")
    work = plan.planner.work
    assert work.lengths.most == 8 * 512
    assert routes.record_bytes(work, 256, math.inf) == pytest.approx(3 * 256 * (512 + 128) * 384, rel=0.001), "a turn's"
    turn = DrawnTurn(
        np.zeros(int(work.lengths.mean / 4), np.int32),
        np.zeros(int(work.lengths.mean / 4), np.float32),
        np.zeros((1, 2), np.int32),
        FinishReason.STOP,
        routes=bytes(384 * int(work.lengths.mean / 4)),
    )
    tree, after = Tree(), None
    for number in range(4):
        at, _ = tree.place(np.array([number], np.int32), after)
        after = tree.add(at, turn, after, (), Message("assistant"))
    episodes = work.slots * work.group_size
    assert routes.episode_bytes(work) == pytest.approx(episodes * len(tree.routes()), rel=0.01)
    assert routes.host_bytes(work, 1) == pytest.approx(2 * work.samples * len(tree.routes()), rel=0.01)
    assert f"{routes.episode_bytes(work) / GIB:.1f} GiB of that of the services that play episodes" in report.text(plan)
