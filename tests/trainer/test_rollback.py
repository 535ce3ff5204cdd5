"""Rollbacks: the abandoned branch is neither trained on nor served; the run continues."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.services.coordinator.api.app import make_app
from penstock.services.coordinator.service import Coordinator
from penstock.services.trainer.checkpoint.local_store import Checkpoint
from penstock.services.trainer.checkpoint.manifests import CheckpointState
from penstock.services.trainer.rank0.resume import may_load
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Event, Experience, PolicyRecord, PolicyVersion
from penstock.shared.bus.stores.experience.signals import read_signals
from penstock.shared.bus.stores.policy.exports import Exports
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.policy.policies import PolicyState
from penstock.shared.bus.stores.policy.rollback import Rollback, Stage, begin_rollback, descendants
from penstock.shared.bus.stores.run.operations import OperationState
from penstock.shared.process.telemetry import Presence, Status
from penstock.shared.weights.format.snapshot import read_snapshot
from tests.chaos.run import TcpServer
from tests.conftest import PATIENCE_S, Server, until
from tests.support.coordinator_players import Trainer, generating, make, record, replicas, report, running, settings
from tests.support.fault_proxy import FaultProxy
from tests.support.raw_redis import raw, script_text
from tests.trainer.test_service import GROUPS, Run, bus_of, feed, versions

V = PolicyVersion


def test_a_versions_descendants_are_its_whole_branch() -> None:
    family = [(0, None), (1, 0), (2, 1), (3, 2), (4, 1), (5, 4), (6, 2)]
    records = [record(version, parent, 0) for version, parent in reversed(family)]
    assert descendants(records, V(2)) == [3, 6]
    assert descendants(records, V(1)) == [2, 3, 4, 5, 6]
    assert descendants(records, V(6)) == []


@contextlib.asynccontextmanager
async def replica(bus: Bus, version: int) -> AsyncIterator[Status]:
    status = Status(state="working", version=V(version))
    done = asyncio.Event()
    beating = asyncio.create_task(Presence(bus, "rollout", "rollout-0", 0.5, status).run(done))
    try:
        yield status
    finally:
        done.set()
        await beating


@contextlib.asynccontextmanager
async def at_step(bus: Bus, folder: Path, step: int, checkpoint: int) -> AsyncIterator[tuple[Coordinator, Trainer]]:
    """A run of two groups a step with a checkpoint of step ``checkpoint``; the test is the trainer."""
    ledger = Ledger(bus)
    await ledger.create()
    async with running(make(bus, settings(folder, steps=50))) as parts, replicas(bus):
        trainer = await Trainer(bus).start()
        for _ in range(step):
            await trainer.step()
        await ledger.set_checkpoint(V(checkpoint), f"/checkpoints/step-{checkpoint:06d}")
        await until(lambda: _head_is(ledger, step))
        yield parts, trainer


async def _head_is(ledger: Ledger, version: int) -> bool:
    return (await ledger.status()).head == version


async def _load_and_publish(bus: Bus) -> PolicyRecord:
    ledger = Ledger(bus)
    epoch = await ledger.take_epoch()
    status = await ledger.status()
    assert status.newest_version is not None
    published = record(status.newest_version + 1, status.tip, status.step)
    await ledger.commit(epoch, published, [], None)
    return published


async def _current(parts: Coordinator) -> Rollback:
    rollback = await parts.rollbacks.current()
    assert rollback is not None
    return rollback


async def _stage(parts: Coordinator) -> Stage:
    return (await _current(parts)).stage


async def test_a_rollback_fences_its_branch_at_once_and_the_run_goes_on_as_a_new_one(bus: Bus, tmp_path: Path) -> None:
    ledger = Ledger(bus)
    async with at_step(bus, tmp_path, 5, checkpoint=2) as (parts, trainer), replica(bus, 5) as serving:
        await parts.rollbacks.begin(V(2), "it forgot how to stop")
        begun = await _current(parts)
        status = await ledger.status()
        assert (status.state, status.step, status.tip, status.newest_version) == (RunState.PAUSED, 2, 2, 5)
        assert status.reason == "rolling back to version 2: it forgot how to stop"
        assert await ledger.revoked() == {3, 4, 5}
        counts = await bus.counts()
        assert (counts["trained"], counts["undone"]) == (2 * 2, 3 * 2)
        assert await bus.length(streams.JOURNAL) == 0
        assert (begun.revoked, begun.undone, begun.from_step, begun.resumes) == (3, 6, 5, True)
        with pytest.raises(Exception, match="fenced"):
            await ledger.commit(trainer.epoch, record(6, 5, 5), [], None)

        published = await _load_and_publish(bus)
        assert (published.version, published.parent, published.step) == (6, 2, 2)
        await until(lambda: _head_is(ledger, 6))
        await until(lambda: _is(parts, Stage.PULLING))
        assert (await ledger.status()).state is RunState.PAUSED, "its replica serves version 5 still"
        serving.version = V(6)
        await until(lambda: _is(parts, Stage.LIVE))
        status = await ledger.status()
        assert (status.state, status.reason) == (
            RunState.RUNNING,
            "rolled back to version 2, as version 6: it forgot how to stop",
        )
        states = await ledger.policy_states()
        assert [states[V(version)] for version in range(7)] == [
            PolicyState.RETIRED, PolicyState.RETIRED, PolicyState.RETIRED,
            PolicyState.REVOKED, PolicyState.REVOKED, PolicyState.REVOKED, PolicyState.LIVE,
        ]  # fmt: skip


async def _is(parts: Coordinator, stage: Stage) -> bool:
    return await _stage(parts) is stage


async def test_the_dataset_goes_on_at_the_first_prompt_that_was_not_trained_under_new_group_ids(
    bus: Bus, tmp_path: Path
) -> None:
    ledger = Ledger(bus)
    run = settings(tmp_path, steps=50, problems=100, data={"path": tmp_path / "train.jsonl", "shuffle": False})
    await ledger.create()
    async with running(make(bus, run)) as parts:
        trainer = await Trainer(bus).start()
        async with replicas(bus):
            for _ in range(5):
                await trainer.step()
            await until(lambda: _length(bus, streams.EXPERIENCE, 4))
        await ledger.set_checkpoint(V(3), "/checkpoints/step-000003")
        cursor = (await ledger.status()).cursor
        assert cursor == 5 * 2 + 4
        await parts.rollbacks.begin(V(3), "")
        for delivery in await bus.read(streams.EXPERIENCE, Experience, "trainer", 10, None):
            await bus.drop(delivery, "fenced", "")
        await _load_and_publish(bus)
        async with replica(bus, 6):
            await until(lambda: _length(bus, streams.PROMPTS, 8))
        prompts = await generating(bus)
        assert [prompt.group_id for prompt in prompts] == [14, 15, 16, 17]
        assert [prompt.answer for prompt in prompts] == ["12", "14", "16", "18"], (
            "problems 6 to 9: three steps took six"
        )
        assert {prompt.min_version for prompt in prompts} == {6}
        counts = await bus.counts()
        ended = sum(count for name, count in counts.items() if name != "requeued")
        assert ended + 4 == (await ledger.status()).cursor == 18, "every admitted group has one ending or is in flight"


async def _length(bus: Bus, stream: streams.Stream, length: int) -> bool:
    return await bus.length(stream) == length


async def test_a_version_published_before_the_rollback_is_never_promoted_after_it(bus: Bus, tmp_path: Path) -> None:
    ledger = Ledger(bus)
    await ledger.create()
    run = settings(tmp_path, steps=50)
    async with running(make(bus, run)), replicas(bus):
        trainer = await Trainer(bus).start()
        for _ in range(2):
            await trainer.step()
        await until(lambda: _head_is(ledger, 2))
        await until(lambda: _length(bus, streams.EXPERIENCE, run.slots))
    await ledger.set_checkpoint(V(1), "/checkpoints/step-000001")
    batch = await bus.read(streams.EXPERIENCE, Experience, "trainer", 2, 5.0)
    await ledger.commit(trainer.epoch, record(3, 2, 3), batch, report(3, 3))
    parts = make(bus, run)
    await parts.rollbacks.begin(V(1), "")
    async with running(parts):
        await until(lambda: _length(bus, streams.PUBLISHED, 0))
        assert (await ledger.status()).head == 2
        await _load_and_publish(bus)
        await until(lambda: _head_is(ledger, 4))
        assert (await ledger.policy_states())[V(3)] is PolicyState.REVOKED


@pytest.fixture
async def ready(bus: Bus, tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Coordinator]]:
    async with at_step(bus, tmp_path, 4, checkpoint=2) as (parts, _):
        transport = httpx.ASGITransport(make_app(parts.api))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client, parts


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [
        (9, 404, "this run has no policy version 9; it has versions up to 4"),
        (4, 409, "version 4 is the newest: roll back to an earlier one; roll back to one of 2"),
        (3, 409, "version 3 has no checkpoint; roll back to one of 2"),
    ],
)
async def test_a_rollback_that_cannot_be_changes_nothing_and_says_where_one_can_go(
    ready: tuple[httpx.AsyncClient, Coordinator], bus: Bus, version: int, status: int, words: str
) -> None:
    http, _ = ready
    answer = await http.post(f"/v1/policies/{version}/rollback")
    assert answer.status_code == status
    assert words in answer.json()["detail"]
    assert (await Ledger(bus).status()).state is RunState.RUNNING
    assert (await http.get("/v1/operations")).json()["items"] == []


async def test_the_newest_version_is_not_among_those_to_which_one_can_go(
    ready: tuple[httpx.AsyncClient, Coordinator], bus: Bus
) -> None:
    http, _ = ready
    await Ledger(bus).set_checkpoint(V(4), "/checkpoints/step-000004")
    newest, absent = [(await http.post(f"/v1/policies/{version}/rollback")).json()["detail"] for version in (4, 3)]
    assert newest == "version 4 is the newest: roll back to an earlier one; roll back to one of 2"
    assert absent.startswith("version 3 has no checkpoint; roll back to one of 2 (")


async def test_one_rollback_at_a_time_and_the_same_again_is_the_same(
    ready: tuple[httpx.AsyncClient, Coordinator], bus: Bus
) -> None:
    http, parts = ready
    await Ledger(bus).set_checkpoint(V(1), "/checkpoints/step-000001")
    first = await http.post("/v1/policies/2/rollback", json={"reason": "worse"})
    assert (first.status_code, first.headers["Location"]) == (202, "/v1/operations/1")
    assert (first.json()["kind"], first.json()["phase"]) == ("rollback", "loading")
    again = await http.post("/v1/policies/2/rollback")
    assert again.json()["id"] == first.json()["id"]
    ledger, status = Ledger(bus), await Ledger(bus).status()
    target = await ledger.policy(V(1))
    assert target is not None
    assert await begin_rollback(bus, ledger, status, target, "asked at the same time") == "busy"
    other = await http.post("/v1/policies/1/rollback")
    assert other.status_code == 409
    assert "a rollback to version 2 is in progress (loading)" in other.json()["detail"]
    resumed = await http.post("/v1/run/resume")
    assert resumed.status_code == 409
    assert "rollback to version 2 is in progress (loading)" in resumed.json()["detail"]

    await _load_and_publish(bus)
    async with replica(bus, 5):
        await until(lambda: _is(parts, Stage.LIVE))
    await until(lambda: _ended(http))
    operation = (await http.get("/v1/operations/1")).json()
    assert (operation["state"], operation["result"]) == ("succeeded", {"version": 5, "revoked": 2, "undone": 4})
    revoked = await http.post("/v1/policies/4/rollback")
    assert revoked.status_code == 409
    assert "version 4 is revoked: a rollback left its branch; roll back to one of 1, 2" in revoked.json()["detail"]
    second = await http.post("/v1/policies/1/rollback")
    assert second.status_code == 202
    assert await Ledger(bus).revoked() == {2, 3, 4, 5}


async def _ended(http: httpx.AsyncClient) -> bool:
    return bool((await http.get("/v1/operations/1")).json()["state"] != "running")


async def test_a_rollback_whose_coordinator_died_at_once_is_seen_through_by_the_next(bus: Bus, tmp_path: Path) -> None:
    async with at_step(bus, tmp_path, 3, checkpoint=1) as (parts, _):
        pass
    await parts.rollbacks._begin(V(1), "")  # and no more of it
    async with running(make(bus, settings(tmp_path, steps=50))) as after, replica(bus, 4):
        await _load_and_publish(bus)
        await until(lambda: _is(after, Stage.LIVE))
        await until(lambda: _succeeded(after))


async def _succeeded(parts: Coordinator) -> bool:
    operations = await parts.operations.all()
    return [operation.state for operation in operations] == [OperationState.SUCCEEDED]


async def test_a_rollback_whose_answer_is_lost_on_the_wire_is_done_once_and_told_once(tmp_path: Path) -> None:
    server = TcpServer(tmp_path / "valkey")
    server.start()
    proxy = FaultProxy("127.0.0.1", server.port)
    try:
        bus = await Bus.connect(f"redis://127.0.0.1:{await proxy.start()}", "lost", wait_s=PATIENCE_S)
        async with at_step(bus, tmp_path, 3, checkpoint=1) as (parts, _):
            await raw(bus).script_load(script_text("roll_back"))
            proxy.cut_reply_to(b"rolling back to version 1: worse")
            begun = await parts.rollbacks.begin(V(1), "worse")
            assert proxy.done["torn"] == 1, "the script ran, and its answer was lost"
            again = await parts.rollbacks.begin(V(1), "worse")
            assert (begun.id, again.id) == (1, 1)
        told = [event for _, event in await bus.newest(streams.EVENTS, Event, 100) if event.source == "rollback"]
        assert [(event.name, event.detail, event.fields) for event in told] == [
            ("rollback begun", "rolling back to version 1: worse; from step 3: 2 versions revoked, 4 groups undone", {"target": 1})
        ]  # fmt: skip
        assert (await bus.counts())["undone"] == 4
        await bus.close()
    finally:
        await proxy.close()
        server.kill()


async def test_a_run_that_is_paused_meanwhile_stays_paused(
    ready: tuple[httpx.AsyncClient, Coordinator], bus: Bus
) -> None:
    http, parts = ready
    await http.post("/v1/policies/2/rollback")
    assert (await http.post("/v1/run/pause", json={"reason": "I look at it"})).status_code == 200
    await _load_and_publish(bus)
    async with replica(bus, 5):
        await until(lambda: _is(parts, Stage.LIVE))
    status = await Ledger(bus).status()
    kept = "on request: I look at it; rolled back to version 2, as version "
    assert (status.state, status.reason) == (RunState.PAUSED, f"{kept}5")
    await http.post("/v1/policies/2/rollback")
    assert (await _current(parts)).revoked == 1, "the first branch was revoked before"
    await _load_and_publish(bus)
    async with replica(bus, 6):
        await until(lambda: _is(parts, Stage.LIVE))
    status = await Ledger(bus).status()
    assert (status.state, status.reason) == (RunState.PAUSED, f"{kept}6")
    assert (await http.post("/v1/run/resume")).status_code == 200


async def test_stopping_the_run_ends_the_rollback(ready: tuple[httpx.AsyncClient, Coordinator]) -> None:
    http, parts = ready
    await http.post("/v1/policies/2/rollback")
    await http.post("/v1/run/stop")
    await until(lambda: _is(parts, Stage.FAILED))
    assert (await _current(parts)).detail == "the run was stopped"
    assert (await http.post("/v1/policies/2/rollback")).status_code == 409


async def test_a_checkpoint_that_cannot_be_loaded_ends_the_rollback_and_may_be_gone_back_to_again_once_it_is_mended(
    ready: tuple[httpx.AsyncClient, Coordinator], bus: Bus
) -> None:
    http, parts = ready
    await http.post("/v1/policies/2/rollback")
    other, checkpoint = (_checkpoint(step) for step in (1, 2))
    assert [await may_load(bus, checkpoint) for _ in range(4)] == [True, True, True, False]
    assert await may_load(bus, other), "no rollback goes back to it"
    await until(lambda: _ended(http))
    operation = (await http.get("/v1/operations/1")).json()
    assert operation["state"] == "failed"
    assert operation["detail"].startswith(
        "the trainer ended 3 times while it loaded the checkpoint /checkpoints/step-000002: it is larger than"
    )
    status = await Ledger(bus).status()
    assert status.state is RunState.PAUSED
    assert status.reason.startswith(
        "rollback to version 2 failed: the trainer ended 3 times while it loaded the checkpoint /checkpoints/step-000002"
    )
    refused = await http.post("/v1/run/resume")
    assert refused.status_code == 409
    assert (
        "the rollback to version 2 failed: roll back to another version, or to this one again"
        in refused.json()["detail"]
    )
    assert not await may_load(bus, checkpoint), "a trainer that starts again waits"

    assert (await http.post("/v1/policies/2/rollback")).json()["id"] == 2
    assert await may_load(bus, checkpoint)
    await _load_and_publish(bus)
    async with replica(bus, 5):
        await until(lambda: _is(parts, Stage.LIVE))
    assert (await http.post("/v1/run/resume")).status_code == 200


def _checkpoint(step: int) -> Checkpoint:
    state = CheckpointState(step, V(step), cursor=0, journal_entry="", ranks=1, zero_stage=1, random_state="")
    return Checkpoint(Path(f"/checkpoints/step-{step:06d}"), state)


async def test_a_checkpoint_that_a_rollback_goes_back_to_is_not_deleted(bus: Bus, tmp_path: Path) -> None:
    ledger = Ledger(bus)
    async with at_step(bus, tmp_path, 3, checkpoint=1) as (parts, _):
        await ledger.set_checkpoint(V(2), "/checkpoints/step-000002")
        await parts.rollbacks.begin(V(1), "")
        assert not await ledger.forget_checkpoint("/checkpoints/step-000001")
        assert await ledger.forget_checkpoint("/checkpoints/step-000002")
        assert await ledger.checkpoints() == {1: "/checkpoints/step-000001"}


async def _begin(bus: Bus, ledger: Ledger, folder: Path, target: int) -> None:
    await ledger.transition(RunState.RUNNING, "test", [RunState.CREATED])
    await make(bus, settings(folder)).rollbacks.begin(V(target), "")


def _weights(record: PolicyRecord | None) -> dict[str, torch.Tensor]:
    assert record is not None
    return read_snapshot(Path(record.location), record.manifest_digest)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "zero_stage"), [(1, 1), (2, 3)])
async def test_the_trainer_goes_back_without_a_restart_and_repeats_its_step_bit_for_bit(
    tmp_path: Path, server: Server, ranks: int, zero_stage: int
) -> None:
    run = Run(tmp_path, server, f"back-{ranks}", ranks=ranks, zero_stage=zero_stage)
    async with bus_of(run) as (bus, ledger), run.trainer() as process:
        await feed(bus, 0, 2 * GROUPS)
        await run.reaches(ledger, 2, process)
        signals = await read_signals(bus)
        await feed(bus, 2 * GROUPS, 2 * GROUPS)
        await run.reaches(ledger, 4, process)
        await until(lambda: _has_checkpoint(ledger, 4))
        assert (len(signals), len(await read_signals(bus))) == (2 * GROUPS, 4 * GROUPS)
        second, third = _weights(await ledger.policy(V(2))), _weights(await ledger.policy(V(3)))
        await _begin(bus, ledger, tmp_path, 2)
        await until(lambda: _newest_is(ledger, 5))
        await until(lambda: _has_checkpoint(ledger, 5))
        assert await ledger.checkpoints() == {2: str(_folder(run, 2)), 5: str(_folder(run, 2))}
        await until(lambda: not _folder(run, 4).exists())
        assert await read_signals(bus) == signals, "to the bit"
        again = _weights(await ledger.policy(V(5)))
        assert all(torch.equal(again[name], second[name]) for name in second)

        await feed(bus, 4 * GROUPS, GROUPS, like=2 * GROUPS)  # what the third step had
        await until(lambda: _newest_is(ledger, 6))
        repeated = _weights(await ledger.policy(V(6)))
        assert all(torch.equal(repeated[name], third[name]) for name in third), "optimizer and schedule went back too"
        assert (await versions(ledger))[4:] == [(4, 3, 4), (5, 2, 2), (6, 5, 3)]
        if ranks == 2:  # several ranks export in a separate process
            await Exports(bus).place(1, V(5), adapter=False)
            await until(lambda: _exported(bus))
            folder = _folder(run, 2).parent.parent / "exports" / "v000005"
            exported = load_file(folder / "model.safetensors")
            assert all(torch.equal(tensor, second[name]) for name, tensor in exported.items())
        assert process.poll() is None
        await run.stops(process)


@pytest.mark.slow
async def test_a_trainer_that_cannot_load_the_checkpoint_of_a_rollback_waits_until_it_is_mended(
    tmp_path: Path, server: Server
) -> None:
    run = Run(tmp_path, server, "damaged")
    async with bus_of(run) as (bus, ledger):
        await feed(bus, 0, 2 * GROUPS)
        async with run.trainer() as process:
            await run.reaches(ledger, 2, process)
            await until(lambda: _has_checkpoint(ledger, 2))
            (file,) = (_folder(run, 2) / "engine").rglob("mp_rank_00_model_states.pt")
            whole = file.read_bytes()
            file.write_bytes(whole[: len(whole) // 2])
            await feed(bus, 2 * GROUPS, GROUPS)
            await run.reaches(ledger, 3, process)
            await _begin(bus, ledger, tmp_path, 2)
            await until(lambda: _is_given_up(bus))
            await make(bus, settings(tmp_path)).rollbacks.advance()
            file.write_bytes(whole)
            await make(bus, settings(tmp_path)).rollbacks.begin(V(2), "mended")
            await until(lambda: _newest_is(ledger, 4))
            assert (await versions(ledger))[3:] == [(3, 2, 3), (4, 2, 2)]
            assert process.poll() is None, "it never died"
            await run.stops(process)


async def _is_given_up(bus: Bus) -> bool:
    return bool(await raw(bus).hget(bus.keys.named("rollback"), "unloadable"))


async def _exported(bus: Bus) -> bool:
    order = await Exports(bus).look(1)
    assert order is not None
    assert order.answer is None or order.answer.done, order.answer
    return order.answer is not None


async def _has_checkpoint(ledger: Ledger, version: int) -> bool:
    return V(version) in await ledger.checkpoints()


async def _newest_is(ledger: Ledger, version: int) -> bool:
    return (await ledger.status()).newest_version == version


def _folder(run: Run, step: int) -> Path:
    return run.folder / "runs" / run.run_id / "checkpoints" / f"step-{step:06d}"


@pytest.mark.slow
async def test_a_trainer_that_was_dead_when_the_run_was_rolled_back_starts_at_the_target_and_fences_the_branch(
    tmp_path: Path, server: Server
) -> None:
    run = Run(tmp_path, server, "dead")
    async with bus_of(run) as (bus, ledger):
        await feed(bus, 0, 4 * GROUPS)
        async with run.trainer() as process:
            await run.reaches(ledger, 4, process)
            await until(lambda: _has_checkpoint(ledger, 4))
        await _begin(bus, ledger, tmp_path, 2)
        for group_id in range(20, 20 + GROUPS):
            await bus.append(streams.EXPERIENCE, {"id": str(group_id), "data": _written_by(group_id, 4)})
        async with run.trainer() as process:
            await until(lambda: _newest_is(ledger, 5))
            await feed(bus, 30, GROUPS)
            await run.reaches(ledger, 3, process)
            assert (await bus.counts())["dropped:fenced"] == GROUPS
            assert (await bus.counts())["trained"] == 3 * GROUPS
            await run.stops(process)


def _written_by(group_id: int, version: int) -> bytes:
    from tests.trainer.test_service import experience

    made = experience(group_id, version=version)
    assert {int(np.max(sample.version_spans[:, 1])) for sample in made.group.samples} == {version}
    return wire.encode(made)
