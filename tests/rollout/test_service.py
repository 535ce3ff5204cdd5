"""Laws of the rollout service."""

import asyncio
import dataclasses
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY

from penstock.services.rollout.engines.engine import EngineDied, GeneratedGroup, GenerationRequest
from penstock.services.rollout.engines.prompts import CharacterCodec
from penstock.services.rollout.engines.scripted import ScriptedEngine
from penstock.services.rollout.eval_priority import Precedence
from penstock.services.rollout.follower import Follower
from penstock.services.rollout.plausibility import Plausibility
from penstock.services.rollout.service import Rollout, seed_of, seeds_of
from penstock.services.rollout.throughput import Throughput
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus, Delivery
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import (
    Event,
    FinishReason,
    GroupId,
    PolicyRecord,
    PolicyUpdate,
    PolicyVersion,
    Prompt,
    Purpose,
    RolloutGroup,
    Sampling,
)
from penstock.shared.bus.stores.policy.evaluations import Holding
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.streams import Stream
from penstock.shared.errors import NotHere, PermanentError
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings
from penstock.shared.weights.format.snapshot import write_snapshot
from penstock.shared.weights.receiver.puller import Puller
from tests.conftest import PATIENCE_S, Server, until
from tests.support import builders, replicas, tiny, weights
from tests.support.raw_redis import raw
from tests.support.tolerance import ULPS


async def announce(bus: Bus, folder: Path, version: int) -> Path:
    written = write_snapshot(
        folder, PolicyVersion(version), version, [("w", torch.tensor([float(version)]))], torch.float32
    )
    await announce_at(bus, written.location, version, written.digest)
    return written.location


async def announce_at(bus: Bus, location: Path, version: int, digest: str) -> None:
    record = PolicyRecord(PolicyVersion(version), None, version, 0.0, digest, str(location))
    await bus.publish(streams.POLICY, PolicyUpdate(record, 0.0), str(version))


async def evaluate(bus: Bus, version: int, *replicas: str, timeout_s: float = PATIENCE_S) -> None:
    held = Holding(PolicyVersion(version), replicas, timeout_s).encode()
    await raw(bus).hset(bus.keys.named("evaluation"), mapping={"version": version, "holding": held})


async def put(bus: Bus, prompt: Prompt, stream: Stream = streams.PROMPTS) -> None:
    await bus.publish(stream, prompt, str(prompt.group_id))


async def take(bus: Bus, stream: Stream = streams.ROLLOUTS) -> list[Delivery[RolloutGroup]]:
    deliveries: list[Delivery[RolloutGroup]] = []
    async with asyncio.timeout(PATIENCE_S):
        while not deliveries:
            deliveries = await look(bus, stream)
    return deliveries


async def look(bus: Bus, stream: Stream = streams.ROLLOUTS) -> list[Delivery[RolloutGroup]]:
    return await bus.read(stream, RolloutGroup, "test", 100, 5.0)


def rollout(
    bus: Bus,
    engine: ScriptedEngine,
    status: Status | None = None,
    name: str = "rollout-0",
    drain_s: float = 0.2,
    group_size: int = 2,
    taking: asyncio.Event | None = None,
) -> Rollout:
    settings = Settings.model_validate(
        {
            "rollout": {"max_groups": 4},
            "sampling": {"group_size": group_size},
            "weights": {"deadline_s": PATIENCE_S},
            "bus": {"drain_s": drain_s},
            "internal": {"claim_after_s": PATIENCE_S},
        }
    )
    puller = Puller(engine.place, engine.ranks, PATIENCE_S, weights.secret)
    made = replicas.context(settings, bus, name, status or Status(), taking)
    return Rollout(made, engine, CharacterCodec(), puller, replicas.own_device(made))


class Serving:
    def __init__(self, replica: Rollout) -> None:
        self.stop = asyncio.Event()
        self.task = asyncio.ensure_future(replica.run(self.stop, 0.01))

    async def end(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, PATIENCE_S)


@pytest.fixture
async def served(bus: Bus) -> AsyncIterator[tuple[ScriptedEngine, Status]]:
    engine, status = ScriptedEngine(receive=weights.receiving()), Status()
    serving = Serving(rollout(bus, engine, status))
    yield engine, status
    await serving.end()


async def test_the_engine_gets_each_group_with_the_seed_of_its_own(
    bus: Bus, tmp_path: Path, served: tuple[ScriptedEngine, Status], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seeds = served[0], list[int]()
    generate = engine.generate

    async def seeing(request: GenerationRequest) -> GeneratedGroup:
        seeds.append(request.seed)
        return await generate(request)

    monkeypatch.setattr(engine, "generate", seeing)
    await announce(bus, tmp_path, 3)
    for group_id in (5, 6):
        await put(bus, builders.prompt(group_id))
    await until(lambda: len(seeds) == 2)
    assert sorted(seeds) == sorted(seed_of(0, builders.prompt(group_id)) for group_id in (5, 6))


async def test_a_prompt_becomes_a_group_with_its_samples_versions_and_texts(
    bus: Bus, tmp_path: Path, served: tuple[ScriptedEngine, Status]
) -> None:
    await announce(bus, tmp_path, 3)
    await put(bus, builders.prompt(5, "12+34=", samples=8))
    (delivery,) = await take(bus)
    group = delivery.message()
    assert delivery.group_id == "5"
    assert (group.prompt.group_id, group.prompt.answer, group.replica) == (5, "46", "rollout-0")
    assert group.prompt_token_ids.tolist() == [49, 50, 43, 51, 52, 61]
    assert {sample.text for sample in group.samples} == {"46", "47"}
    for sample in group.samples:
        assert sample.token_ids.tolist() == [*map(ord, sample.text), 0]
        assert sample.version_spans.tolist() == [[0, 3]]
        assert sample.finish_reason is FinishReason.STOP
        np.testing.assert_allclose(sample.behavior_logprobs, [np.log(0.5), 0, 0], atol=ULPS)
    assert await bus.length(streams.PROMPTS) == 0
    await until(lambda: served[1].values.get("samples_per_s", 0) > 0 and served[1].values["held"] == 0)


async def test_held_out_prompts_go_their_own_way(
    bus: Bus, tmp_path: Path, served: tuple[ScriptedEngine, Status]
) -> None:
    await announce(bus, tmp_path, 0)
    await evaluate(bus, 0)
    for problem in range(6):
        await put(bus, builders.prompt(problem, samples=1), streams.EVAL_PROMPTS)
    group_ids: set[str] = set()
    while len(group_ids) < 6:
        group_ids |= {delivery.group_id for delivery in await take(bus, streams.EVAL_ROLLOUTS)}
    assert group_ids == {"0", "1", "2", "3", "4", "5"}
    assert await bus.length(streams.ROLLOUTS) == 0


async def test_a_prompt_waits_for_the_version_that_it_asks_for(
    bus: Bus, tmp_path: Path, served: tuple[ScriptedEngine, Status]
) -> None:
    _, status = served
    await put(bus, builders.prompt(1, min_version=2))
    await announce(bus, tmp_path, 0)
    await announce(bus, tmp_path, 1)
    await until(lambda: status.version == 1)
    await put(bus, builders.prompt(2, min_version=1))
    assert [delivery.group_id for delivery in await take(bus)] == ["2"]
    await announce(bus, tmp_path, 2)
    (delivery,) = await take(bus)
    assert delivery.group_id == "1"
    assert delivery.message().oldest_version == 2


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ({"text": None}, "there is no text in train.jsonl:8"),
        (
            {"sampling": Sampling(samples=0, max_new_tokens=4, temperature=1.0)},
            "samples: expected a whole number from 1 to 65536, found 0",
        ),
        (
            {"sampling": Sampling(samples=2, max_new_tokens=4, temperature=-1.0)},
            "temperature: expected a finite number from 0 to 1e+06, found -1.0",
        ),
    ],
)
async def test_a_prompt_that_can_never_be_generated_is_buried_with_its_reason(
    bus: Bus, tmp_path: Path, served: tuple[ScriptedEngine, Status], harm: dict[str, Any], reason: str
) -> None:
    await announce(bus, tmp_path, 0)
    fields = {name: getattr(builders.prompt(7), name) for name in Prompt.__slots__} | harm
    await put(bus, Prompt(**fields))
    await put(bus, builders.prompt(8))
    assert [delivery.group_id for delivery in await take(bus)] == ["8"]
    await until(lambda: _dead(bus))
    assert reason in await _dead(bus)
    assert (await bus.counts())["dead:prompts"] == 1


async def _dead(bus: Bus) -> str:
    entries = await raw(bus).xrange(bus.keys.of(streams.PROMPTS.dead))
    return str(entries[0][1][b"reason"].decode()) if entries else ""


async def test_an_engine_that_dies_stops_the_process_and_others_redo_its_groups(bus: Bus, tmp_path: Path) -> None:
    def die(prompt: str, version: PolicyVersion, lot: random.Random) -> tuple[str, float]:
        raise EngineDied("out of memory")

    await announce(bus, tmp_path, 0)
    await put(bus, builders.prompt(1))
    with pytest.raises(ExceptionGroup) as caught:
        await rollout(bus, ScriptedEngine(die)).run(asyncio.Event(), 0.01)
    assert caught.group_contains(EngineDied, match="out of memory")
    serving = Serving(rollout(bus, ScriptedEngine(), name="rollout-1"))
    (delivery,) = await take(bus)
    assert delivery.message().replica == "rollout-1"
    await serving.end()


async def test_a_replica_that_stops_gives_back_what_it_cannot_finish(bus: Bus, tmp_path: Path) -> None:
    never = asyncio.Event()

    async def hold() -> None:
        await never.wait()

    await announce(bus, tmp_path, 0)
    await put(bus, builders.prompt(1))
    await put(bus, builders.prompt(2, min_version=9))
    status = Status()
    serving = Serving(rollout(bus, ScriptedEngine(pause=hold), status))
    await until(lambda: status.values.get("held") == 2)
    await serving.end()
    assert status.state == "stopping"
    entries = await bus.reclaim(streams.PROMPTS, Prompt, "test", 5.0, 10)
    assert [(entry.group_id, entry.attempts) for entry in entries] == [("1", 1), ("2", 1)]


async def test_a_replica_that_stops_does_not_wait_for_a_version_that_may_never_come(bus: Bus, tmp_path: Path) -> None:
    await announce(bus, tmp_path, 0)
    await put(bus, builders.prompt(1, min_version=9))
    status = Status()
    serving = Serving(rollout(bus, ScriptedEngine(), status, drain_s=60.0))
    await until(lambda: status.values.get("held") == 1)
    await serving.end()
    entries = await bus.reclaim(streams.PROMPTS, Prompt, "test", 5.0, 10)
    assert [(entry.group_id, entry.attempts) for entry in entries] == [("1", 1)]


async def test_a_replica_that_starts_serves_the_head_at_once(bus: Bus, tmp_path: Path) -> None:
    for version in (4, 5, 6):
        await announce(bus, tmp_path, version)
    (tmp_path / "v000004" / "manifest.json").unlink()  # never read
    status = Status()
    serving = Serving(rollout(bus, ScriptedEngine(), status))
    await until(lambda: status.version == 6)
    assert status.last_error == ""
    await serving.end()


async def test_harmed_snapshots_are_refused_and_the_old_version_goes_on_until_a_newer_one_is_whole(
    bus: Bus, tmp_path: Path, served: tuple[ScriptedEngine, Status]
) -> None:
    _, status = served
    await announce(bus, tmp_path, 0)
    await until(lambda: status.version == 0)
    written = write_snapshot(tmp_path, PolicyVersion(1), 1, [("w", torch.ones(4))], torch.float32)
    bucket = written.location / "bucket-00000.safetensors"
    bucket.write_bytes(bucket.read_bytes()[:-4])
    await announce_at(bus, written.location, 1, written.digest)
    await until(lambda: "it is torn" in status.last_error and status.state == "degraded")
    await put(bus, builders.prompt(1))
    (delivery,) = await take(bus)
    assert delivery.message().versions == {0}
    await announce(bus, tmp_path, 2)
    await until(lambda: status.version == 2)
    assert status.last_error == ""
    assert [event.name for _, event in await bus.newest(streams.EVENTS, Event)] == ["weights refused"]


async def test_a_snapshot_that_comes_late_is_pulled_when_it_is_there(
    bus: Bus, tmp_path: Path, served: tuple[ScriptedEngine, Status]
) -> None:
    _, status = served
    written = write_snapshot(tmp_path / "elsewhere", PolicyVersion(1), 1, [("w", torch.ones(4))], torch.float32)
    await announce_at(bus, tmp_path / "v000001", 1, written.digest)
    await until(lambda: "No such file" in status.last_error)
    written.location.rename(tmp_path / "v000001")
    await until(lambda: status.version == 1)


async def test_a_waiter_is_sent_away_only_while_pulls_keep_failing(bus: Bus, tmp_path: Path) -> None:
    engine = ScriptedEngine()
    puller = Puller(engine.place, engine.ranks, PATIENCE_S, weights.secret)
    follower = Follower(
        bus, engine, Status(), "rollout-0", puller, deadline_s=PATIENCE_S, probe_margin=3.0, give_up_s=0.0
    )
    waiting = asyncio.ensure_future(follower.wait_for(PolicyVersion(1)))
    following = asyncio.ensure_future(follower.run())
    await announce_at(bus, tmp_path / "absent", 1, "0" * 64)
    with pytest.raises(NotHere, match="could not pull policy version 1"):
        await asyncio.wait_for(waiting, PATIENCE_S)
    assert follower.gave_up
    await announce(bus, tmp_path, 2)
    await until(lambda: not follower.failing)
    await follower.wait_for(PolicyVersion(1))
    following.cancel()
    await asyncio.wait([following])


async def test_a_scripted_swap_falls_between_two_steps() -> None:
    steps = 0
    engine = ScriptedEngine(lambda *_: ("abc", 1.0), pause=lambda: swap())

    async def swap() -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            await engine.swap(PolicyVersion(8))

    await engine.swap(PolicyVersion(7))
    sampling = Sampling(samples=1, max_new_tokens=3, temperature=1.0)
    group = await engine.generate(GenerationRequest(np.array([49], dtype=np.int32), sampling))
    (sample,) = group.samples
    assert sample.token_ids.tolist() == [97, 98, 99]
    assert sample.version_spans.tolist() == [[0, 7], [2, 8]]
    assert sample.finish_reason is FinishReason.LENGTH


async def test_rates_are_those_of_the_recent_seconds() -> None:
    engine = ScriptedEngine(lambda *_: ("abc", 1.0))
    throughput = Throughput(engine)
    assert throughput.per_second(100.0) == (0.0, 0.0)
    await engine.swap(PolicyVersion(7))
    sampling = Sampling(samples=16, max_new_tokens=4, temperature=1.0)
    throughput.count(Purpose.TRAIN, [await engine.generate(GenerationRequest(np.array([49], np.int32), sampling))])
    assert throughput.per_second(104.0) == (4.0, 16.0)
    engine.drawn_tokens = 84
    assert throughput.per_second(110.0) == (1.6, 8.4)
    assert throughput.per_second(114.0) == (0.0, 2.0), "since 104"


async def test_tokens_of_an_unfinished_sample_are_counted_as_they_are_drawn(bus: Bus, tmp_path: Path) -> None:
    drawn, more = 0, asyncio.Event()

    async def hold() -> None:
        nonlocal drawn
        drawn += 1
        if drawn >= 3:
            await more.wait()

    def counted() -> float:
        return REGISTRY.get_sample_value("penstock_rollout_drawn_tokens_total") or 0.0

    before, status = counted(), Status()
    await announce(bus, tmp_path, 0)
    await put(bus, builders.prompt(1))
    serving = Serving(rollout(bus, ScriptedEngine(lambda *_: ("abcdef", 1.0), pause=hold), status))
    await until(lambda: status.values.get("tokens_per_s", 0.0) > 0)
    await until(lambda: counted() > before)
    assert status.values["samples_per_s"] == 0
    more.set()
    await serving.end()


async def start(folder: Path, server: Server, run_id: str, settings: str) -> asyncio.subprocess.Process:
    config = folder / "run.toml"
    config.write_text(f'[run]\nid = "{run_id}"\n[bus]\nurl = "{server.url}"\n{settings}')
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.services.rollout", "--config", str(config), "--replica", "rollout-0",
        stderr=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip


async def test_a_process_without_a_model_ends_with_one_sentence_and_code_2(tmp_path: Path, server: Server) -> None:
    process = await start(tmp_path, server, "no-model", '[policy]\nmodel = "/no/such/folder"')
    _, errors = await asyncio.wait_for(process.communicate(), 180)
    assert process.returncode == 2
    assert errors.decode().splitlines() == [
        "penstock rollout: no folder in Hugging Face form at '/no/such/folder': change policy.model"
    ]


async def test_a_process_serves_a_real_policy_until_sigterm_and_ends_with_code_0(
    tmp_path: Path, server: Server
) -> None:
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    model = tiny.save(tmp_path / "policy")
    settings = f'[policy]\nmodel = "{model}"\ndtype = "float32"'
    process = await start(tmp_path, server, run_id, settings)
    bus = await Bus.connect(server.url, run_id, wait_s=PATIENCE_S)
    written = write_snapshot(tmp_path, PolicyVersion(0), 0, tiny.model(2).named_parameters(), torch.float32)
    await announce_at(bus, written.location, 0, written.digest)
    await put(bus, builders.prompt(1, "1+2=", samples=3))
    deliveries: list[Delivery[RolloutGroup]] = []
    while not deliveries:
        deliveries = await look(bus)
        assert process.returncode is None
    assert len(deliveries[0].message().samples) == 3
    assert deliveries[0].message().versions == {0}
    await until(lambda: _beats(bus, "rollout", "rollout-0"))
    process.send_signal(signal.SIGTERM)
    _, errors = await asyncio.wait_for(process.communicate(), 180)
    assert process.returncode == 0, errors.decode()
    assert await heartbeats(bus) == []
    await bus.close()


async def _beats(bus: Bus, service: str, replica: str) -> bool:
    return [(beat.service, beat.replica) for beat in await heartbeats(bus)] == [(service, replica)]


async def test_a_replica_keeps_the_evaluated_version_until_its_evaluation_is_over(
    bus: Bus, tmp_path: Path, served: tuple[ScriptedEngine, Status]
) -> None:
    engine, status = served
    await announce(bus, tmp_path, 1)
    await until(lambda: status.version == 1)
    await evaluate(bus, 1, "rollout-0")
    await announce(bus, tmp_path, 2)
    later = dataclasses.replace(builders.prompt(9, samples=1), min_version=PolicyVersion(2))
    await put(bus, later)
    for problem in range(3):
        held_out = builders.prompt(problem, samples=1)
        held_out = dataclasses.replace(held_out, min_version=PolicyVersion(1), purpose=Purpose.EVALUATE)
        await put(bus, held_out, streams.EVAL_PROMPTS)
    groups: list[RolloutGroup] = []
    while len(groups) < 3:
        groups += [delivery.message() for delivery in await take(bus, streams.EVAL_ROLLOUTS)]
    assert {group.versions for group in groups} == {frozenset({1})}
    assert (engine.version, await bus.length(streams.ROLLOUTS)) == (1, 0), "training waits for version 2"
    await raw(bus).delete(bus.keys.named("evaluation"))
    await until(lambda: status.version == 2)
    await until(lambda: _trained(bus))


async def test_an_evaluation_ends_for_a_replica_that_frees_its_weights_when_no_completion_is_left_to_generate(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, status, may = ScriptedEngine(receive=weights.receiving()), Status(), asyncio.Event()
    generate = engine.generate

    async def later(request: GenerationRequest) -> GeneratedGroup:
        await may.wait()
        return await generate(request)

    monkeypatch.setattr(engine, "generate", later)
    replica = rollout(bus, engine, status)
    serving = Serving(replica)
    await announce(bus, tmp_path, 1)
    await until(lambda: status.version == 1)
    await evaluate(bus, 1, "rollout-0")
    await until(lambda: replica._follower._hold.version == 1)
    held_out = builders.prompt(0, samples=1)
    held_out = dataclasses.replace(held_out, min_version=PolicyVersion(1), purpose=Purpose.EVALUATE)
    await put(bus, held_out, streams.EVAL_PROMPTS)
    ended = asyncio.create_task(replica.evaluated())
    await until(lambda: _is_generating(bus))
    assert not ended.done()
    may.set()
    await asyncio.wait_for(ended, PATIENCE_S)
    assert await bus.length(streams.EVAL_ROLLOUTS) == 1, "not scored, for which the device may be needed"
    await serving.end()


async def test_a_replica_that_frees_its_weights_awaits_no_completion_of_a_suspended_one(
    bus: Bus, tmp_path: Path, served: tuple[ScriptedEngine, Status]
) -> None:
    status, cordon = Status(), asyncio.Event()
    replica = rollout(bus, ScriptedEngine(receive=weights.receiving()), status, "rollout-1", taking=cordon)
    serving = Serving(replica)
    await announce(bus, tmp_path, 1)
    await until(lambda: (served[1].version, status.version) == (1, 1))
    held_out = dataclasses.replace(
        builders.prompt(0, samples=1), min_version=PolicyVersion(1), purpose=Purpose.EVALUATE
    )
    await put(bus, held_out, streams.EVAL_PROMPTS)
    await bus.read(streams.EVAL_PROMPTS, Prompt, "rollout-7", 1, 5.0)  # which is suspended with it
    await evaluate(bus, 1, "rollout-1")
    await until(lambda: replica._follower._hold.version == 1)
    await asyncio.wait_for(replica.evaluated(), PATIENCE_S)
    await put(bus, dataclasses.replace(held_out, group_id=GroupId(1)), streams.EVAL_PROMPTS)
    await asyncio.wait_for(replica.evaluated(), PATIENCE_S)  # it takes no work
    cordon.set()
    await asyncio.wait_for(replica.evaluated(), PATIENCE_S)
    assert await bus.length(streams.EVAL_ROLLOUTS) == 1, "what it could take, it generated"
    assert (await bus.depth(streams.EVAL_PROMPTS)).entries == 1
    await bus.give_all_back(streams.EVAL_PROMPTS, "rollout-7")
    await asyncio.wait_for(replica.evaluated(), PATIENCE_S)
    assert await bus.length(streams.EVAL_ROLLOUTS) == 2
    await serving.end()


async def _is_generating(bus: Bus) -> bool:
    return (await bus.depth(streams.EVAL_PROMPTS)).pending == 1


async def _trained(bus: Bus) -> bool:
    return await bus.length(streams.ROLLOUTS) == 1


async def test_a_replica_that_is_not_named_goes_on_to_the_head(
    bus: Bus, tmp_path: Path, served: tuple[ScriptedEngine, Status]
) -> None:
    named = Status()
    serving = Serving(rollout(bus, ScriptedEngine(receive=weights.receiving()), named, "rollout-7"))
    await announce(bus, tmp_path, 1)
    await until(lambda: (served[1].version, named.version) == (1, 1))
    await evaluate(bus, 1, "rollout-7")
    await announce(bus, tmp_path, 2)
    await until(lambda: served[1].version == 2)
    assert named.version == 1
    await raw(bus).delete(bus.keys.named("evaluation"))
    await until(lambda: named.version == 2)
    await serving.end()


async def test_a_version_is_kept_no_longer_than_it_may_be(
    bus: Bus, tmp_path: Path, served: tuple[ScriptedEngine, Status]
) -> None:
    await announce(bus, tmp_path, 1)
    await until(lambda: served[1].version == 1)
    before_s = time.monotonic()
    await evaluate(bus, 1, timeout_s=0.5)
    await announce(bus, tmp_path, 2)
    await until(lambda: served[1].version == 2)
    assert time.monotonic() - before_s >= 0.5, "and no shorter"


async def test_a_replica_that_starts_during_an_evaluation_pulls_its_version_where_a_source_has_it(
    bus: Bus, tmp_path: Path
) -> None:
    location = await announce(bus, tmp_path, 1)
    (_, told), *_ = await bus.newest(streams.POLICY, PolicyUpdate)
    assert told.record.location == str(location)
    await raw(bus).hset(bus.keys.named("policies"), "1", wire.encode(told.record))
    await announce(bus, tmp_path, 2)
    await evaluate(bus, 1)
    status = Status()
    serving = Serving(rollout(bus, ScriptedEngine(receive=weights.receiving()), status))
    await until(lambda: status.version == 1)
    await raw(bus).delete(bus.keys.named("evaluation"))
    await until(lambda: status.version == 2)
    await serving.end()


async def test_a_replica_that_cannot_get_the_evaluated_version_goes_to_the_head(
    bus: Bus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    gone = PolicyRecord(PolicyVersion(1), None, 1, 0.0, "ab" * 32, str(tmp_path / "gone"))
    await raw(bus).hset(bus.keys.named("policies"), "1", wire.encode(gone))
    await announce(bus, tmp_path, 2)
    await evaluate(bus, 1)
    status = Status()
    serving = Serving(rollout(bus, ScriptedEngine(receive=weights.receiving()), status))
    await until(lambda: status.version == 2)
    await serving.end()
    assert {vars(record)["version"] for record in caplog.records if record.message == "source failed"} == {1}


async def test_evaluation_takes_the_room_that_training_leaves_and_never_starves() -> None:
    precedence, order = Precedence(8), list[str]()

    async def hold(name: str, samples: int, until_set: asyncio.Event, *, training: bool) -> None:
        async with precedence.turn(samples, training=training):
            order.append(name)
            await until_set.wait()

    done, second = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hold("training", 6, done, training=True))
        await asyncio.sleep(0)
        tasks.create_task(hold("first of two", 2, second, training=False))
        tasks.create_task(hold("no room", 1, done, training=False))
        await until(lambda: len(order) == 2)
        tasks.create_task(hold("more training", 8, done, training=True))
        await until(lambda: len(order) == 3)
        second.set()
        await until(lambda: len(order) == 4)
        done.set()
    assert order == ["training", "first of two", "more training", "no room"]


async def admit(bus: Bus, *groups: Prompt) -> None:
    state = {"state": "running", "cursor": 0, "newest_version": 0, "step": 0}
    await raw(bus).hset(bus.keys.named("run"), mapping=state)
    assert await Ledger(bus).admit(groups, 8, 8, 10, PolicyVersion(0)) == len(groups)


class Waves(ScriptedEngine):
    """The request ``n`` begins in the wave ``of[n]``; ``failing`` fails. Notes the seeds."""

    def __init__(self, of: list[int], failing: int) -> None:
        super().__init__(receive=weights.receiving())
        self.of, self.failing = of, failing
        self.begun = [asyncio.Event() for _ in range(max(of) + 1)]
        self.begun[0].set()
        self.seeds: list[int] = []

    async def generate(self, request: GenerationRequest) -> GeneratedGroup:
        asked = len(self.seeds)
        self.seeds.append(request.seed)
        if asked < len(self.of):
            await self.begun[self.of[asked]].wait()
        if asked == self.failing:
            raise RuntimeError("a bad moment")
        return await super().generate(request)


async def test_a_replica_reads_a_part_of_its_room_in_whole_groups(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: dict[str, set[int]] = {}
    read = Bus.read

    async def noted(self: Bus, stream: Stream, kind: type[Any], consumer: str, count: int, block_s: float) -> Any:
        counts.setdefault(stream.name, set()).add(count)
        return await read(self, stream, kind, consumer, count, block_s)

    async def is_read() -> bool:
        return streams.PROMPTS.name in counts

    monkeypatch.setattr(Bus, "read", noted)
    await announce(bus, tmp_path, 0)
    serving = Serving(rollout(bus, ScriptedEngine(receive=weights.receiving()), group_size=6))
    await until(is_read)
    await serving.end()
    assert counts[streams.PROMPTS.name] == {6}


async def test_samples_that_end_together_travel_together_and_one_that_fails_is_redone_alone(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_over: list[list[str]] = []
    hand_over = Bus._hand_over
    engine = Waves([0, 2, 0, 2, 0, 1], failing=4)

    async def noted(self: Bus, deliveries: Any, output: Stream, payload: bytes) -> bool:
        handed_over.append([delivery.part for delivery in deliveries])
        done = await hand_over(self, deliveries, output, payload)
        for begun in engine.begun[: len(handed_over) + 1]:
            begun.set()
        return done

    monkeypatch.setattr(Bus, "_hand_over", noted)
    prompt = builders.prompt(0, samples=6)
    await admit(bus, prompt)
    await announce(bus, tmp_path, 0)
    serving = Serving(rollout(bus, engine, group_size=6))
    (delivery,) = await take(bus)
    await serving.end()
    assert handed_over == [["0", "2"], ["5"], ["1", "3"], ["4"]]
    seeds = [seed_of(0, dataclasses.replace(prompt, sample=place)) for place in range(6)]
    assert engine.seeds == [*seeds, seeds[4]]
    group = delivery.message()
    assert (group.prompt, group.places, len(group.samples)) == (prompt, (), 6)
    assert {sample.text for sample in group.samples} <= {"46", "47"}


def test_a_groups_seed_is_its_own_and_the_same_at_every_delivery() -> None:
    prompt = builders.prompt(7)
    evaluated = dataclasses.replace(prompt, purpose=Purpose.EVALUATE)
    again = dataclasses.replace(prompt, requeues=1, min_version=PolicyVersion(3), admitted_at_s=9.0)
    assert seed_of(0, prompt) == seed_of(0, again)
    assert len({seed_of(0, prompt), seed_of(1, prompt), seed_of(0, builders.prompt(8)), seed_of(0, evaluated)}) == 4
    samples = [seed_of(0, dataclasses.replace(prompt, sample=place)) for place in range(3)]
    assert seeds_of(0, prompt, [2, 0]) == [samples[2], samples[0]]
    assert len({seed_of(0, prompt), *samples}) == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"group_id": 9}, "group 9 was not admitted: only the first 9 were"),
        ({"min_version": 5}, "the prompt waits for version 5, but the newest is 4"),
        ({"purpose": Purpose.EVALUATE}, "expected a prompt to train on this stream, found one to evaluate"),
        ({"sampling": Sampling(samples=1025, max_new_tokens=4, temperature=1.0)}, "expected at most 1024 samples"),
    ],
)
async def test_a_prompt_that_cannot_be_one_of_the_run_is_refused(bus: Bus, change: dict[str, Any], reason: str) -> None:
    await raw(bus).hset(bus.keys.named("run"), mapping={"cursor": 9, "newest_version": 4})
    settings = Settings()
    plausibility = Plausibility(bus, settings, Live(bus, settings).refresh)
    await plausibility.check(builders.prompt(8, min_version=4), Purpose.TRAIN)
    with pytest.raises(PermanentError, match=reason):
        await plausibility.check(dataclasses.replace(builders.prompt(8), **change), Purpose.TRAIN)


async def test_a_prompt_is_taken_for_one_of_the_run_where_the_bus_came_back_empty(bus: Bus) -> None:
    settings = Settings()
    plausibility = Plausibility(bus, settings, Live(bus, settings).refresh)
    await plausibility.check(builders.prompt(8, min_version=4), Purpose.TRAIN)
