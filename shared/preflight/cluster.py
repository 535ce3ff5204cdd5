"""Checks of what a pod reaches: names, the bus, connections that must be closed, and files that other pods write."""

import contextlib
import os
import queue
import socket
import threading
import time
from pathlib import Path

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Event
from penstock.shared.bus.streams import Stream
from penstock.shared.errors import BusUnavailable, SettingsError
from penstock.shared.preflight.finding import Finding, failed, passed
from penstock.shared.settings.reading.published import check_public

SCRATCH = Stream("check", max_entries=10)
_CLOCK_S = 5.0
_CONNECT_S = 3.0


def names(host: str, wait_s: float = 10.0) -> Finding:
    """Check that DNS knows ``host``."""
    answer: queue.SimpleQueue[Finding] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            address = socket.getaddrinfo(host, None)[0][4][0]
        except OSError as error:
            answer.put(_unknown(host, str(error)))
        else:
            answer.put(passed("dns", f"{host} is {address}"))

    threading.Thread(target=resolve, name="resolve a name", daemon=True).start()  # it cannot be interrupted
    try:
        return answer.get(timeout=wait_s)
    except queue.Empty:
        return _unknown(host, f"no answer in {wait_s:g} s")


def _unknown(host: str, answer: str) -> Finding:
    fix = "allow the cluster's name servers in networkPolicy.dns, and check that the Service exists"
    return failed("dns", f"DNS to know {host}", answer, fix)


def closed(host: str, port: int) -> Finding:
    """Check that a port on which something listens, and which NetworkPolicies must close to this pod, is closed."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), _CONNECT_S):
        fix = "use a network plugin that enforces NetworkPolicies, or set networkPolicy.enabled to false and isolate the namespace yourself"
        return failed("network policy", f"no connection from here to {host}:{port}", "one", fix)
    return passed("network policy", f"{host}:{port} is closed to this pod")


def without_secrets(config: Path) -> Finding:
    """Check that the run's settings file, which a ConfigMap keeps, holds no secret."""
    try:
        check_public(config.read_text(encoding="utf-8"), str(config))
    except SettingsError as error:
        return Finding("settings", False, str(error))
    return passed("settings", f"{config} holds no password or key")


async def bus(url: str, run_id: str, wait_s: float = 30.0) -> list[Finding]:
    """Check that the bus passes a message, has a memory limit, and agrees on the time."""
    try:
        connected = await Bus.connect(url, run_id, wait_s=wait_s)
    except (BusUnavailable, SettingsError) as error:
        return [Finding("bus", False, str(error))]
    try:
        _, most = await connected.memory_bytes()
        sent = Event(at_s=time.time(), source="preflight", name="check", detail="a round trip")
        before_s = time.time()
        entry = await connected.publish(SCRATCH, sent)
        received = await connected.newest(SCRATCH, Event)
        answer = passed("bus", connected.server) if received and received[0][1] == sent else _lost()
        return [answer, _limit(most), clock(int(entry.partition("-")[0]) / 1000, before_s), await _replicas(connected)]
    finally:
        with contextlib.suppress(BusUnavailable):
            await connected.remove(SCRATCH)
        await connected.close()


def _lost() -> Finding:
    return failed(
        "bus", "a message back from the bus", "another", "check that no other program writes to this run's keys"
    )


async def _replicas(bus: Bus) -> Finding:
    try:
        return passed(
            "replicas", await bus.check_replication() or "a failover of the bus loses at most what its replicas lag"
        )
    except SettingsError as error:
        return Finding("replicas", False, str(error))


def _limit(most: int) -> Finding:
    if most:
        return passed("maxmemory", f"the bus holds up to {most / 2**30:.1f} GiB")
    fix = "set maxmemory to about 60 % of the server's memory: without it a full bus is killed instead of pausing admission"
    return failed("maxmemory", "a memory limit of the bus", "maxmemory 0", fix)


def clock(theirs_s: float, ours_s: float) -> Finding:
    """Check that this machine and the bus agree on the time."""
    apart_s = abs(theirs_s - ours_s)
    if apart_s <= _CLOCK_S:
        return passed("clock", f"{apart_s:.1f} s from the bus's clock")
    fix = "synchronise the nodes' clocks (chrony or systemd-timesyncd)"
    return failed("clock", f"a clock within {_CLOCK_S:g} s of the bus's", f"{apart_s:.0f} s", fix)


def leave(file: Path) -> Finding:
    """Write a file for pods on other nodes to see."""
    try:
        file.write_text(os.uname().nodename, encoding="utf-8")
    except OSError as error:
        return failed("volume", f"to write {file}", str(error), "check storage.runs and the volume's permissions")
    return passed("volume", f"wrote {file}")


def seen(file: Path, wait_s: float = 30.0) -> Finding:
    """Check that a file that another pod wrote is visible here; remove it if this pod may."""
    until_s = time.monotonic() + wait_s
    while not file.exists():
        if time.monotonic() > until_s:
            fix = "use a storage class with ReadWriteMany for storage.runs, or checkpoints.s3"
            return failed("volume", f"{file}, which another pod wrote", "no such file", fix)
        time.sleep(0.2)
    return passed("volume", f"{file} of another pod is visible")
