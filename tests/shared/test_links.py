"""Laws of `penstock doctor --links`."""

import asyncio
import re
import time

import pytest

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat, beat_once
from penstock.shared.bus.stores.replicas.run_secret import RunSecret
from penstock.shared.errors import PeerError
from penstock.shared.peers import frames
from penstock.shared.peers.handshake import introduce
from penstock.shared.preflight.links import links
from penstock.shared.weights.source.source import WeightSource
from tests.conftest import PATIENCE_S, Server, free_port

_FIGURES = re.compile(r"[0-9.]+ ms, [0-9,]+ MB/s")


async def beat(bus: Bus, replica: str, source: str) -> None:
    now_s = time.time()
    said = Heartbeat("rollout", replica, "working", None, "h", 1, "h:1", now_s, now_s, 0, "", {}, source=source)
    await beat_once(bus, said, PATIENCE_S)


async def test_each_process_that_serves_weights_is_measured_and_one_that_is_away_fails_with_its_setting(
    bus: Bus, server: Server
) -> None:
    secret = RunSecret(bus)
    await secret.refresh()
    source = WeightSource("127.0.0.1", 0, secret, deadline_s=PATIENCE_S)
    try:
        await beat(bus, "rollout-0", source.address)
        await beat(bus, "rollout-1", f"127.0.0.1:{free_port()}")
        to_bus, near, away = await links(server.url, bus.run_id)
    finally:
        source.close()
    assert (to_bus.check, to_bus.ok) == ("link to the bus", True)
    assert _FIGURES.fullmatch(to_bus.sentence)
    assert (near.check, near.ok) == ("link to rollout-0", True)
    assert _FIGURES.match(near.sentence)
    assert (away.check, away.ok) == ("link to rollout-1", False)
    assert "set run.host of that process" in away.sentence


async def test_a_run_that_serves_nothing_has_a_link_to_its_bus_alone(bus: Bus, server: Server) -> None:
    assert [finding.check for finding in await links(server.url, bus.run_id)] == ["link to the bus", "links"]


@pytest.mark.parametrize("nbytes", [frames.PROBE_BYTES + 1, -1, True, "all", None])
async def test_a_source_sends_no_more_than_a_probe_may_ask_for(nbytes: object) -> None:
    source = WeightSource("127.0.0.1", 0, lambda: b"secret", deadline_s=PATIENCE_S)
    try:
        host, _, port = source.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await introduce(reader, writer, b"secret")
        writer.write(frames.pack({"verb": "probe", "bytes": 1000}))
        assert await frames.receive_async(reader) == {"zeros": bytes(1000)}
        writer.write(frames.pack({"verb": "probe", "bytes": nbytes}))
        with pytest.raises(PeerError, match="closed the connection"):
            await frames.receive_async(reader)
        writer.close()
    finally:
        source.close()
