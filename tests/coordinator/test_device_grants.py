"""Laws of shared devices: one holder at a time, no request is lost, and older terms are fenced."""

import random
from collections.abc import Mapping, Sequence

import pytest

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.client import server
from penstock.shared.bus.keys import RUN
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.device_leases import (
    DEVICE,
    DeviceLook,
    DeviceRequest,
    Grant,
    Phase,
    grant_devices,
    look_at_devices,
)
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat
from penstock.shared.errors import Fenced
from penstock.shared.placement import grants as device_grants
from penstock.shared.placement.grants import Decision, DeviceGrants, decide, lowest_rung
from penstock.shared.placement.lease import DeviceLease, leased
from penstock.shared.placement.turns import TrainerTurns
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import loads
from tests.support.raw_redis import raw

DEVICES = 2
TTL_S = 3600.0
"""No lease ends while a busy machine takes its time."""
SETTINGS = loads(
    'placement = {mode = "shared", rung = 1}\ntrainer.ranks = 2\nrollout.replicas = 2\n'
    f"internal.claim_after_s = {TTL_S}",
    "run.toml",
)
HELD: dict[str, Sequence[int]] = {"trainer-0": (0, 1), "reward-0": (0,), "rollout-0": (0,), "rollout-1": (1,)}
WIDE: dict[str, Sequence[int]] = {"trainer-0": (0, 1), "reward-0": (0,), "rollout-0": (0, 1)}
"""With a tensor parallel replica."""
_SETTLE_S = device_grants.SETTLE_S
PHASES: dict[str, Phase] = {"trainer": "train", "reward": "score", "rollout": "generate"}
TRAIN = DeviceRequest("trainer-0", "t", "train", (0, 1))
FIRST, SECOND = DeviceRequest("rollout-0", "a", "generate", (0,)), DeviceRequest("rollout-1", "b", "generate", (1,))


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each leader have led for long."""
    monkeypatch.setattr(device_grants, "SETTLE_S", 0.0)


def grant(request: DeviceRequest, rung: int = -1) -> Grant:
    return Grant(request.replica, request.process, request.phase, 1, rung)


SCORE = DeviceRequest("reward-0", "s", "score", (0,))
BOTH = DeviceRequest("rollout-0", "w", "generate", (0, 1))
DECISIONS = [
    ((grant(FIRST), grant(SECOND)), (SCORE,), Decision((), ((0, grant(FIRST)),))),
    ((grant(SCORE), None), (FIRST, SECOND), Decision((SECOND,), ())),
    ((grant(SCORE), grant(SECOND)), (TRAIN,), Decision((), ((0, grant(SCORE)), (1, grant(SECOND))))),
    ((grant(TRAIN), grant(TRAIN)), (SCORE, FIRST), Decision((), ())),
    ((None, None), (FIRST, SCORE, SECOND), Decision((SCORE, SECOND), ())),
    ((None, None), (FIRST, SCORE, SECOND, TRAIN), Decision((TRAIN,), ())),
    ((None, grant(SECOND)), (SCORE, TRAIN), Decision((), ((1, grant(SECOND)),))),
    ((None, None), (FIRST,), Decision((FIRST,), ())),
    ((None, None), (FIRST, SECOND), Decision((FIRST, SECOND), ())),
    ((None, None), (FIRST, SECOND, TRAIN), Decision((TRAIN,), ())),
    ((grant(FIRST), None), (SECOND, TRAIN), Decision((), ((0, grant(FIRST)),))),
    ((grant(FIRST, 1), None), (SECOND, TRAIN), Decision((), ())),
    ((grant(TRAIN), grant(TRAIN)), (FIRST, SECOND), Decision((), ())),
    ((grant(FIRST), grant(SECOND)), (), Decision((), ())),
    ((None, None), (BOTH,), Decision((BOTH,), ())),
    ((grant(SCORE), None), (BOTH,), Decision((), ())),
    ((None, None), (BOTH, SCORE), Decision((SCORE,), ())),
    ((grant(BOTH), grant(BOTH)), (SCORE,), Decision((), ((0, grant(BOTH)),))),
    ((grant(BOTH), grant(BOTH)), (TRAIN,), Decision((), ((0, grant(BOTH)), (1, grant(BOTH))))),
]


@pytest.mark.parametrize(("grants", "requests", "decision"), DECISIONS)
def test_training_gets_every_device_or_none_and_goes_first_and_scoring_second(
    grants: tuple[Grant | None, ...], requests: tuple[DeviceRequest, ...], decision: Decision
) -> None:
    assert decide(DeviceLook(grants, requests)) == decision


REPLICA = {"weights": 15.0, "shadow": 15.0, "kv_cache": 40.0}
TRAINER = {"weights": 15.0, "gradients": 15.0, "optimizer": 90.0, "snapshot": 15.0, "peak": 140.0}
RUNGS = [(300.0, 0), (234.0, 0), (233.0, 1), (228.0, 1), (227.0, 3), (200.0, 3), (150.0, 4), (1.0, 4)]


@pytest.mark.parametrize(("capacity", "rung"), RUNGS)
def test_the_lowest_rung_at_which_training_and_generation_fit_is_chosen(capacity: float, rung: int) -> None:
    assert lowest_rung(REPLICA, TRAINER, capacity).number == rung


@pytest.mark.parametrize(("capacity", "offload_bytes"), [(300.0, 0), (225.0, 3), (200.0, 25), (150.0, 0)])
def test_the_trainer_moves_as_many_optimizer_states_as_generation_lacks(capacity: float, offload_bytes: int) -> None:
    """At rung 2 they hold 205 in generation; at rung 4 all is moved."""
    assert lowest_rung(REPLICA, TRAINER, capacity).offload_bytes == offload_bytes


def test_reward_models_need_room_beside_optimizer_states_too() -> None:
    assert lowest_rung(REPLICA, TRAINER, 340.0, 200.0) == (3, 29)


AWAY = [(306.0, 0, 0), (262.0, 1, 1), (261.0, 2, 2), (228.0, 2, 2), (227.0, 4, 2), (212.0, 4, 2), (211.0, 4, 4)]


@pytest.mark.parametrize(("capacity", "kept", "away"), AWAY)
def test_a_snapshot_that_is_away_in_training_leaves_room_from_the_second_rung_on(
    capacity: float, kept: int, away: int
) -> None:
    trainer = {"weights": 15.0, "gradients": 15.0, "optimizer": 30.0, "snapshot": 15.0, "peak": 205.0}
    assert lowest_rung(REPLICA, trainer, capacity).number == kept
    assert lowest_rung(REPLICA, trainer, capacity, frees_snapshots=True).number == away


def test_a_small_trainer_asks_the_replica_alone_for_memory() -> None:
    assert lowest_rung(REPLICA, {"weights": 1.0, "peak": 60.0}, 99.0).number == 2


BESIDE = [(101.0, 0), (102.0, 1), (141.0, 1), (142.0, 2), (171.0, 2), (172.0, 3), (261.0, 3), (262.0, 4)]


@pytest.mark.parametrize(("scoring", "rung"), BESIDE)
def test_the_rung_leaves_room_for_reward_models_beside_what_both_keep(scoring: float, rung: int) -> None:
    assert lowest_rung(REPLICA, TRAINER, 340.0, scoring).number == rung


def beat(replica: str, **values: float) -> Heartbeat:
    return Heartbeat(replica[:-2], replica, "working", None, "h", 1, "h:1", 0.0, 0.0, 0, "", values)


async def test_the_models_of_the_reward_service_are_measured_before_less_is_freed(bus: Bus) -> None:
    two = 'placement.mode = "shared"\ntrainer.ranks = 2\nrollout.replicas = 2\n'
    settings = loads(two + 'reward.scorers = [{kind = "model", model = "m"}]', "run.toml")
    beats = [
        beat("trainer-0", memory_peak=10.0, memory_weights=4.0),
        beat("rollout-0", memory_weights=4.0, memory_kv_cache=30.0, memory_capacity=100.0),
        beat("reward-0"),
        beat("rollout-1", memory_weights=4.0, memory_kv_cache=30.0, memory_capacity=100.0),
    ]
    grants = DeviceGrants(bus, Ledger(bus), settings, lambda: beats)
    assert (grants._rung(0), grants._rung(1)) == ((4, 0), (0, 0)), "the models use device 0 alone"
    for peak, rung in ((50.0, 0), (80.0, 1), (84.0, 2)):
        beats[2] = beat("reward-0", memory_peak=peak)
        assert grants._rung(0) == (rung, 0)


async def test_a_coordinator_that_starts_later_learns_the_largest_step_and_not_the_last(bus: Bus) -> None:
    trainer, replica = Status(), Status()
    for peak, cache in ((80.0, 30.0), (10.0, 5.0)):
        trainer.note_memory({"peak": peak, "weights": 4.0})
        replica.note_memory({"weights": 4.0, "kv_cache": cache, "capacity": 100.0})
    beats = [beat("trainer-0", **trainer.values), beat("rollout-0", **replica.values)]
    grants = DeviceGrants(bus, Ledger(bus), loads('placement.mode = "shared"', "run.toml"), lambda: beats)
    assert grants._rung(0).number == 1, "80 and 34 exceed 90"


async def test_a_tensor_parallel_replica_frees_each_of_its_devices_at_the_highest_rung_of_them(bus: Bus) -> None:
    await raw(bus).hset(bus.keys.of(RUN), "leader_term", 1)
    wide = 'placement.mode = "shared"\ntrainer.ranks = 2\nrollout.vllm.tensor_parallel_size = 2\n'
    settings = loads(wide + 'reward.scorers = [{kind = "model", model = "m"}]', "run.toml")
    beats = [
        beat("trainer-0", memory_peak=10.0, memory_weights=4.0),
        beat("rollout-0", memory_weights=4.0, memory_kv_cache=30.0, memory_capacity=100.0),
        beat("reward-0", memory_peak=80.0),
    ]
    players = Players(bus, 0, WIDE)
    players.grants = grants = DeviceGrants(bus, players.grants._ledger, settings, lambda: beats)
    assert (grants._rung(0), grants._rung(1)) == ((1, 0), (0, 0)), "each holds as much; models use one"
    await players.settle("rollout-0")
    await players.request("trainer-0")
    await grants.look()
    look = await look_at_devices(bus, DEVICES)
    assert [held.rung for held in look.grants if held is not None] == [1, 1]


async def test_the_trainer_learns_what_generation_lacks_with_its_grant(bus: Bus) -> None:
    await raw(bus).hset(bus.keys.of(RUN), "leader_term", 1)
    beats = [
        beat("trainer-0", memory_peak=60.0, memory_weights=10.0, memory_optimizer=50.0),
        beat("rollout-0", memory_weights=10.0, memory_kv_cache=30.0, memory_capacity=100.0),
    ]
    players = Players(bus, 0)
    ledger, settings = players.grants._ledger, loads('placement.mode = "shared"', "run.toml")
    players.grants = DeviceGrants(bus, ledger, settings, lambda: beats)
    trainer = players.leases["trainer-0"] = DeviceLease(bus, "trainer-0", "train", (0,), TTL_S)
    await players.settle("rollout-0")
    await players.request("trainer-0")
    await players.settle("rollout-0")
    assert players.leases["rollout-0"].rung == 3
    await players.leases["rollout-0"].release()
    await players.grants.look()
    await trainer.confirm()
    assert (trainer.held, trainer.freed, trainer.offload_bytes) == (True, 3, 10)


def test_what_is_not_measured_yet_is_freed_as_far_as_possible() -> None:
    assert lowest_rung({}, TRAINER, 1000.0).number == 4
    assert lowest_rung(REPLICA, {"optimizer": 1.0}, 1000.0).number == 4


class Players:
    """Processes that request, work, are killed, frozen and restarted, and a model of who may hold what."""

    def __init__(self, bus: Bus, seed: int, held: Mapping[str, Sequence[int]] = HELD) -> None:
        self.bus, self.lot, self.held = bus, random.Random(seed), held
        self.leases = {replica: self.start(replica) for replica in held}
        self.free = [True] * DEVICES
        """Whether the last holder released the device, died or let its lease lapse."""
        self.seen: list[Grant | None] = [None] * DEVICES
        self.terms = [0] * DEVICES
        self.fenced = 0
        ledger = Ledger(bus)
        ledger.term = 1
        self.grants = DeviceGrants(bus, ledger, SETTINGS, list)

    def start(self, replica: str) -> DeviceLease:
        return DeviceLease(self.bus, replica, PHASES[replica.partition("-")[0]], self.held[replica], TTL_S)

    async def holds(self, replica: str) -> set[int]:
        look = await look_at_devices(self.bus, DEVICES)
        return {index for index, held in enumerate(look.grants) if held is not None and held.replica == replica}

    async def request(self, replica: str) -> None:
        await self.leases[replica].acquire(0.0)

    async def release(self, replica: str) -> None:
        for index in await self.holds(replica) if self.leases[replica].term else ():
            self.free[index] = True
        if self.leases[replica].term:
            await self.leases[replica].release()

    async def confirm(self, replica: str) -> None:
        lease, held = self.leases[replica], await self.holds(replica)
        try:
            await lease.look()
        except Fenced:
            self.fenced += 1
            await self.kill(replica)
        else:
            assert not lease.term or held <= set(self.held[replica]) == await self.holds(replica)
            for index in await self.holds(replica):
                self.free[index] = False

    async def kill(self, replica: str) -> None:
        for index in await self.holds(replica):
            self.free[index] = True
        self.leases[replica] = self.start(replica)
        await self.request(replica)

    async def lapse(self, replica: str) -> None:
        for index in await self.holds(replica):
            self.free[index] = True
            await raw(self.bus).hset(self.bus.keys.of(DEVICE.of(str(index))), "until_ms", 0)

    async def look(self) -> None:
        look = await look_at_devices(self.bus, DEVICES)
        before, requests = look.grants, look.requests
        await self.grants.look()
        for request in requests:  # as a decision by an older look does
            await grant_devices(self.bus, 1, request, TTL_S)
        after = (await look_at_devices(self.bus, DEVICES)).grants
        for index, held in enumerate(after):
            if held is None or (before[index] is not None and before[index].process == held.process):  # type: ignore[union-attr]
                continue
            assert self.free[index], f"device {index} was granted to {held.replica} while it was held"
            assert held.term > self.terms[index]
            self.free[index], self.terms[index] = False, held.term

    async def draw(self) -> None:
        replica, steps = (
            self.lot.choice(list(self.held)),
            (self.request, self.release, self.confirm, self.kill, self.lapse),
        )
        (step,) = self.lot.choices(steps, (6, 4, 6, 1, 1))
        await step(replica)
        if self.lot.random() < 0.6:
            await self.look()

    async def settle(self, replica: str) -> int:
        """Return the rounds until ``replica`` is granted its devices, if each holder releases what is asked back."""
        for rounds in range(10):
            await self.request(replica)
            await self.look()
            for name, lease in list(self.leases.items()):
                await self.confirm(name)
                if name != replica and (lease.rung >= 0 or (lease.term and name in ("trainer-0", "reward-0"))):
                    await self.release(name)
            if self.leases[replica].term:
                return rounds
        return 10


@pytest.mark.parametrize(("held", "seed"), [*((HELD, seed) for seed in range(8)), *((WIDE, seed) for seed in range(4))])
async def test_under_any_interleaving_no_device_is_held_twice_and_no_request_is_lost(
    bus: Bus, held: Mapping[str, Sequence[int]], seed: int
) -> None:
    await raw(bus).hset(bus.keys.of(RUN), "leader_term", 1)
    players = Players(bus, seed, held)
    for _ in range(80):
        await players.draw()
    for replica in ("trainer-0", "rollout-0", "reward-0", *held, "trainer-0"):
        assert await players.settle(replica) < 10, replica
    assert players.leases["trainer-0"].term == max(players.terms)


async def test_an_outdated_leader_grants_nothing(bus: Bus) -> None:
    await raw(bus).hset(bus.keys.of(RUN), "leader_term", 2)
    players = Players(bus, 0)
    await players.request("rollout-0")
    await players.grants.look()
    assert (await look_at_devices(bus, DEVICES)).grants == (None, None)
    assert [request.replica for request in (await look_at_devices(bus, DEVICES)).requests] == ["rollout-0"]


async def test_a_lapsed_holder_continues_if_nobody_followed_and_is_fenced_otherwise(bus: Bus) -> None:
    await raw(bus).hset(bus.keys.of(RUN), "leader_term", 1)
    players = Players(bus, 0)
    trainer, replica = players.leases["trainer-0"], players.leases["rollout-0"]
    await players.settle("trainer-0")
    await players.lapse("trainer-0")
    await trainer.confirm()
    assert await players.holds("trainer-0") == {0, 1}
    await players.lapse("trainer-0")
    await replica.acquire(0.0)
    await players.look()
    with pytest.raises(Fenced, match="term 1, found that the lease ended"):
        await trainer.confirm()
    await replica.confirm()
    assert replica.term == 2


async def test_a_new_leader_lets_a_live_holder_renew_before_it_grants_the_device_of_a_dead_one(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device_grants.SETTLE_S == 0.0
    await raw(bus).hset(bus.keys.of(RUN), "leader_term", 1)
    players = Players(bus, 0)
    trainer, replica = players.leases["trainer-0"], players.leases["rollout-0"]
    await players.settle("trainer-0")
    await replica.acquire(0.0)
    await players.lapse("trainer-0")
    monkeypatch.setattr(device_grants, "SETTLE_S", TTL_S)
    players.grants = DeviceGrants(bus, players.grants._ledger, SETTINGS, list)
    for _ in range(3):
        await players.grants.look()
    await trainer.confirm()
    assert (await players.holds("trainer-0"), trainer.term) == ({0, 1}, 1), "the bus was away, and its holder was not"
    await players.lapse("trainer-0")
    await players.grants.look()
    assert await players.holds("rollout-0") == set()
    monkeypatch.setattr(device_grants, "SETTLE_S", 0.0)
    await players.grants.look()
    assert await players.holds("rollout-0") == {0}, "it was dead"


@pytest.mark.parametrize(("now_s", "settled"), [(4.9, False), (5.1, True), (6.0, True), (7.1, False), (12.2, True)])
def test_a_leader_that_saw_nothing_for_a_second_waits_again(now_s: float, settled: bool) -> None:
    """It looks every 0.1 s, except from 6.0 to 7.1."""
    grants = DeviceGrants(None, None, SETTINGS, list)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_grants, "SETTLE_S", 5.0)
        looks = [tenth / 10 for tenth in range(int(now_s * 10 + 0.5) + 1) if not 60 < tenth < 71]
        assert [grants._has_settled(look_s) for look_s in looks][-1] is settled


def test_a_holder_tries_twice_before_its_lapsed_device_is_granted() -> None:
    assert 2 * server._BACKOFF.longest_s < _SETTLE_S


async def test_a_device_whose_memory_is_held_until_the_process_ends_is_not_released_before(bus: Bus) -> None:
    await raw(bus).hset(bus.keys.of(RUN), "leader_term", 1)
    players = Players(bus, 0)
    trainer, replica = players.leases["trainer-0"], players.leases["rollout-0"]
    async with leased(trainer, until_the_end=True):
        await players.settle("trainer-0")
        await replica.acquire(0.0)
    await players.grants.look()
    assert await players.holds("trainer-0") == {0, 1}
    async with leased(players.start("trainer-0"), until_the_end=True) as next_trainer:
        await next_trainer.acquire(0.0)
        assert await players.holds("trainer-0") == set(), "the next process ends the grant"
    await players.grants.look()
    assert await players.holds("rollout-0") == {0}, "its mere request was withdrawn"


async def test_a_restarted_process_ends_the_grant_of_its_predecessor(bus: Bus) -> None:
    await raw(bus).hset(bus.keys.of(RUN), "leader_term", 1)
    players = Players(bus, 0)
    await players.settle("rollout-0")
    assert await players.holds("rollout-0") == {0}
    await players.kill("rollout-0")
    assert await players.holds("rollout-0") == set()
    await players.look()
    assert await players.holds("rollout-0") == {0}


async def test_the_seconds_of_a_switch_to_generation_are_counted_once(bus: Bus) -> None:
    await raw(bus).hset(bus.keys.of(RUN), "leader_term", 1)
    players = Players(bus, 0)
    trainer, replica = players.leases["trainer-0"], players.leases["rollout-0"]

    async def take(lease: DeviceLease) -> dict[str, float]:
        await lease.acquire(0.0)
        await players.grants.look()
        await lease.confirm()
        return lease.take_switches()

    assert (await take(trainer))["switch_generate_s"] == 0.0
    await trainer.release()
    await take(replica)
    await replica.release(0.25)
    assert (await take(trainer))["switch_generate_s"] == 0.25
    await trainer.release()
    assert (await take(trainer))["switch_generate_s"] == 0.0, "no replica had a turn since"


@pytest.mark.parametrize(("rung", "needed"), [("auto", 7), (3, None)])
async def test_a_forced_rung_moves_all_optimizer_states_and_auto_what_is_needed(
    bus: Bus, rung: object, needed: int | None
) -> None:
    settings = loads(f'placement = {{mode = "shared", rung = {rung!r}}}', "run.toml")
    lease, status = DeviceLease(bus, "trainer-0", "train", (0,), TTL_S), Status()
    lease.offload_bytes = 7
    turns = TrainerTurns(lease, settings, status)
    assert turns.offload_bytes == needed
    await turns.end({"optimizer": 9.0}, 8.0)
    assert (status.values, turns.take_figures()) == ({"memory_optimizer": 9.0}, {"switch_moved_bytes": 8.0})
    assert turns.take_figures() == {"switch_moved_bytes": 0.0}
