"""Rank 0's driver: steps, checkpoints and failures."""

import asyncio
import contextlib
import dataclasses
import errno
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.client.views import READY_STATES
from penstock.services.coordinator.run.lifecycle import drain
from penstock.services.trainer.algorithm import update
from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.commits import read_commits
from penstock.services.trainer.checkpoint.manifests import CheckpointState
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.model.saving.writer import Writer, Written
from penstock.services.trainer.rank0.branch import Branch
from penstock.services.trainer.rank0.driver import Driver
from penstock.services.trainer.rank0.intake import Taken
from penstock.services.trainer.rank0.mailbox.commands import Command, CommandKind
from penstock.services.trainer.rank0.mailbox.queues import Mailbox
from penstock.services.trainer.rank0.mailbox.results import ModelLoaded, Published, Replayed, Result, Saved, Whereabouts
from penstock.services.trainer.rank0.retention import Retention
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Experience, GroupId, PolicyRecord, StepReport
from penstock.shared.bus.stores.policy.ledger import RunState
from penstock.shared.bus.streams import EXPERIENCE, STEPS
from penstock.shared.errors import Fenced, SettingsError
from penstock.shared.process.service import readiness
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings
from penstock.shared.settings.trainer import TrainerSettings
from tests.conftest import until
from tests.support.driven import Driven, settings_of
from tests.support.raw_redis import empty, raw
from tests.trainer.algorithm import test_update
from tests.trainer.algorithm.test_update import GROUPS, Rank
from tests.trainer.checkpoint.test_store import written

pytestmark = pytest.mark.usefixtures("one_rank")


def settings(bus: Bus, folder: Path, **trainer: Any) -> Settings:
    return settings_of(bus, folder, test_update.settings(advantage="dr_grpo", max_lag=8), **trainer)


def batch(number: int) -> list[Experience]:
    made = []
    for offset, group in enumerate(test_update.batch()):
        prompt = dataclasses.replace(group.group.prompt, group_id=GroupId(number * GROUPS + offset))
        made.append(dataclasses.replace(group, group=dataclasses.replace(group.group, prompt=prompt)))
    return made


def poison(groups: list[Experience]) -> list[Experience]:
    """Valid groups whose gradient overflows float32."""
    rewards = np.array([3e38, -3e38, 3e38, -3e38], dtype=np.float32)
    return [dataclasses.replace(group, rewards=rewards) for group in groups]


async def created(bus: Bus, folder: Path, **trainer: Any) -> tuple[Driven, Rank]:
    driven = Driven(bus, settings(bus, folder, **trainer))
    await driven.ledger.create()
    await driven.ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    return driven, Rank(driven.of)


async def is_at(driven: Driven, step: int) -> None:
    async def reached() -> bool:
        return await driven.step() >= step

    await until(reached)


async def rolled_back(driven: Driven) -> int:
    """End the trainer's epoch as a rollback does, and return the next."""
    epoch = (await driven.ledger.status()).trainer_epoch + 1
    fields = {"trainer_epoch": epoch, "rollback_epoch": epoch}
    await raw(driven.bus).hset(driven.bus.keys.named("run"), mapping=fields)
    return epoch


@contextlib.asynccontextmanager
async def after_a_step(bus: Bus, folder: Path) -> AsyncIterator[tuple[Driven, "asyncio.Future[Any]"]]:
    """Yield a driver that has made its first step, and how it and its training end."""
    driven, trained = await created(bus, folder)
    async with driven.running(lambda: driven.train(trained.engine)) as both:
        await driven.feed(batch(0))
        await is_at(driven, 1)
        yield driven, both


async def has(driven: Driven, event: str) -> None:
    async def told() -> bool:
        return event in await driven.events()

    await until(told)


async def test_the_largest_peak_of_the_trainer_s_steps_is_reported(bus: Bus, tmp_path: Path) -> None:
    async with after_a_step(bus, tmp_path) as (driven, _):
        values = driven.context.status.values
        await until(lambda: values.get("memory_peak", 0.0) > 0.0)
        values["memory_peak"] = 1e18
        await driven.feed(batch(1))
        await is_at(driven, 2)
        await until(lambda: values.get("step") == 2.0)
    assert values["memory_peak"] == 1e18


async def test_a_trainer_passes_its_startup_probe_before_it_loads_and_replays_but_is_not_yet_ready_for_penstock_up() -> (
    None
):
    status, seen = Status(), []

    async def ask(command: Command, _kind: type[Result]) -> Result:
        seen.append((command.kind, readiness(status, bus_available=True)["ready"], status.state in READY_STATES))
        return Result()

    driver = SimpleNamespace(
        _opening=SimpleNamespace(loaded=None, restored=False), _context=SimpleNamespace(status=status), _ask=ask
    )
    assert readiness(status, bus_available=True)["ready"] is False
    await Driver._open(driver, [Command(CommandKind.LOAD), Command(CommandKind.REPLAY)])  # type: ignore[arg-type]
    assert seen == [(CommandKind.LOAD, True, False), (CommandKind.REPLAY, True, False)]


async def test_a_batch_that_is_not_finite_is_skipped_and_the_next_one_makes_the_step(bus: Bus, tmp_path: Path) -> None:
    async with after_a_step(bus, tmp_path) as (driven, _):
        await driven.feed(poison(batch(1)))
        await has(driven, "batch skipped")
        await driven.feed(batch(2))
        await is_at(driven, 2)
    assert await bus.counts() == {"trained": 2 * GROUPS, "dropped:nonfinite": GROUPS}


@pytest.mark.parametrize(("dynamic", "trained_equal", "share"), [(True, 0, 2 / 3), (False, 1, 0.5)])
async def test_a_step_reports_the_share_of_groups_with_signal_of_all_that_were_generated(
    bus: Bus, tmp_path: Path, dynamic: bool, trained_equal: int, share: float
) -> None:
    tables = settings(bus, tmp_path).model_dump()
    tables["algorithm"] |= {"dynamic_sampling": dynamic, "groups_per_step": 2}
    driven = Driven(bus, Settings.model_validate(tables))
    await driven.ledger.create()
    await driven.ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    equal, *others = [*batch(0), *batch(1)][:3]
    equal = dataclasses.replace(equal, rewards=np.zeros_like(equal.rewards))
    async with driven.running(lambda: driven.train(Rank(driven.of).engine)):
        await driven.feed([equal, *others])
        await is_at(driven, 1)
    (_, report) = (await bus.newest(STEPS, StepReport))[0]
    assert report.metrics["zero_std_groups"] == trained_equal
    assert report.metrics["signal_fraction"] == pytest.approx(share)


async def test_stale_tokens_are_masked_reported_and_masked_again_in_a_replay(bus: Bus, tmp_path: Path) -> None:
    tables = settings(bus, tmp_path).model_dump()
    tables["algorithm"] |= {"max_lag": 1, "on_stale": "mask"}
    driven = Driven(bus, Settings.model_validate(tables))
    await driven.ledger.create()
    await driven.ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    trained = Rank(driven.of)
    async with driven.running(lambda: driven.train(trained.engine)) as both:
        for number in (0, 1):
            await driven.feed(batch(number))
            await is_at(driven, number + 1)
        await driven.feed([newer(group) for group in batch(2)])
        await is_at(driven, 3)
        driven.mailbox.send(RuntimeError("the training thread dies after its commit"))
        await both
    weights = trained.weights()
    ((_, report), *_) = await bus.newest(STEPS, StepReport)
    assert (report.samples, report.lag_counts) == (12, {"0": 12})
    assert (report.metrics["stale_samples"], report.metrics["masked_tokens"]) == (4.0, 24.0)
    plan = (await driven.ledger.journal(""))[2 * GROUPS].plan
    assert plan is not None
    assert plan.contexts == (2, 2, 2, 2) * GROUPS
    again, other = Driven(bus, driven.of), Rank(driven.of)
    async with again.running(lambda: again.train(other.engine)):
        await has(again, "journal replayed")
        await until(lambda: again.context.status.state == "waiting")
    assert all(torch.equal(weights[name], tensor) for name, tensor in other.weights().items())
    assert "replay differs" not in await again.events()


def newer(experience: Experience) -> Experience:
    """Return the group with tokens of version 2 after the second of each sample, of 2, 5, 3 and 4."""
    samples = []
    for sample in experience.group.samples:
        spans = [[0, 0], [2, 2]] if len(sample.token_ids) > 2 else [[0, 0]]
        samples.append(dataclasses.replace(sample, version_spans=np.array(spans, np.int32)))
    return dataclasses.replace(experience, group=dataclasses.replace(experience.group, samples=tuple(samples)))


async def test_a_learning_rate_that_is_changed_while_the_trainer_waits_for_its_device_is_used_and_journalled(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven, trained = await created(bus, tmp_path)
    live = driven.context.live

    async def waits(driver: Driver) -> bool:
        if driven.context.status.state == "waiting" and not live.revision:  # for the step
            await live.change(0, {"trainer.learning_rate": 0.5}, "faster")
        return True

    async with driven.running(lambda: driven.train(trained.engine)):
        await until(lambda: driven.context.status.state == "waiting")
        monkeypatch.setattr(Driver, "_take_device", waits)
        await driven.feed(batch(0))
        await is_at(driven, 1)
        assert (await driven.ledger.journal(""))[0].settings_revision == 1
    (_, report) = (await bus.newest(STEPS, StepReport))[0]
    assert report.metrics["learning_rate"] == 0.5


async def test_more_in_a_row_than_allowed_pause_the_run_with_a_sentence(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainerSettings, "max_skipped_steps", 1)
    driven, trained = await created(bus, tmp_path)
    async with driven.running(lambda: driven.train(trained.engine)):
        await driven.feed(poison(batch(0)))
        await has(driven, "batch skipped")
        await driven.feed(batch(1))
        await is_at(driven, 1)
        await driven.feed(poison(batch(2)))
        await driven.feed(batch(3))
        await is_at(driven, 2)
        assert (await driven.ledger.status()).state is RunState.RUNNING
        await driven.feed(poison(batch(4)))
        await driven.feed(poison(batch(5)))
        await has(driven, "guard nonfinite")
    status = await driven.ledger.status()
    assert status.state is RunState.PAUSED
    assert "expected at most 1 batches in a row that are not finite" in status.reason
    assert (await driven.events()).count("batch skipped") == 4


@pytest.mark.parametrize("place", ["model", "marker"])
async def test_a_checkpoint_that_storage_refuses_leaves_the_one_before_and_the_run_goes_on(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    driven, trained = await created(bus, tmp_path, checkpoint_every_steps=1)
    save, write_text = torch.save, Path.write_text

    def half(state: Any, path: Any, *words: Any, **named: Any) -> None:
        if ".step-000002" not in str(path):
            return save(state, path, *words, **named)
        Path(path).write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/1: file write failed")

    def refuse(path: Path, *words: Any, **named: Any) -> int:
        if ".step-000002" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_text(path, *words, **named)

    if place == "model":
        monkeypatch.setattr(torch, "save", half)
    else:
        monkeypatch.setattr(Path, "write_text", refuse)
    async with driven.running(lambda: driven.train(trained.engine)):
        await driven.feed(batch(0))
        await driven.feed(batch(1))
        await has(driven, "checkpoint failed")
        assert [checkpoint.state.step for checkpoint in local_store.find(driven.root)] == [1]
        assert sorted(path.name for path in driven.root.iterdir()) == ["step-000001"], (
            "no half checkpoint takes up room"
        )
        await driven.feed(batch(2))
        await until(lambda: [checkpoint.state.step for checkpoint in local_store.find(driven.root)] == [1, 3])


async def test_steps_are_made_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven, trained = await created(bus, tmp_path, checkpoint_every_steps=1)
    written, may_write, write = list[str](), threading.Event(), Writer.write

    def slowly(writer: Writer) -> Written:
        may_write.wait()
        made = write(writer)
        written.append(next(iter(made.files)).parts[-4])
        return made

    monkeypatch.setattr(Writer, "write", slowly)
    async with driven.running(lambda: driven.train(trained.engine)) as both:
        for number in range(3):
            await driven.feed(batch(number))
        await is_at(driven, 2)
        assert await driven.ledger.checkpoints() == {}
        assert len(await driven.ledger.journal("")) == 2 * GROUPS
        driven.stop.set()  # which waits for both
        may_write.set()
        assert list(await both) == [None, None]
    assert [name for name in written if name in (".step-000001.tmp", ".step-000002.tmp")] == written[:2]
    newest = local_store.find(driven.root)[-1].state
    assert newest.step == await driven.step()
    assert newest.version in await driven.ledger.checkpoints()


async def test_a_thread_that_cannot_write_a_checkpoint_for_a_fault_of_its_own_ends_the_training(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(_: Writer) -> Written:
        raise KeyError("a bug")

    monkeypatch.setattr(Writer, "write", faulty)
    driven, trained = await created(bus, tmp_path, checkpoint_every_steps=1)
    async with driven.running(lambda: driven.train(trained.engine)) as both:
        await driven.feed(batch(0))
        of_driver, of_training = await both
    assert isinstance(of_training, KeyError)
    assert of_driver is of_training
    assert await driven.ledger.checkpoints() == {}


async def test_on_a_full_bus_what_no_checkpoint_has_is_saved_once_and_the_journal_is_let_go(
    bus: Bus, tmp_path: Path
) -> None:
    async with after_a_step(bus, tmp_path) as (driven, _):
        assert not driven.root.exists()
        await driven.ledger.set_bus_full("the bus is full")

        async def journal_is_gone() -> bool:
            return await driven.ledger.journal("") == []

        await until(journal_is_gone)
        (saved,) = local_store.find(driven.root)
        written_ns = (saved.folder / local_store.MARKER).stat().st_mtime_ns
    (saved,) = local_store.find(driven.root)
    assert saved.state.step == 1
    assert (saved.folder / local_store.MARKER).stat().st_mtime_ns == written_ns, "not written again at the end"


async def test_a_driver_that_is_told_to_stop_has_the_steps_saved_that_no_checkpoint_has(
    bus: Bus, tmp_path: Path
) -> None:
    async with after_a_step(bus, tmp_path) as (driven, both):
        driven.stop.set()
        assert list(await both) == [None, None]
    assert [checkpoint.state.step for checkpoint in local_store.find(driven.root)] == [1]


async def test_gradients_that_are_rounded_are_reported_once_with_the_steps_micro_batches(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "penstock.services.trainer.rank0.driver.rounding", lambda micro_batches, _: f"{micro_batches:.0f}"
    )
    async with after_a_step(bus, tmp_path) as (driven, both):
        await driven.feed(batch(1))
        await is_at(driven, 2)
        driven.stop.set()
        assert list(await both) == [None, None]
    assert (await driven.events()).count("gradients are rounded") == 1


@pytest.mark.parametrize(("ended", "last_s", "saved"), [(False, 21.0, []), (False, 19.0, [1]), (True, 21.0, [1])])
async def test_a_checkpoint_that_a_stop_has_no_time_for_is_not_begun_unless_the_run_has_ended(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool, last_s: float, saved: list[int]
) -> None:
    """Else a resume replays the journal."""
    async with after_a_step(bus, tmp_path) as (driven, both):
        if ended:
            await driven.ledger.transition(RunState.STOPPED, "enough", [RunState.RUNNING])
        monkeypatch.setattr("penstock.services.trainer.rank0.checkpoints.seconds_left", lambda: 30.0)
        driven.driver._checkpoints.last_s = last_s
        driven.stop.set()
        assert list(await both) == [None, None]
    assert [checkpoint.state.step for checkpoint in local_store.find(driven.root)] == saved
    assert ("stopped without a checkpoint" in await driven.events()) == (not saved)


async def test_weights_of_a_step_that_a_rollback_refused_are_not_saved_by_a_stop(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven, trained = await created(bus, tmp_path)
    commit, refused = Branch.commit, []

    async def late(branch: Branch, record: PolicyRecord, *rest: Any) -> bool:
        if record.step == 2:
            await rolled_back(driven)
            driven.stop.set()
        committed = await commit(branch, record, *rest)
        refused.extend([record.step] * (not committed))
        return committed

    monkeypatch.setattr(Branch, "commit", late)
    async with driven.running(lambda: driven.train(trained.engine)) as both:
        await driven.feed(batch(0))
        await is_at(driven, 1)
        await driven.feed(batch(1))
        assert list(await both) == [None, None]
    assert refused == [2]
    assert list(driven.root.rglob("*")) == []


@pytest.mark.parametrize("groups", [GROUPS, GROUPS - 1])
async def test_after_a_stop_no_step_begins_and_the_groups_are_left_to_the_coordinator_while_ranks_idle(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    """It stops while the trainer notes its batch, or waits for the last group of one."""
    async with after_a_step(bus, tmp_path) as (driven, both):
        kinds, send, fetched, fetch = list[CommandKind](), driven.mailbox.command, list[bytes](), bus.whole
        intake, note = driven.driver._intake, driven.driver._intake.note_batch

        def command(command: Command) -> None:
            kinds.append(command.kind)
            send(command)

        async def note_too_late(batch: list[Taken]) -> None:
            await driven.ledger.transition(RunState.STOPPED, "enough", [RunState.RUNNING])
            await note(batch)

        async def whole(payload: bytes) -> bytes:
            fetched.append(payload)
            return await fetch(payload)

        monkeypatch.setattr(intake, "note_batch", note_too_late)
        monkeypatch.setattr(bus, "whole", whole)
        await driven.feed(batch(1)[:groups])
        await until(lambda: len(fetched) == groups)
        if groups < GROUPS:
            await driven.ledger.transition(RunState.STOPPED, "enough", [RunState.RUNNING])
        await until(lambda: driven.driver._filling is None)
        monkeypatch.setattr(driven.mailbox, "command", command)
        await until(lambda: kinds.count(CommandKind.IDLE) > 2)
        assert set(kinds) == {CommandKind.IDLE}
        assert len(fetched) == groups, "none is fetched again"
        assert await drain(bus) == groups
        assert intake._held == {}
        driven.stop.set()
        assert list(await both) == [None, None]
    assert await driven.step() == 1
    assert await driven.ledger.noted_batch() == frozenset()


class Scripted:
    def __init__(self, driven: Driven, results: dict[CommandKind, Result] | None = None) -> None:
        self._driven = driven
        published = Published(Whereabouts("0" * 64, "", "127.0.0.1:1"), None)
        self._results = {CommandKind.PUBLISH: published, **(results or {})}
        self.commands: list[Command] = []

    def __call__(self) -> None:
        mailbox = self._driven.mailbox
        mailbox.send(ModelLoaded(64, 0))
        while (command := mailbox.receive()) is not None and command.kind is not CommandKind.STOP:
            self.commands.append(command)
            mailbox.send(self._results.get(command.kind, Result()))
            if command.kind is CommandKind.CHECKPOINT:
                mailbox.send_saved(Saved(None, "no room"))
        assert command is not None
        self.commands.append(command)

    @property
    def kinds(self) -> list[CommandKind]:
        kinds = [command.kind for command in self.commands]
        return [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind is not before]


async def test_weights_of_a_replay_that_could_not_follow_its_plan_are_published_again_and_told(
    bus: Bus, tmp_path: Path
) -> None:
    async with after_a_step(bus, tmp_path) as (driven, both):
        driven.mailbox.send(RuntimeError("the training thread dies after its commit"))
        await both
    assert local_store.find(driven.root) == []
    for difference, kinds in (
        ("", [CommandKind.REPLAY, CommandKind.IDLE, CommandKind.CHECKPOINT, CommandKind.STOP]),
        (
            "its weights are published again",
            [CommandKind.REPLAY, CommandKind.PUBLISH, CommandKind.IDLE, CommandKind.CHECKPOINT, CommandKind.STOP],
        ),
    ):
        again = Driven(bus, driven.of)
        script = Scripted(again, {CommandKind.REPLAY: Replayed(difference)})
        async with again.running(script):
            await until(lambda script=script: CommandKind.IDLE in script.kinds)
        assert [kind for kind in script.kinds if kind is not CommandKind.WAIT] == kinds
        versions = [record.version for record in await again.ledger.policies()]
        assert versions == ([0, 1, 2] if difference else [0, 1])
        assert ("replay differs" in await again.events()) is bool(difference)


@pytest.mark.parametrize(
    ("table", "name", "value", "differs"),
    [
        ("trainer", "learning_rate", 0.5, True),
        ("trainer", "max_grad_norm", 0.25, True),
        ("algorithm", "clip", (0.1, 0.1), True),
        ("algorithm", "max_lag", 9, False),
        ("run", "steps", 90, False),
    ],
)
async def test_a_replay_with_other_settings_of_the_update_is_told_and_its_weights_are_published_again(
    bus: Bus, tmp_path: Path, table: str, name: str, value: Any, differs: bool
) -> None:
    async with after_a_step(bus, tmp_path) as (driven, both):
        driven.mailbox.send(RuntimeError("the training thread dies after its commit"))
        await both
    tables = driven.of.model_dump()
    tables[table][name] = value
    again = Driven(bus, Settings.model_validate(tables))
    async with again.running(lambda: again.train(Rank(again.of).engine)):
        await has(again, "journal replayed")
        await until(lambda: again.context.status.state == "waiting")
    assert ("replay differs" in await again.events()) is differs
    versions = [record.version for record in await again.ledger.policies()]
    assert versions == ([0, 1, 2] if differs else [0, 1])


async def test_a_step_of_an_older_penstock_is_replayed_without_a_report_on_its_settings(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(update, "settings_digest", lambda *_: "")
        async with after_a_step(bus, tmp_path) as (driven, both):
            driven.mailbox.send(RuntimeError("the training thread dies after its commit"))
            await both
    again = Driven(bus, driven.of)
    async with again.running(lambda: again.train(Rank(again.of).engine)):
        await has(again, "journal replayed")
        await until(lambda: again.context.status.state == "waiting")
    assert "replay differs" not in await again.events()


async def test_damage_that_leaves_nothing_to_continue_from_pauses_the_run_while_the_model_is_loaded_and_ends_the_training(
    bus: Bus, tmp_path: Path
) -> None:
    driven, _ = await created(bus, tmp_path)
    made = written(driven.root, 2)
    (made.folder / "state.json").write_text("{")
    loaded = threading.Event()

    def loads_its_model_until_the_run_is_paused() -> None:
        loaded.wait()
        driven.mailbox.receive()

    async def is_paused() -> bool:
        return "no checkpoint is intact" in (await driven.ledger.status()).reason

    async with driven.running(loads_its_model_until_the_run_is_paused) as both:
        await until(is_paused)
        loaded.set()
        of_driver, of_training = await both
    assert isinstance(of_driver, SettingsError)
    assert of_training is of_driver


async def test_ranks_get_a_command_while_the_driver_looks_for_where_to_continue_and_stop_when_it_is_told_to(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, take_epoch = asyncio.Event(), Branch.take_epoch

    async def held(self: Branch) -> None:
        await may_end.wait()
        await take_epoch(self)

    monkeypatch.setattr(Branch, "take_epoch", held)
    driven = Driven(bus, settings(bus, tmp_path))
    await driven.ledger.create()
    script = Scripted(driven)
    async with driven.running(script) as both:
        await until(lambda: len(script.commands) >= 2)
        driven.stop.set()
        assert list(await both) == [None, None]
    assert script.kinds == [CommandKind.WAIT, CommandKind.STOP]


async def test_a_rollback_makes_every_rank_load_the_checkpoint_that_the_ledger_went_back_to(
    bus: Bus, tmp_path: Path
) -> None:
    driven, trained = await created(bus, tmp_path, checkpoint_every_steps=1)
    async with driven.running(lambda: driven.train(trained.engine)):
        await driven.feed(batch(0))
        await until(lambda: [checkpoint.state.step for checkpoint in local_store.find(driven.root)] == [1])
    again = Driven(bus, driven.of)
    script = Scripted(again)
    async with again.running(script):
        await until(lambda: CommandKind.IDLE in script.kinds)
        epoch = await rolled_back(again)
        await until(lambda: script.kinds.count(CommandKind.LOAD) == 2)
        await until(lambda: script.kinds[-1] is CommandKind.IDLE)
    assert (await again.ledger.status()).trainer_epoch == epoch + 1


async def emptied(bus: Bus) -> None:
    """As a server that comes back without its data, and the coordinator that sees it."""
    await empty(bus)
    await bus.make_groups()


async def test_what_an_emptied_bus_had_delivered_is_forgotten_and_the_same_trainer_goes_on(
    bus: Bus, tmp_path: Path
) -> None:
    driven, trained = await created(bus, tmp_path, checkpoint_every_steps=1)
    await raw(bus).hset(bus.keys.named("run"), "cursor", 3 * GROUPS)
    async with driven.running(lambda: driven.train(trained.engine)) as both:
        await driven.feed(batch(0))
        await until(lambda: [checkpoint.state.step for checkpoint in local_store.find(driven.root)] == [1])
        await driven.feed(batch(1)[:-1])  # held: one is missing for a step
        await until(lambda: len(driven.driver._intake._held) == GROUPS - 1)
        await emptied(bus)
        await has(driven, "run restored")
        await driven.feed(batch(2))
        await is_at(driven, 2)
        assert not both.done()
    assert await bus.counts() == {"trained": 2 * GROUPS, "dropped:bus_lost": 2 * GROUPS}


async def test_without_a_checkpoint_a_trainer_whose_bus_was_emptied_ends_and_its_successor_uses_no_number_again(
    bus: Bus, tmp_path: Path
) -> None:
    async with after_a_step(bus, tmp_path) as (driven, both):
        await emptied(bus)
        of_driver, _ = await both
    assert isinstance(of_driver, Fenced)
    assert "the bus lost its data before the first checkpoint" in str(of_driver)
    again = Driven(bus, driven.of)
    async with again.running(lambda: again.train(Rank(driven.of).engine)):
        await until(again.ledger.policies)
        (record,) = await again.ledger.policies()
        assert (record.version, record.step) == (2, 0)


@contextlib.contextmanager
def stopped_by_a_signal(driven: Driven) -> Iterator[None]:
    """As ``serve`` does it."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, driven.stop.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@pytest.mark.parametrize("stops", [True, False])
async def test_a_trainer_whose_place_is_taken_in_its_step_ends_in_order(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """As when an upgrade creates the new workload before it removes the old one."""
    commit = Branch.commit

    async def overtaken(branch: Branch, record: PolicyRecord, *rest: Any) -> bool:
        if record.step == 2:
            await Branch(bus).take_epoch()
            if stops:
                driven.context.stop.set()
        return await commit(branch, record, *rest)

    monkeypatch.setattr(Branch, "commit", overtaken)
    async with after_a_step(bus, tmp_path) as (driven, both):
        with stopped_by_a_signal(driven):
            await driven.feed(batch(1))
            assert await both == [None, None]
    assert not driven.driver.finished
    assert "place taken" in await driven.events()
    assert local_store.find(driven.root) == [], "the other trainer makes the step, and its checkpoint"
    assert await driven.step() == 1
    assert await bus.length(EXPERIENCE) == GROUPS


async def test_an_idle_trainer_whose_place_is_taken_ends_in_order(bus: Bus, tmp_path: Path) -> None:
    async with after_a_step(bus, tmp_path) as (driven, both):
        with stopped_by_a_signal(driven):
            await driven.feed(batch(1)[:1])
            await Branch(bus).take_epoch()
            assert await both == [None, None]
    assert await driven.step() == 1


async def as_before(bus: Bus, saved: dict[bytes, bytes]) -> None:
    """As a server that comes back with older data."""
    await empty(bus)
    for name, value in saved.items():
        await raw(bus).restore(name, 0, value, replace=True)


async def test_a_trainer_that_is_ahead_of_its_bus_writes_no_checkpoint_and_its_successor_no_number_again(
    bus: Bus, tmp_path: Path
) -> None:
    async with after_a_step(bus, tmp_path) as (driven, both):
        names = await raw(bus).keys(bus.keys.named("*"))
        saved = {name: await raw(bus).dump(name) for name in names}
        await driven.feed(batch(1))
        await is_at(driven, 2)
        await until(lambda: read_commits(driven.of.run_folder).newest == 2)
        await as_before(bus, saved)
        of_driver, _ = await both
    assert isinstance(of_driver, Fenced)
    assert "found step 1 and version 1: it has older data" in str(of_driver)
    assert local_store.find(driven.root) == []
    again = Driven(bus, driven.of)
    async with again.running(lambda: again.train(Rank(driven.of).engine)):
        await has(again, "bus lost steps")

        async def newest() -> list[tuple[int, int | None, int]]:
            return [(r.version, r.parent, r.step) for r in await again.ledger.policies() if r.version > 1]

        await until(newest)
        assert await newest() == [(3, 1, 1)]


async def test_no_checkpoint_is_written_with_what_an_emptied_bus_says(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven, trained = await created(bus, tmp_path, checkpoint_every_steps=1)
    await raw(bus).hset(bus.keys.named("run"), "cursor", 3 * GROUPS)
    describe, described = Retention.describe, []

    async def after_the_loss(retention: Retention, step: int, *rest: Any) -> CheckpointState:
        if step == 2 and (2, 0) not in described:
            await emptied(bus)
        state = await describe(retention, step, *rest)
        described.append((state.step, state.counts.get("trained", 0)))
        return state

    monkeypatch.setattr(Retention, "describe", after_the_loss)
    async with driven.running(lambda: driven.train(trained.engine)):
        await driven.feed(batch(0))
        await is_at(driven, 1)
        await driven.feed(batch(1))
        await has(driven, "run restored")
        assert [checkpoint.state.step for checkpoint in local_store.find(driven.root)] == [1]
        await driven.feed(batch(2))
        await is_at(driven, 2)
    assert [checkpoint.state.counts["trained"] for checkpoint in local_store.find(driven.root)] == [GROUPS, 2 * GROUPS]


async def test_a_driver_that_fails_ends_the_training_with_its_error(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any) -> bool:
        raise Fenced("it has older data")

    async with after_a_step(bus, tmp_path) as (driven, both):
        monkeypatch.setattr(Branch, "commit", refused)
        await driven.feed(batch(1))
        of_driver, of_training = await both
    assert isinstance(of_driver, Fenced)
    assert of_training is of_driver
    assert await driven.step() == 1


async def test_training_that_fails_ends_the_driver_in_order_and_the_batch_stays_on_the_bus(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    driven, trained = await created(bus, tmp_path)
    groups = batch(0)  # a policy makes them
    monkeypatch.setattr(Policy, "forward", broken)
    async with driven.running(lambda: driven.train(trained.engine)) as both:
        await driven.feed(groups)
        of_driver, of_training = await both
    assert of_driver is of_training
    assert str(of_driver) == "mat1 and mat2 shapes cannot be multiplied"
    assert await bus.counts() == {}
    tasks = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]
    assert not {name for name in tasks if name.startswith(("Driver", "Intake", "Exporter", "Opening"))}


def test_a_mailbox_hands_commands_over_in_order_and_then_raises_what_ended_the_driver() -> None:
    async def scene() -> list[str]:
        mailbox, heard = Mailbox(), []

        def training() -> None:
            try:
                while (command := mailbox.receive()) is not None:
                    heard.append(command.kind.name)
            except ValueError as error:
                heard.append(str(error))

        thread = threading.Thread(target=training)
        mailbox.command(Command(CommandKind.IDLE))
        mailbox.command(Command(CommandKind.WAIT))
        mailbox.close(ValueError("the bus is another's"))
        thread.start()
        await asyncio.to_thread(thread.join)
        return heard

    assert asyncio.run(scene()) == ["IDLE", "WAIT", "the bus is another's"]
