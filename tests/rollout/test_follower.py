"""Following the head: dying source, relaying peer, late replica, failing probe."""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY

from penstock.services.rollout.engines.engine import EngineDied, GenerationRequest, SwapReport
from penstock.services.rollout.engines.scripted import ScriptedEngine
from penstock.services.rollout.engines.transformers.engine import TransformersEngine
from penstock.services.rollout.follower import Follower
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Event, PolicyRecord, PolicyUpdate, PolicyVersion, Probe, Sampling
from penstock.shared.errors import WeightsError
from penstock.shared.process.telemetry import Presence, Status
from penstock.shared.weights.receiver.puller import Puller
from penstock.shared.weights.transport.offer import Offer
from tests.conftest import PATIENCE_S, until
from tests.support import tiny, weights
from tests.support.raw_redis import raw
from tests.support.tolerance import FORWARD

DEADLINE_S = PATIENCE_S


def is_announced(follower: Follower, step: int) -> bool:
    return follower._wanted is not None and follower._wanted.record.step == step


def engine(seed: int = 1) -> TransformersEngine:
    return TransformersEngine(
        tiny.opened(tiny.model(seed), stop=(999,)),
        max_rows=8,
        host="127.0.0.1",
        secret=weights.secret,
        deadline_s=DEADLINE_S,
    )


def version(number: int) -> dict[str, torch.Tensor]:
    return dict(tiny.model(100 + number).named_parameters())


class Replica:
    def __init__(self, bus: Bus, engine: Any, name: str = "rollout-0", **more: Any) -> None:
        self.engine, self.status, self.name = engine, Status(), name
        self.puller = Puller(engine.place, engine.ranks, DEADLINE_S, weights.secret)
        self.follower = Follower(
            bus, engine, self.status, name, self.puller, deadline_s=DEADLINE_S, probe_margin=3.0, **more
        )
        self.task = asyncio.ensure_future(self.follower.run())

    async def holds(self, number: int) -> None:
        await until(lambda: self.task.done() or self.status.version == number)
        if self.task.done():
            self.task.result()

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.engine.close()
        await self.puller.close()


@contextlib.asynccontextmanager
async def replica(bus: Bus, engine: Any, name: str = "rollout-0", **more: Any) -> AsyncIterator[Replica]:
    started = Replica(bus, engine, name, **more)
    try:
        yield started
    finally:
        await started.end()


async def announce(bus: Bus, record: PolicyRecord, **told: tuple[str, ...]) -> None:
    update = PolicyUpdate(record, 0.0, {name.replace("_", "-"): sources for name, sources in told.items()})
    await bus.publish(streams.POLICY, update, str(record.version))


async def writes(served: TransformersEngine, number: int) -> bool:
    ids = np.array([5, 6, 7], dtype=np.int32)
    group = await served.generate(GenerationRequest(ids, Sampling(samples=1, max_new_tokens=5, temperature=0.0)))
    expected = tiny.model(100 + number).generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False, eos_token_id=None
    )
    (sample,) = group.samples
    return bool(
        sample.token_ids.tolist() == expected[0, 3:].tolist() and sample.version_spans.tolist() == [[0, number]]
    )


def failures(transport: str, reason: str) -> float:
    labels = {"transport": transport, "reason": reason}
    return REGISTRY.get_sample_value("penstock_rollout_weight_pull_failures_total", labels) or 0.0


def pulls(source: str) -> float:
    return REGISTRY.get_sample_value("penstock_rollout_weight_pull_seconds_count", {"source": source}) or 0.0


async def test_versions_are_pulled_from_the_trainer_one_after_another(bus: Bus) -> None:
    before = pulls("trainer")
    with weights.serving() as trainer:
        async with replica(bus, engine()) as member:
            for number in range(3):
                await announce(bus, weights.offered(trainer, weights.fill(version(number), number)))
                await member.holds(number)
                assert await writes(member.engine, number)
            assert member.status.source == member.engine.peer_address != ""
    assert pulls("trainer") - before == 3


async def test_a_replica_passes_on_what_it_received_and_the_trainer_sends_it_once(bus: Bus) -> None:
    before = pulls("peer"), pulls("trainer")
    with weights.serving() as trainer:
        async with replica(bus, engine(), "rollout-0") as first, replica(bus, engine(), "rollout-1") as second:
            await until(lambda: first.status.source and second.status.source)
            for number in range(3):
                record = weights.offered(trainer, weights.fill(version(number), number, bucket_bytes=1 << 14))
                tree = {"rollout_0": (trainer.address,), "rollout_1": (first.status.source, trainer.address)}
                await announce(bus, record, **tree)
                await asyncio.gather(first.holds(number), second.holds(number))
                assert await writes(second.engine, number)
    assert (pulls("peer") - before[0], pulls("trainer") - before[1]) == (3, 3)


async def test_a_parent_that_is_gone_is_passed_over_for_the_trainer(bus: Bus) -> None:
    before = failures("none", "ask")
    with weights.serving() as gone:
        address = gone.address
    with weights.serving() as trainer:
        async with replica(bus, engine()) as member:
            record = weights.offered(trainer, weights.fill(version(0), 0))
            await announce(bus, record, rollout_0=(address, trainer.address))
            await member.holds(0)
            assert await writes(member.engine, 0)
            assert member.status.last_error == ""
    assert failures("none", "ask") - before == 1


async def test_a_version_comes_by_file_where_nothing_else_works(bus: Bus, tmp_path: Path) -> None:
    class Deaf(TransformersEngine):
        async def stage(self, offer: Offer) -> None:
            if offer.transport != "file":
                raise WeightsError("expected bytes over the network, found none")
            await super().stage(offer)

    deaf = Deaf(tiny.opened(tiny.model(1), stop=(999,)), max_rows=8)
    before = failures("gloo", "receive"), pulls("file")
    with weights.serving(folder=tmp_path, deadline_s=20.0) as trainer:
        async with replica(bus, deaf) as member:
            await announce(bus, weights.offered(trainer, weights.fill(version(0), 0)))
            await member.holds(0)
            assert await writes(member.engine, 0)
    assert (failures("gloo", "receive") - before[0], pulls("file") - before[1]) == (1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["v000000"]


@pytest.mark.parametrize(("give_up_s", "told"), [(60.0, []), (0.0, ["weights refused"])])
async def test_all_sources_dead_leaves_the_old_version_serving_until_a_new_trainer_is_there(
    bus: Bus, give_up_s: float, told: list[str]
) -> None:
    """As after a resume, where it is no failure that the trainer of before has ended."""
    async with replica(bus, engine(), give_up_s=give_up_s) as member:
        with weights.serving() as trainer:
            await announce(bus, weights.offered(trainer, weights.fill(version(0), 0)))
            await member.holds(0)
            record = weights.offered(trainer, weights.fill(version(1), 1))
        await announce(bus, record)
        await until(lambda: member.follower.failing)
        assert ("trainer" in member.status.last_error) == bool(told)
        assert await writes(member.engine, 0)
        with weights.serving() as restarted:
            await announce(bus, weights.offered(restarted, weights.fill(version(2), 2)))
            await member.holds(2)
            assert await writes(member.engine, 2)
    assert [event.name for _, event in await bus.newest(streams.EVENTS, Event)] == told


async def test_a_replica_that_joins_at_version_50_pulls_from_a_peer_that_holds_it(bus: Bus) -> None:
    with weights.serving() as trainer:
        async with replica(bus, engine(), "rollout-0") as first:
            record = weights.offered(trainer, weights.fill(version(50), 50))
            await announce(bus, record)
            await first.holds(50)
            first.status.state = "working"
            stop = asyncio.Event()
            beating = asyncio.ensure_future(Presence(bus, "rollout", "rollout-0", 60.0, first.status).run(stop))
            await until(lambda: raw(bus).exists(bus.keys.named("service:rollout-0")))
            trainer.withdraw(0.0)  # it no longer has the head
            before = pulls("peer")
            async with replica(bus, engine(2), "rollout-9") as late:
                await late.holds(50)
                assert await writes(late.engine, 50)
            assert pulls("peer") - before == 1
            stop.set()
            await beating


async def test_a_version_that_was_overtaken_is_given_up_between_two_sources(bus: Bus) -> None:
    asked: list[int] = []

    def receive(offer: Offer) -> None:
        asked.append(offer.header.version)
        received(offer)

    received = weights.receiving()
    with weights.serving() as trainer, weights.serving() as peer:
        record = weights.offered(trainer, weights.fill(version(0), 0))
        async with replica(bus, ScriptedEngine(receive=receive)) as member:
            peer._shelf._patience_s = PATIENCE_S
            await announce(bus, record, rollout_0=(peer.address, trainer.address))  # the peer never has it
            await until(lambda: member.puller._sessions)  # it waits there
            await announce(bus, weights.offered(trainer, newer := weights.fill(version(1), 1)))
            await until(lambda: is_announced(member.follower, 1))
            peer.offer(newer)  # ends the wait there
            await member.holds(1)
            assert not member.follower.failing
    assert asked == [1]
    assert await bus.newest(streams.EVENTS, Event) == []


async def test_what_was_overtaken_while_another_process_had_the_device_is_not_asked_for(bus: Bus) -> None:
    asked: list[int] = []
    ours, waiting = asyncio.Event(), asyncio.Event()

    def receive(offer: Offer) -> None:
        asked.append(offer.header.version)
        received(offer)

    @contextlib.asynccontextmanager
    async def pulling() -> AsyncIterator[None]:
        waiting.set()
        await ours.wait()
        yield

    received, failed = weights.receiving(), failures("none", "ask")
    with weights.serving() as trainer:
        async with replica(bus, ScriptedEngine(receive=receive), pulling=pulling) as member:
            await announce(bus, weights.offered(trainer, weights.fill(version(0), 0)))
            await asyncio.wait_for(waiting.wait(), PATIENCE_S)
            await announce(bus, weights.offered(trainer, weights.fill(version(1), 1)))  # the trainer has only this one
            await until(lambda: is_announced(member.follower, 1))
            ours.set()
            await member.holds(1)
    assert (asked, failures("none", "ask") - failed) == ([1], 0)


async def test_other_weights_of_the_same_number_are_refused(bus: Bus) -> None:
    with weights.serving(deadline_s=20.0) as impostor, weights.serving() as trainer:
        impostor.offer(weights.fill(version(9), 0))
        async with replica(bus, engine()) as member:
            record = weights.offered(trainer, weights.fill(version(0), 0))
            await announce(bus, record, rollout_0=(impostor.address, trainer.address))
            await member.holds(0)
            assert await writes(member.engine, 0)


async def test_torn_weights_that_no_source_makes_whole_stop_the_process(bus: Bus) -> None:
    class Torn(ScriptedEngine):
        async def swap(self, version: PolicyVersion) -> SwapReport:
            self.torn = True
            raise WeightsError("expected all buckets, found the source gone in the middle")

    with weights.serving() as trainer:
        member = Replica(bus, Torn(receive=weights.receiving()))
        await announce(bus, weights.offered(trainer, weights.fill(version(0), 0)))
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(member.task, PATIENCE_S)
        assert caught.group_contains(EngineDied, match="no source gave whole weights: trainer .* in the middle")
        await member.end()


def probe(number: int) -> Probe:
    lot = random.Random(3)
    rows = [np.array([lot.randrange(48) for _ in range(length)], dtype=np.int32) for length in (5, 7)]
    with torch.inference_mode():
        logprobs = []
        for row in rows:
            ids = torch.from_numpy(row).long()
            logits = tiny.model(100 + number)(input_ids=ids[None]).logits[0, :-1]
            logprobs.append(torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]].numpy())
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    scored = np.concatenate(logprobs)
    return Probe(np.concatenate(rows), lengths, scored, noise=np.full_like(scored, FORWARD))


@pytest.mark.parametrize(("scored", "alarms"), [(0, 0), (1, 1)])
async def test_a_probe_that_does_not_fit_is_an_alarm_and_generation_goes_on(
    bus: Bus, caplog: pytest.LogCaptureFixture, scored: int, alarms: int
) -> None:
    def alarmed() -> float:
        return REGISTRY.get_sample_value("penstock_rollout_probe_alarms_total") or 0.0

    before = alarmed()
    caplog.set_level("INFO")
    with weights.serving() as trainer:
        async with replica(bus, engine()) as member:
            record = weights.offered(trainer, weights.fill(version(0), 0))
            await announce(bus, dataclasses.replace(record, probe=probe(scored)))
            await member.holds(0)
            await until(lambda: "probe" in [entry.message for entry in caplog.records])
            assert await writes(member.engine, 0)
            await announce(bus, weights.offered(trainer, weights.fill(version(1), 1)))
            await member.holds(1)
    assert alarmed() - before == alarms
    gap = REGISTRY.get_sample_value("penstock_rollout_probe_gap_nats")
    assert gap is not None
    assert gap > 0.002 if alarms else gap < FORWARD
    events = [event for _, event in await bus.newest(streams.EVENTS, Event)]
    assert [event.name for event in events] == ["probe gap"] * alarms
    assert [failure.problem for failure in member.status.failures.values()] == ["version 0"] * alarms
    assert all("policy.dtype" in event.detail for event in events)
    assert [entry.levelname for entry in caplog.records if entry.message == "probe gap"].count("WARNING") == alarms
