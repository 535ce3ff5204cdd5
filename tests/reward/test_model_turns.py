"""Models of the reward service that take turns on a shared device: few turns, no endless wait, the same values."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.reward import reference
from penstock.services.reward.failures import Failures
from penstock.services.reward.models import call_watch, turns
from penstock.services.reward.models.batcher import Batcher, NoRoom
from penstock.services.reward.models.call_watch import CallWatch
from penstock.services.reward.models.placement import Placed
from penstock.services.reward.models.turns import Flight, ModelTurns, is_due
from penstock.services.reward.scorers import reward_model
from penstock.services.reward.scorers.reward_model import RewardModel
from penstock.services.reward.scoring import Scoring
from penstock.services.reward.service import make_scoring
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import RUN
from penstock.shared.bus.messages import Purpose, RolloutGroup
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.device_leases import Phase, look_at_devices, request_devices
from penstock.shared.bus.streams import EXPERIENCE, ROLLOUTS
from penstock.shared.errors import Fenced, StateLost
from penstock.shared.expression import Expression
from penstock.shared.placement import grants as device_grants
from penstock.shared.placement.grants import DeviceGrants
from penstock.shared.placement.lease import DeviceLease, leased
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings, loads
from penstock.shared.settings.algorithm import AlgorithmSettings
from penstock.shared.settings.rewards.models import ModelsSettings
from tests.conftest import PATIENCE_S, until
from tests.reward.test_batcher import Item, Notes
from tests.support import builders, reward_models, tiny
from tests.support.raw_redis import raw

TTL_S = 3600.0
SHARED = loads(f'placement = {{mode = "shared", rung = 1}}\ninternal.claim_after_s = {TTL_S}', "run.toml")
SECONDS = st.floats(0.0, 1e4)
NOTHING: Mapping[str, Any] = MappingProxyType({})


IDS = st.frozensets(st.integers(0, 20))


@given(st.integers(0, 100), st.integers(1, 64), SECONDS, SECONDS, st.booleans())
def test_a_turn_is_due_only_for_work_and_no_work_waits_forever(
    waiting: int, room: int, quiet_s: float, turn_s: float, completes: bool
) -> None:
    assert not is_due(0, room, quiet_s, turn_s, completes=completes)
    if waiting:
        assert is_due(waiting, room, max(1.0, 4 * turn_s), turn_s, completes=False)
        assert is_due(waiting, room, 0.0, turn_s, completes=True)
        assert is_due(waiting, room, 0.0, turn_s, completes=False) == (waiting >= room)


@given(IDS, IDS, IDS, IDS, st.integers(1, 8))
def test_of_groups_in_any_order_each_batch_takes_its_number_and_scoring_all_groups_makes_every_batch(
    coming: frozenset[int], scored: frozenset[int], shown: frozenset[int], turn: frozenset[int], groups: int
) -> None:
    coming, turn = coming | turn, turn - scored - shown
    flight = Flight(coming - scored - shown, scored - shown, shown)
    now, later = (each.batches(groups, waits=True) for each in (flight, flight.after(turn)))
    assert now <= later <= len(coming | scored | shown) // groups
    whole = Flight(frozenset(), coming | scored | shown)
    assert whole.batches(groups, waits=True) == len(coming | scored | shown) // groups
    if not shown:
        assert flight.batches(groups, waits=False) == len(scored) // groups


@pytest.mark.parametrize(
    ("generating", "scored", "shown", "waiting", "settings", "due"),
    [
        ([], [], [], range(4), {}, True),
        ([], [], [], range(3), {}, False),
        ([0], [2, 3], [], [4, 5], {}, True),
        ([], range(4), [], [4, 5, 6], {}, False),  # the trainer has a complete batch
        ([], range(4), [], [4, 5, 6, 7], {}, True),
        ([], [1, 2, 3, 4], [], [0], {}, False),
        ([], [1, 2, 3, 4], [], [0], {"on_stale": "wait"}, True),  # the trainer waits for it alone
        ([0], [2, 3, 4], [], [1, 5], {"on_stale": "wait"}, False),
        ([6, 7], [], [1, 5], [0, 2, 3], {"imitation": 0.1}, True),  # one demonstration is among the first four
        ([3, 6], [], [1, 5], [0, 2], {"imitation": 0.1}, False),
        ([], [], range(8), [8], {"imitation": 0.1}, False),  # two batches without samples are complete
    ],
)
async def test_groups_that_complete_the_next_batch_are_due_at_once(
    bus: Bus,
    generating: Sequence[int],
    scored: Sequence[int],
    shown: Sequence[int],
    waiting: Sequence[int],
    settings: Mapping[str, object],
    due: bool,
) -> None:
    run = Run(bus)
    run.algorithm = AlgorithmSettings.model_validate({"groups_per_step": 4, **settings})
    for group_id in generating:
        await raw(bus).hset(bus.keys.named("generating"), str(group_id), b"a prompt")
    for group_id in scored:
        await bus.append(EXPERIENCE, {"id": str(group_id), "data": b"scored"})
    for group_id in shown:
        await bus.append(EXPERIENCE, {"id": str(group_id), "data": b"a demonstration", "shown": "1"})
    await run.put(*waiting)
    with contextlib.ExitStack() as models:
        for group_id in waiting:
            for _ in range(2):  # a model each, but one group
                models.enter_context(run.turns.waiting(builders.group(group_id)))
        assert await run.turns._completes() == due
    assert not run.turns._waiting


async def test_groups_of_which_each_waits_for_another_model_complete_a_batch_together(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes(), Notes()
    monkeypatch.setattr(turns, "_LEAST_QUIET_S", TTL_S)
    async with taking_turns(bus) as run, batching(notes[0], run) as first, batching(notes[1], run) as second:
        await until(lambda: not run.lease.held)
        await run.put(*range(4))
        scored = [asyncio.create_task(score(run, model, group)) for group, model in enumerate((first, second) * 2)]
        assert await asyncio.wait_for(asyncio.gather(*scored), PATIENCE_S) == [[0.0], [1.0], [2.0], [3.0]]


async def test_held_out_groups_alone_complete_no_batch(bus: Bus) -> None:
    run = Run(bus)
    evaluated = [builders.group(group_id) for group_id in range(4)]
    with contextlib.ExitStack() as models:
        for group in evaluated:
            prompt = dataclasses.replace(group.prompt, purpose=Purpose.EVALUATE)
            models.enter_context(run.turns.waiting(dataclasses.replace(group, prompt=prompt)))
        assert len(run.turns._waiting) == 4
        assert not await run.turns._completes()


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the leader have led for long."""
    monkeypatch.setattr(device_grants, "SETTLE_S", 0.0)


class Run:
    """A bus on which the device is granted, with the trainer's lease."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self.status = bus, Status()
        ledger = Ledger(bus)
        ledger.term = 1
        self.grants = DeviceGrants(bus, ledger, SHARED, list)
        self.trainer = DeviceLease(bus, "trainer-0", "train", (0,), TTL_S)
        self.lease = DeviceLease(bus, "reward-0", "score", (0,), TTL_S)
        self.algorithm = AlgorithmSettings(groups_per_step=4)
        self.turns = ModelTurns(self.lease, bus, self.status, lambda: self.algorithm, room=8)

    async def holder(self) -> str:
        held = (await look_at_devices(self.bus, 1)).grants[0]
        return "" if held is None else held.replica

    async def grant(self) -> None:
        while True:
            await self.grants.look()
            await asyncio.sleep(0.01)

    async def put(self, *group_ids: int) -> None:
        for group_id in group_ids:
            await self.bus.append(ROLLOUTS, {"id": str(group_id), "data": wire.encode(builders.group(group_id))})

    async def left(self) -> None:
        """Wait until the models have released the device, on the bus too, where the turn is counted."""
        await until(self._has_left)

    async def _has_left(self) -> bool:
        return not self.lease.held and await self.holder() != "reward-0"

    async def turns_made(self) -> int:
        return int(await raw(self.bus).hget(self.bus.keys.named("device:0"), "score_turns") or 0)


@contextlib.asynccontextmanager
async def taking_turns(bus: Bus) -> AsyncIterator[Run]:
    await raw(bus).hset(bus.keys.of(RUN), "leader_term", 1)
    run = Run(bus)
    granting = asyncio.create_task(run.grant())
    try:
        async with leased(run.trainer), leased(run.lease), run.turns.running():
            yield run
    finally:
        granting.cancel()


@contextlib.asynccontextmanager
async def batching(notes: Notes, run: Run) -> AsyncIterator[Batcher[Item, float]]:
    batcher = Batcher(notes, ModelsSettings.model_validate({"batch_tokens": 1}), "notes", 0.0, run.turns)
    async with run.turns.loading("notes"):
        assert await run.holder() == "reward-0"
        batcher.start()
    try:
        yield batcher
    finally:
        notes.gate.set()
        await batcher.close()


async def score(run: Run, batcher: Batcher[Item, float], group_id: int) -> list[float]:
    with run.turns.waiting(builders.group(group_id)):
        return await batcher.run([Item(1, float(group_id))])


async def test_groups_wait_until_they_complete_a_batch_then_one_turn_scores_them_and_the_models_leave(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes()
    monkeypatch.setattr(turns, "_LEAST_QUIET_S", TTL_S)
    async with taking_turns(bus) as run, batching(notes, run) as batcher:
        await until(lambda: notes.moves == ["offload"], timeout_s=PATIENCE_S)
        await run.left()
        made = await run.turns_made()
        await run.put(0, 1, 2, 3)
        first = [asyncio.create_task(score(run, batcher, group)) for group in range(3)]
        await until(lambda: len(run.turns._waiting) == 3)
        assert not run.lease.held
        last = asyncio.create_task(score(run, batcher, 3))
        assert await asyncio.gather(*first, last) == [[0.0], [1.0], [2.0], [3.0]]
        await run.left()
        assert notes.moves == ["offload", "restore", "offload"]
        assert await run.turns_made() == made + 1


class Loading(RewardModel):
    """A model that loads for as long as the test likes."""

    def __init__(self, name: str, of: ModelTurns) -> None:
        self.name, self._of, self._model = name, of, None
        self.began, self.may_end = asyncio.Event(), asyncio.Event()

    async def start(self) -> None:
        async with self._of.loading(self.name):
            self.began.set()
            await self.may_end.wait()


async def test_a_device_that_is_asked_back_while_models_load_is_released_between_two(bus: Bus) -> None:
    async with taking_turns(bus) as run:
        first, second = models = [Loading(name, run.turns) for name in ("a", "b")]
        scoring = Scoring(models, Expression("a + b", ["a", "b"]), run.status, turns=run.turns)
        starting = asyncio.create_task(scoring.start())
        await asyncio.wait_for(first.began.wait(), PATIENCE_S)
        training = asyncio.create_task(run.trainer.acquire())
        await until(lambda: not run.turns._open.is_set())
        first.may_end.set()
        assert await asyncio.wait_for(training, PATIENCE_S)
        assert not second.began.is_set()
        second.may_end.set()
        await run.trainer.release()
        await asyncio.wait_for(starting, PATIENCE_S)


async def test_a_group_that_completes_nothing_is_scored_after_a_while(bus: Bus) -> None:
    notes = Notes()
    async with taking_turns(bus) as run, batching(notes, run) as batcher:
        async with asyncio.timeout(PATIENCE_S):
            assert await score(run, batcher, 5) == [5.0]


async def test_training_takes_the_device_after_the_forward_pass_in_progress_and_the_rest_is_scored_later(
    bus: Bus,
) -> None:
    notes = Notes()
    async with taking_turns(bus) as run, batching(notes, run) as batcher:
        await run.left()
        await run.put(*range(4))
        notes.gate.clear()
        scored = [asyncio.create_task(score(run, batcher, group)) for group in range(4)]
        await until(lambda: run.lease.held)
        training = asyncio.create_task(run.trainer.acquire())
        await until(lambda: run.lease.rung >= 0)
        await until(lambda: not run.turns._open.is_set())
        assert await run.holder() == "reward-0", "a forward pass is not interrupted"
        notes.gate.set()
        async with asyncio.timeout(PATIENCE_S):
            assert await training
        assert await run.holder() == "trainer-0"
        assert notes.moves[-1] == "offload"
        assert sum(task.done() for task in scored) < 4
        assert run.trainer.freed == 1, "the rung at which the device was freed"
        await run.trainer.release()
        assert await asyncio.gather(*scored) == [[0.0], [1.0], [2.0], [3.0]]


async def test_a_process_whose_device_another_was_granted_ends(bus: Bus) -> None:
    with pytest.raises(Fenced, match="another process holds them"):
        await _lose_the_device(bus)


async def _lose_the_device(bus: Bus) -> None:
    notes = Notes()
    async with taking_turns(bus) as run, batching(notes, run) as batcher:
        await run.left()
        await run.put(*range(4))
        notes.gate.clear()
        scored = [asyncio.create_task(score(run, batcher, group)) for group in range(4)]
        await until(lambda: run.lease.held)
        async with run.lease._busy:  # it does not renew
            await raw(bus).hset(bus.keys.named("device:0"), "until_ms", 0)
            assert await run.trainer.acquire(PATIENCE_S)
        await asyncio.wait(scored, timeout=PATIENCE_S)


async def test_a_device_that_its_last_holder_did_not_free_ends_the_process_and_costs_no_group_an_attempt(
    bus: Bus,
) -> None:
    notes = Notes()
    async with taking_turns(bus) as run, batching(notes, run) as batcher:
        await run.left()
        notes.fits_restore = False
        await run.put(*range(4))
        scored = await asyncio.gather(*(score(run, batcher, group) for group in range(4)), return_exceptions=True)
    assert [type(error) for error in scored] == [StateLost] * 4


async def test_a_trainer_learns_the_turns_between_its_steps_and_their_seconds(bus: Bus) -> None:
    notes = Notes()
    async with taking_turns(bus) as run, batching(notes, run) as batcher:
        await run.trainer.acquire()
        run.trainer.take_switches()
        await run.trainer.release()
        await run.put(*range(4))
        await asyncio.gather(*(score(run, batcher, group) for group in range(4)))
        await run.left()
        made = await run.turns_made()
        await run.trainer.acquire()
        figures = run.trainer.take_switches()
        assert 1.0 <= figures["score_turns"] <= made
        assert figures["score_turn_s"] > 0.0
        await run.trainer.release()
        await run.trainer.acquire()
        assert run.trainer.take_switches()["score_turns"] == 0.0


def test_waiting_for_a_device_is_not_hanging() -> None:
    status, ready_s = Status(), [float("inf")]
    failures = Failures(status, None, {"scorer 'model'": lambda: ready_s[0]})
    with failures.calling("scorer 'model'", "train.jsonl:7", silent_s=0.0):
        failures.look()
        assert status.failures == {}
        ready_s[0] = 0.0
        failures.look()
        assert list(status.failures) == ["scorer 'model'"]


def settings(
    folder: Path, policy: Path, algorithm: Mapping[str, Any] = NOTHING, reward: Mapping[str, Any] = NOTHING
) -> Settings:
    return Settings.model_validate(
        {
            "run": {"device": "cpu", "threads": 1},
            "policy": {"model": str(policy), "dtype": "float32"},
            "placement": {"mode": "shared"},
            "algorithm": {"reference": "reward", "kl": {"coefficient": 0.1}, **algorithm},
            "reward": {
                **reward,
                "expression": "answer + model",
                "scorers": [
                    {"kind": "answer", "mode": "exact", "extract": "whole"},
                    {"kind": "model", "model": str(folder)},
                ],
            },
        }
    )


async def _scored(run_settings: Settings, groups: Sequence[RolloutGroup], run: Run | None = None) -> list[Any]:
    """Score each group in a turn of its own, if models take turns."""
    status = Status() if run is None else run.status
    scoring = make_scoring(run_settings, status, None, None if run is None else run.turns)
    await scoring.start()
    experience = []
    try:
        for group in groups:
            if run is not None:
                await run.left()
            experience.append(await scoring(group))
    finally:
        await scoring.close()
    logprobs = [made.reference_logprobs for made in experience if made.reference_logprobs is not None]
    return [array.tobytes() for array in (*(made.rewards for made in experience), *logprobs)]


async def test_rewards_and_reference_are_bit_equal_to_those_of_models_with_a_device_of_their_own(
    bus: Bus, tmp_path: Path
) -> None:
    folder = reward_models.save(reward_models.qwen(), tmp_path / "reward")
    run_settings = settings(folder, tiny.save(tmp_path / "policy"))
    groups = [builders.group(group_id, ("46", "4", "47", "2")) for group_id in range(3)]
    expected = await _scored(run_settings, groups)
    async with taking_turns(bus) as run:
        run.algorithm = AlgorithmSettings(groups_per_step=1)
        await run.put(0, 1, 2)
        assert await _scored(run_settings, groups, run) == expected
        assert await run.turns_made() >= 3
        assert run.status.values["memory_peak"] > 0.0
        assert {sample.phase for report in run.status.memory.take("reward-0") for sample in report.samples} == {
            "score",
            "wait",
        }
    assert await bus.length(EXPERIENCE) == 0


def test_offloaded_weights_leave_the_device_and_return_bit_for_bit_and_are_copied_once() -> None:
    placed = Placed(reward_models.qwen(), torch.device("cpu"))
    before = [part.clone() for part in placed.module.parameters()]
    nbytes = sum(part.nbytes for part in before)
    assert placed.held("weights").components == {"weights": nbytes}
    placed.offload()
    assert placed.held("weights").components == {"weights": 0.0}
    placed.restore()
    copies = _chunks(placed)
    placed.offload()
    placed.restore()
    assert all(mine is kept for mine, kept in zip(copies, _chunks(placed), strict=True))
    assert placed.held("weights").components == {"weights": nbytes}
    assert all(torch.equal(part, old) for part, old in zip(placed.module.parameters(), before, strict=True))


def test_weights_that_find_no_room_leave_nothing_on_the_device_and_come_back_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed = Placed(reward_models.qwen(), torch.device("cpu"))
    before = [part.clone() for part in placed.module.parameters()]
    placed.offload()
    with monkeypatch.context() as full:
        reload = placed._copies.reload

        def half() -> None:
            reload()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        full.setattr(placed._copies, "reload", half)
        with pytest.raises(NoRoom):
            placed.restore()
    assert placed.held("weights").components == {"weights": 0.0}
    placed.restore()
    assert all(torch.equal(part, old) for part, old in zip(placed.module.parameters(), before, strict=True))


def _chunks(placed: Placed) -> list[torch.Tensor]:
    return [chunk for _, chunks in placed._copies._copied for chunk in chunks]


def test_a_call_without_progress_hangs_after_a_limit_that_grows_with_what_such_calls_took() -> None:
    now_s = [0.0]
    watch = CallWatch(lambda: now_s[0])
    with watch.working("judge", "forward pass", None):
        assert watch.look(599.0) == ""
        assert watch.look(1.0).startswith("a forward pass of 'judge' has made no progress for 600 s")
        now_s[0] = 100.0
    with watch.working("judge", "move to the device", None):
        assert watch.look(600.0) != ""
    with watch.working("judge", "forward pass", None):
        assert watch.look(1999.0) == ""
        assert watch.look(1.0) != ""
    assert watch.look(1e6) == ""


def test_a_slow_load_that_reads_and_a_slow_pass_that_computes_on_a_cpu_never_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress, watch = [0], CallWatch()
    monkeypatch.setattr(call_watch, "_disk_traffic", lambda: progress[0])
    clock = call_watch.ThreadClock()
    monkeypatch.setattr(clock, "whole_seconds", lambda: progress[0])
    for calling, limit_s in ((watch.loading("judge"), 1800.0), (watch.working("judge", "forward pass", clock), 600.0)):
        with calling:
            watch.look(1.0)
            for _ in range(100):
                progress[0] += 1
                assert watch.look(limit_s) == ""
            assert watch.look(limit_s) != "", "as before, but now nothing was read or computed"


def test_the_clock_of_a_thread_shows_whether_it_computes_or_waits() -> None:
    clock, waits, ends = call_watch.ThreadClock(), threading.Event(), threading.Event()

    def compute_then_wait() -> None:
        clock.begin()
        while time.thread_time() < 1.1:
            pass
        waits.set()
        ends.wait(PATIENCE_S)

    thread = threading.Thread(target=compute_then_wait)
    thread.start()
    assert waits.wait(PATIENCE_S)
    computed_s = clock.whole_seconds()
    time.sleep(0.1)
    assert computed_s == clock.whole_seconds() >= 1
    ends.set()
    thread.join(PATIENCE_S)


async def test_time_in_which_the_process_was_stopped_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_watch, "LOOK_S", 0.01)
    now_s = [0.0]
    watch = CallWatch(lambda: now_s[0])
    with watch.working("judge", "forward pass", None):
        hanging = asyncio.create_task(watch.hanging())
        (call,) = watch._calls
        await asyncio.sleep(0)  # it has read the clock
        now_s[0] = 1e6
        await until(lambda: call.still_s > 0.0)
        assert call.still_s == pytest.approx(0.02)
        call.limit_s = 0.0
        assert await asyncio.wait_for(hanging, PATIENCE_S)


async def test_a_forward_pass_that_never_ends_is_noticed_while_the_lease_is_renewed(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_watch, "LOOK_S", 0.01)
    notes = Notes()
    async with taking_turns(bus) as run, batching(notes, run) as batcher:
        await until(lambda: not run.lease.held)
        hanging = asyncio.create_task(run.turns.watch.hanging())
        await run.put(*range(4))
        notes.gate.clear()
        scored = [asyncio.create_task(score(run, batcher, group)) for group in range(4)]
        await until(lambda: run.lease.held and any("forward pass" in call.name for call in run.turns.watch._calls))
        monkeypatch.setattr(run.turns.watch._calls[0], "limit_s", 0.0)
        assert "'notes' has made no progress" in await asyncio.wait_for(hanging, PATIENCE_S)
        assert await run.holder() == "reward-0"
        notes.gate.set()
        await asyncio.gather(*scored)


@dataclasses.dataclass
class Loads:
    """Models that were opened, with whether the device was held then."""

    lease: DeviceLease
    opened: list[tuple[str, bool]] = dataclasses.field(default_factory=list)

    def note(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: Callable[..., str]) -> None:
        whole = module._open

        def opened(*of: Any) -> Any:
            self.opened.append((name(*of), self.lease.held))
            return whole(*of)

        monkeypatch.setattr(module, "_open", opened)


@pytest.mark.parametrize(
    ("holder", "phase"), [("trainer-0", "train"), ("rollout-0", "generate"), ("reward-0", "score"), ("", "score")]
)
async def test_no_reward_model_reference_or_teacher_loads_before_its_service_holds_the_device_in_whatever_phase_it_starts(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: str, phase: Phase
) -> None:
    folder, policy = reward_models.save(reward_models.qwen(), tmp_path / "reward"), tiny.save(tmp_path / "policy")
    taught = {"teachers": [{"name": "teacher", "model": str(policy)}]}
    of = settings(folder, policy, reward=taught, algorithm={"distillation": 0.1})
    async with taking_turns(bus) as run:
        loads = Loads(run.lease)
        loads.note(monkeypatch, reward_model, lambda scorer, work: scorer.name)
        loads.note(monkeypatch, reference, lambda run_settings, model, where, *_: where)
        before = DeviceLease(bus, holder, phase, (0,) if holder else (), TTL_S)
        if holder:
            await request_devices(bus, before._request)
            await until(lambda: _holds(run, holder))
        starting = asyncio.create_task(make_scoring(of, run.status, None, run.turns).start())
        if holder not in ("", "reward-0"):  # a restart ends the grant of its predecessor
            await until(lambda: _requests(bus, "reward-0"))
            await asyncio.sleep(0.1)
            assert loads.opened == []
            await before.release()
        await asyncio.wait_for(starting, PATIENCE_S)
    assert loads.opened == [
        ("model", True),
        ("policy.model", True),
        ("model of teacher 'teacher' in [[reward.teachers]]", True),
    ]


async def _holds(run: Run, holder: str) -> bool:
    return await run.holder() == holder


async def _requests(bus: Bus, replica: str) -> bool:
    return any(request.replica == replica for request in (await look_at_devices(bus, 1)).requests)
