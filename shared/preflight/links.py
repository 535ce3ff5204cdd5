"""Latency and bandwidth between this machine and a run's bus, trainer and replicas.

Weights' sources answer a probe on the connections by which replicas pull, with the run's secret. Peers are measured one
after the other, each for at most :data:`_PROBE_S` and :data:`_MOST_BYTES`.
"""

import asyncio
import contextlib
import functools
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.heartbeats import echo, heartbeats
from penstock.shared.bus.stores.replicas.run_secret import known_secret
from penstock.shared.errors import BusUnavailable, PeerError, SettingsError
from penstock.shared.peers import frames
from penstock.shared.peers.handshake import connect
from penstock.shared.preflight.finding import Finding, failed, passed

_CONNECT_S, _PROBE_S, _MOST_BYTES = 5.0, 2.0, 256 << 20
_ECHO_BYTES, _PINGS = 1 << 20, 9

Exchange = Callable[[int], Awaitable[object]]
"""Moves a number of bytes."""


async def links(url: str, run_id: str) -> list[Finding]:
    """Measure the links to the bus at ``url`` and to all that serve weights of the run."""
    try:
        bus = await Bus.connect(url, run_id, wait_s=_CONNECT_S)
    except (BusUnavailable, SettingsError) as error:
        return [Finding("link to the bus", False, str(error))]
    try:
        measured = await _measured(functools.partial(echo, bus), _ECHO_BYTES, 2 * _ECHO_BYTES)
        to_bus = passed("link to the bus", measured)
        secret, peers = await known_secret(bus), await _sources(bus)
    except BusUnavailable as error:
        return [Finding("link to the bus", False, str(error))]
    finally:
        await bus.close()
    if not peers:
        return [to_bus, passed("links", "no trainer or replica of this run serves weights now")]
    return [to_bus, *[await _link(name, address, secret) for name, address in peers.items()]]


async def _sources(bus: Bus) -> dict[str, str]:
    """Return ``host:port`` of each process that serves weights, the trainer's first."""
    ledger = Ledger(bus)
    newest = (await ledger.status()).newest_version
    record = None if newest is None else await ledger.policy(newest)
    trainer = {"the trainer": record.source} if record is not None and record.source else {}
    return trainer | {beat.replica: beat.source for beat in await heartbeats(bus) if beat.source}


async def _link(name: str, address: str, secret: bytes) -> Finding:
    check = f"link to {name}"
    try:
        async with asyncio.timeout(_CONNECT_S + 2 * _PROBE_S):
            reader, writer = await connect(address, secret)
            with contextlib.closing(writer):

                async def probe(nbytes: int) -> None:
                    writer.write(frames.pack({"verb": "probe", "bytes": nbytes}))
                    answer = await frames.receive_async(reader)
                    if "error" in answer:
                        raise PeerError(f"the peer is of another release: {answer['error']}")

                return passed(check, f"{await _measured(probe, frames.PROBE_BYTES, frames.PROBE_BYTES)}, at {address}")
    except (OSError, PeerError, TimeoutError, ValueError) as error:
        fix = "open its ports to this machine, or set run.host of that process to its address on the network that both share"
        return failed(check, f"an answer at {address}", str(error) or "none in time", fix)


async def _measured(exchange: Exchange, nbytes: int, moved_bytes: int) -> str:
    """Return latency and bandwidth; an exchange of ``nbytes`` moves ``moved_bytes``."""
    waits_s = list[float]()
    for _ in range(_PINGS):
        with _timed(waits_s):
            await exchange(0)
    spent_s, moved = list[float](), 0
    while sum(spent_s) < _PROBE_S / 2 and moved < _MOST_BYTES:
        with _timed(spent_s):
            await exchange(nbytes)
        moved += moved_bytes
    return f"{statistics.median(waits_s) * 1000:.2f} ms, {moved / sum(spent_s) / 1e6:,.0f} MB/s"


@contextlib.contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    began_s = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - began_s)
