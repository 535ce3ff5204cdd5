"""Laws of a shelf: what was put is fetched or lost, never other; strangers and hostile peers get and leave nothing."""

import asyncio
import dataclasses
import hashlib
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.claims import Claim, Holder
from penstock.shared.bus.keys import GENERATING, RUN
from penstock.shared.bus.messages import RolloutGroup
from penstock.shared.bus.stores.replicas.heartbeats import SERVICE
from penstock.shared.bus.streams import JOURNAL, ROLLOUTS
from penstock.shared.errors import PeerError, ShelfLost
from penstock.shared.peers.frames import Frame
from penstock.shared.peers.handshake import Secret
from penstock.shared.shelf import protocol
from penstock.shared.shelf import shelf as shelf_module
from penstock.shared.shelf.shelf import PUT, Shelf
from penstock.shared.shelf.store import ShelfFull, Store
from tests.conftest import PATIENCE_S
from tests.support import builders
from tests.support.raw_redis import raw
from tests.support.shelves import LIMITS, SECRET, reader, served

PAYLOAD = bytes(range(256)) * 40_000
"""Several parts."""


def _digest(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


async def _put(shelf: Shelf, payload: bytes = PAYLOAD, group_id: int = 3) -> Claim:
    claim = await shelf.put(payload, group_id)
    assert claim is not None
    return claim


async def test_a_payload_is_on_two_shelves_before_its_claim_is_there(bus: Bus, tmp_path: Path) -> None:
    async with served(bus, tmp_path, "a") as first, served(bus, tmp_path, "b"):
        claim = await _put(first)
        assert (claim.digest, claim.size) == (_digest(PAYLOAD), len(PAYLOAD))
        assert [holder.replica for holder in claim.holders] == ["a", "b"]
        assert {path.parent.name for path in tmp_path.glob("*/3-*")} == {"a", "b"}
        assert await reader(bus, tmp_path).fetch(claim) == PAYLOAD


async def test_the_second_copy_is_on_another_host_if_there_is_one(bus: Bus, tmp_path: Path) -> None:
    own = socket.gethostname()
    async with (
        served(bus, tmp_path, "a", host=own) as first,
        served(bus, tmp_path, "b", host=own),
        served(bus, tmp_path, "c", host="elsewhere"),
    ):
        assert [holder.replica for holder in (await _put(first)).holders] == ["a", "c"]


async def test_pods_of_one_node_are_one_machine(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's host is the pod; the chart names the node."""
    monkeypatch.setenv("NODE_NAME", "node-1")
    apart, together = PUT.labels("shelved")._value, PUT.labels("same_host")._value
    before = apart.get(), together.get()
    async with (
        served(bus, tmp_path, "a", host="pod-a", node="node-1") as first,
        served(bus, tmp_path, "b", host="pod-b", node="node-1"),
    ):
        assert [holder.replica for holder in (await _put(first)).holders] == ["a", "b"]
        first._partners_until_s = 0.0
        async with served(bus, tmp_path, "c", host="pod-c", node="node-2"):
            assert [holder.replica for holder in (await _put(first)).holders] == ["a", "c"]
    assert (apart.get() - before[0], together.get() - before[1]) == (1, 1)


async def test_without_room_or_a_second_replica_the_bus_carries_the_payload(bus: Bus, tmp_path: Path) -> None:
    async with served(bus, tmp_path, "a") as first:
        assert await first.put(PAYLOAD, 1) is None, "no other replica"
        async with served(bus, tmp_path, "b", most_bytes=1000):
            assert await first.put(PAYLOAD, 2) is None, "the other one is full"
    async with served(bus, tmp_path / "other", "a", most_bytes=1000) as first, served(bus, tmp_path / "other", "c"):
        assert await first.put(PAYLOAD, 3) is None, "this one is full"
        assert first.values["shelf_inline"] == 1
    async with served(bus, tmp_path, "d", dataclasses.replace(LIMITS, copies=1)) as alone:
        assert [holder.replica for holder in (await _put(alone)).holders] == ["d"]


async def test_a_lost_or_damaged_copy_is_fetched_from_the_other_holder(bus: Bus, tmp_path: Path) -> None:
    async with served(bus, tmp_path, "a") as first, served(bus, tmp_path, "b"):
        claim = await _put(first)
        (path,) = tmp_path.glob("a/3-*")
        path.write_bytes(b"x" + PAYLOAD[1:])
        assert await reader(bus, tmp_path).fetch(claim) == PAYLOAD
        assert not path.exists(), "a damaged file is deleted"
        shutil.rmtree(tmp_path / "b")
        with pytest.raises(ShelfLost, match="of group 3 on a shelf of a, b"):
            await reader(bus, tmp_path).fetch(claim)


async def test_a_holder_that_was_started_again_serves_its_files_at_its_new_address(bus: Bus, tmp_path: Path) -> None:
    async with served(bus, tmp_path, "b") as _:
        async with served(bus, tmp_path, "a") as first:
            claim = await _put(first)
        shutil.rmtree(tmp_path / "b")
        async with served(bus, tmp_path, "a") as again:
            assert again.address != claim.holders[0].address
            assert await reader(bus, tmp_path).fetch(claim) == PAYLOAD


async def test_a_silent_holder_is_waited_for_once_and_a_dead_one_not_for_each_payload(bus: Bus, tmp_path: Path) -> None:
    waits = dataclasses.replace(LIMITS, lost_after_s=1.0)
    async with served(bus, tmp_path, "a") as first, served(bus, tmp_path, "b"):
        claims = [await _put(first, bytes([number]) * 2000, number) for number in range(4)]
    for name in ("a", "b"):
        await bus.write(SERVICE.of(name), "DEL")
    reading = reader(bus, tmp_path, waits)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    for claim in claims:
        with pytest.raises(ShelfLost):
            await reading.fetch(claim)
    assert loop.time() - started_s >= 1.0
    assert set(reading._silent_since_s) == {"a", "b"}, "which later fetches do not wait for"


async def test_a_silent_shelf_with_heartbeats_is_asked_by_one_put_and_then_left_alone(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        served(bus, tmp_path, "a", host=socket.gethostname()) as first,
        served(bus, tmp_path, "silent") as silent,
        served(bus, tmp_path, "c", host=socket.gethostname()),
    ):
        asked, put = list[str](), protocol.put

        async def put_or_hang(address: str, secret: Secret, group_id: int, digest: str, payload: bytes) -> bool:
            asked.append(address)
            if address == silent.address:
                await asyncio.get_running_loop().create_future()
            return await put(address, secret, group_id, digest, payload)

        monkeypatch.setattr(protocol, "put", put_or_hang)
        monkeypatch.setattr(shelf_module, "_COPIES_S", 0.01)
        assert await first.put(PAYLOAD, 3) is None
        assert asked == [silent.address]
        monkeypatch.setattr(shelf_module, "_COPIES_S", PATIENCE_S)
        for number in range(4, 7):
            assert [holder.replica for holder in (await _put(first, group_id=number)).holders] == ["a", "c"]
            first._partners_until_s = 0.0
        assert asked.count(silent.address) == 1
        first._avoided_until_s["silent"] = 1e-9
        monkeypatch.setattr(protocol, "put", put)
        assert [holder.replica for holder in (await _put(first, group_id=7)).holders] == ["a", "silent"]


async def test_a_silent_shelf_with_heartbeats_is_asked_by_one_fetch_and_then_left_alone(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(bus, tmp_path, "silent") as silent, served(bus, tmp_path, "b"):
        claims = [await _put(silent, bytes([number]) * 2000, number) for number in range(4)]
        asked, get = list[str](), protocol.get

        async def get_or_time_out(*request: Any) -> bytes | None:
            asked.append(request[2])
            if request[2] == "silent":
                raise TimeoutError
            return await get(*request)

        monkeypatch.setattr(protocol, "get", get_or_time_out)
        reading = reader(bus, tmp_path)
        for claim in claims[:3]:
            assert await reading.fetch(claim) == bytes([claim.group_id]) * 2000
        assert asked == ["silent", "b", "b", "b"]
        shutil.rmtree(tmp_path / "b")
        with pytest.raises(ShelfLost):
            await reading.fetch(claims[3])
        assert asked == ["silent", "b", "b", "b", "b"]
        reading._avoided_until_s["silent"] = 1e-9
        monkeypatch.setattr(protocol, "get", get)
        assert await reading.fetch(claims[3]) == bytes([3]) * 2000
        assert not reading._avoided_until_s


async def test_the_trainer_keeps_what_it_fetched(bus: Bus, tmp_path: Path) -> None:
    async with served(bus, tmp_path, "a") as first, served(bus, tmp_path, "b"):
        claim = await _put(first)
        assert await reader(bus, tmp_path, keeps=True).fetch(claim) == PAYLOAD
    assert await reader(bus, tmp_path).fetch(claim) == PAYLOAD, "from its own file, by a later process"


async def test_a_sweep_deletes_the_payloads_of_groups_that_left_and_of_no_other(bus: Bus, tmp_path: Path) -> None:
    async with served(bus, tmp_path, "a") as first, served(bus, tmp_path, "b"):
        for group in (1, 2, 3):
            await _put(first, bytes([group]) * 2000, group)
        await first.sweep()
        assert len(list(tmp_path.glob("a/*"))) == 3, "a bus that knows no run may have lost it"
        await bus.write(RUN, "HSET", "state", "running")
        await bus.write(GENERATING, "HSET", "1", "prompt")
        await bus.publish(ROLLOUTS, builders.group(2), "2")
        await first.sweep()
        assert {path.name[:1] for path in tmp_path.glob("a/*")} == {"1", "2"}
        (delivery,) = await bus.read(ROLLOUTS, RolloutGroup, "reward-0", 1, None)
        assert await bus.bury(delivery, "")
        await first.sweep()
        assert {path.name[:1] for path in tmp_path.glob("a/*")} == {"1", "2"}, "a dead letter may be revived"


async def test_a_sweep_reads_no_more_of_the_bus_than_its_own_groups_need(bus: Bus, tmp_path: Path) -> None:
    """Entries of the journal of an older release have their payloads: a page of 1,000 could fill the server."""

    async def pages() -> int:
        before = await raw(bus).info("commandstats")
        await shelf.sweep()
        after = await raw(bus).info("commandstats")
        return int(after["cmdstat_xrange"]["calls"] - before.get("cmdstat_xrange", {"calls": 0})["calls"])

    await bus.write(RUN, "HSET", "state", "running")
    for group in range(30):
        await bus.append(JOURNAL, {"id": str(group), "step": "1", "data": b"of an older release"})
    async with served(bus, tmp_path, "a") as shelf, served(bus, tmp_path, "b"):
        await _put(shelf, b"x" * 2000, 20)
        assert await pages() == 4 + 3, "of four empty streams, and of the journal up to its 24th entry"
        await bus.write(GENERATING, "HSET", "20", "prompt")
        assert await pages() == 0
        assert len(list(tmp_path.glob("a/20-*"))) == 1


async def test_a_stranger_gets_and_leaves_nothing(bus: Bus, tmp_path: Path) -> None:
    async with served(bus, tmp_path, "a") as first, served(bus, tmp_path, "b"):
        claim = await _put(first)
        asked = ("a", 3, claim.digest, claim.size)
        with pytest.raises(PeerError, match="did not accept"):
            await protocol.get(first.address, lambda: b"another", *asked)
        with pytest.raises(PeerError, match="did not accept"):
            await protocol.put(first.address, lambda: b"another", 4, _digest(b"x"), b"x")
        reading, writer = await asyncio.open_connection(*first.address.split(":"))
        await reading.read(1)
        writer.write((1 << 31).to_bytes(4, "big"))  # a length that no frame of a stranger may have
        assert not (await reading.read())[4096:], "closed"
        writer.close()
        assert await protocol.get(first.address, lambda: SECRET, *asked) == PAYLOAD, "it still serves"
        assert len(list(tmp_path.glob("a/*"))) == 1


HOSTILE: list[Frame] = [
    {},
    {"get": "../../etc/passwd", "group": 1, "of": "a"},
    {"get": _digest(b""), "group": -1, "of": "a"},
    {"get": _digest(b""), "group": "1/../..", "of": "a"},
    {"get": _digest(b""), "group": 1},
    {"put": _digest(b"x"), "group": 1, "size": 0},
    {"put": _digest(b"x"), "group": 1, "size": -5},
    {"put": _digest(b"x"), "group": 1, "size": 1 << 60},
    {"put": _digest(b"x"), "group": 1, "size": "1"},
    {"put": _digest(b"x").upper(), "group": 1, "size": 1},
    {"put": "x" * 64, "group": 1, "size": 1},
]


async def test_hostile_requests_of_a_peer_are_refused_and_leave_nothing(bus: Bus, tmp_path: Path) -> None:
    async with served(bus, tmp_path, "a") as shelf:
        for request in HOSTILE:
            async with protocol.connected(shelf.address, lambda: SECRET) as (hears, writer):
                await protocol.say(writer, request)
                assert await hears.read() == b"", request
        for parts in ([b"xy"], [b""], [b"y"], []):
            async with protocol.connected(shelf.address, lambda: SECRET) as (hears, writer):
                await protocol.say(writer, {"put": _digest(b"x"), "group": 1, "size": 1})
                assert "go" in await protocol.hear(hears)
                for part in parts:
                    await protocol.say(writer, {"data": part})
                writer.write_eof()
                assert await hears.read() == b"", parts
        assert list(tmp_path.glob("a/*")) == []


async def test_a_hostile_server_is_found_out(bus: Bus, tmp_path: Path) -> None:
    async with served(bus, tmp_path, "a") as first, served(bus, tmp_path, "b"):
        claim = await _put(first)
        with pytest.raises(PeerError, match="expected a payload of 5 bytes"):
            await protocol.get(first.address, lambda: SECRET, "a", 3, claim.digest, 5)
        assert await protocol.get(first.address, lambda: SECRET, "other", 3, claim.digest, claim.size) is None
        for address in ("", "nowhere", "127.0.0.1:x", "127.0.0.1:99999", "a..b:80", f"{'a' * 70}.b:80", "a\0b:80"):
            with pytest.raises(ShelfLost):
                await reader(bus, tmp_path).fetch(dataclasses.replace(claim, holders=(Holder("gone", address),)))
        (path,) = tmp_path.glob("a/3-*")
        other = b"y" * len(PAYLOAD)
        moved = path.with_name(f"3-{_digest(other)}")
        path.rename(moved)
        asked = Claim(3, _digest(other), len(other), (Holder("a", first.address),))
        with pytest.raises(ShelfLost):
            await reader(bus, tmp_path).fetch(asked)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), max_size=20))
def test_a_store_holds_what_fits_and_knows_it_again(
    tmp_path_factory: pytest.TempPathFactory, puts: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store, kept = Store(folder, 100), dict[tuple[int, str], bytes]()
    for group, size in puts:
        payload = bytes([group]) * size
        key = (group, _digest(payload))
        try:
            store.put(*key, payload)
            kept[key] = payload
        except ShelfFull:
            assert sum(map(len, kept.values())) + size > 100
        assert store.nbytes == sum(map(len, kept.values())) <= 100
    (folder / ".0-half").write_bytes(b"x")
    again = Store(folder, 100)
    assert {name: again.read(*name) for name in again.names} == kept
    again.drop(kept)
    assert (list(folder.iterdir()), again.nbytes) == ([], 0)
