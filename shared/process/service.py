"""Common frame of every service: flags, connection, signals, heartbeats, shutdown.

::

    main("rollout", start)             one sentence on stderr, no traceback, for wrong settings
      └── start(context)               the service's own coroutine; returns when it has stopped in order
            context.stop               set by SIGTERM, SIGINT and when people drain the replica
            context.live, context.cordon   current settings and orders, read with every heartbeat
"""

import argparse
import asyncio
import atexit
import contextlib
import dataclasses
import faulthandler
import json
import logging
import math
import os
import signal
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn

import psutil

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.client import connection
from penstock.shared.bus.messages import Json
from penstock.shared.bus.stores.replicas.cordon import Cordon
from penstock.shared.bus.stores.replicas.heartbeats import Heard
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.stores.replicas.run_secret import RunSecret
from penstock.shared.bus.stores.run.owner import claim
from penstock.shared.bus.stores.run.registry import registered_settings
from penstock.shared.bus.worker import Patience
from penstock.shared.errors import BusUnavailable, SettingsError
from penstock.shared.process import event_loop, log
from penstock.shared.process.endpoints import Endpoints
from penstock.shared.process.gpus import held_gpus
from penstock.shared.process.telemetry import Presence, Status
from penstock.shared.settings import Settings, load, loads
from penstock.shared.shelf.shelf import opened
from penstock.shared.text.redaction import redacted
from penstock.shared.text.terminal import cut, escaped, escaped_line
from penstock.shared.traces import TRACES

INVALID_SETTINGS = 78
"""Exit code where the settings alone are wrong, which no restart and no other node changes (EX_CONFIG of sysexits.h)."""

_LEAVE_S = 10.0
"""Time after ``bus.drain_s`` until the kernel kills a stopping process."""


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What a service receives at start."""

    settings: Settings
    service: str
    replica: str
    """The same after a restart."""
    bus: Bus
    status: Status
    stop: asyncio.Event
    live: Live
    cordon: Cordon
    secret: RunSecret
    """Authenticates the run's processes on other ports."""

    @property
    def host(self) -> str:
        """Address for other processes."""
        return own_host(self.settings)

    @property
    def patience(self) -> Patience:
        internal = self.settings.internal
        return Patience(internal.claim_after_s, internal.max_attempts, drain_s=self.settings.bus.drain_s)


def parse(service: str, arguments: Sequence[str]) -> tuple[Settings, str]:
    """Parse a command line into settings and the replica's name. Raises SettingsError: the settings are wrong."""
    parser = argparse.ArgumentParser(
        prog=f"python -m penstock.services.{service}",
        description=f"Run one {service} replica of Penstock. Any setting can be given as a flag: --run.steps 10",
    )
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--config", type=Path, help="the run's TOML file")
    start.add_argument("--from-bus", metavar="URL", help="read the settings registered on this bus with POST /v1/runs")
    parser.add_argument("--run-id", default="", help="with --from-bus: the run's id")
    parser.add_argument("--replica", default="", help="name on the bus, stable over restarts; default: the host's name")
    known, flags = parser.parse_known_args(arguments)
    settings = load(known.config, flags) if known.config else _registered(known.from_bus, known.run_id, flags)
    if not settings.run.id:
        raise SettingsError(
            "run.id is not set, by which services find their run: set run.id, or start with `penstock up`"
        )
    return _beside_up(settings), known.replica or f"{service}-{socket.gethostname()}"


def _beside_up(settings: Settings) -> Settings:
    """Return settings with a server's URL; embedded: that of the run's ``penstock up``."""
    if settings.bus.url != "embedded":
        return settings
    table = settings.run_folder / "up.json"
    try:
        url = str(json.loads(table.read_text(encoding="utf-8"))["bus"])
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(
            f"bus.url is 'embedded', but {table} does not exist: start `penstock up` first, or change bus.url"
        ) from error
    return settings.model_copy(update={"bus": settings.bus.model_copy(update={"url": url})})


def _registered(url: str, run_id: str, flags: Sequence[str]) -> Settings:
    """Return a registered run's settings, on ``url``."""

    async def fetch() -> str:
        bus = await Bus.connect(url, run_id, wait_s=30.0)
        try:
            toml = await registered_settings(bus)
        finally:
            await bus.close()
        if toml is None:
            raise SettingsError(f"no run {run_id!r} on that bus: register it by POST /v1/runs")
        return toml

    try:
        toml = asyncio.run(fetch())
    except BusUnavailable as error:
        raise SettingsError(f"{error}: check --from-bus") from error
    return loads(toml, f"run {run_id}", [*flags, "--bus.url", url], os.environ)


@contextlib.asynccontextmanager
async def serve(settings: Settings, service: str, replica: str) -> AsyncIterator[Context]:
    """Connect, serve metrics and send heartbeats while the body runs; SIGTERM and SIGINT set ``stop``.

    A hanging shutdown (e.g. the bus is gone) is ended ``_LEAVE_S`` after ``bus.drain_s``.
    """
    starters = _starters()
    stop, told_to_stop = _listen_for_stop(settings.bus.drain_s)
    TRACES.start(settings.run.id, service, replica)
    status = Status(gpus=held_gpus(settings, service, os.environ))
    status.start.begin("waiting for the bus")
    bus = await Bus.connect(settings.bus.url, settings.run.id, wait_s=settings.internal.start_wait_s)
    await _claim(bus, settings)
    bus.wait_for_ever()

    live, cordon, secret = Live(bus, settings), Cordon(bus, replica, told_to_stop), RunSecret(bus)

    async def hear(heard: Heard) -> None:
        cordon.hear(heard.order)
        await live.hear(heard.revision)
        await secret.hear(heard.secret)
        status.settings_revision, status.taking = live.revision, cordon.taking.is_set()

    endpoints = Endpoints(
        own_host(settings), settings.run.metrics_port, "run.metrics_port", lambda: readiness(status, bus.available)
    )
    status.address = endpoints.address
    status.start.begin("starting")
    await cordon.begin()
    await secret.refresh()
    presence = Presence(bus, service, replica, settings.internal.heartbeat_s, status, hear)
    beating = asyncio.Event()
    beats, body = asyncio.create_task(presence.run(beating)), asyncio.current_task()
    noting = asyncio.create_task(presence.note_told(stop))
    leaving = asyncio.create_task(_leave(stop, settings, bus, starters))
    assert body is not None
    # a service without heartbeats counts as gone, and hears of no change
    beats.add_done_callback(lambda beats: body.cancel() if _error_of(beats) is not None else None)
    try:
        async with (
            event_loop.watched(),
            opened(bus, settings, service, replica, own_host(settings), secret) as status.shelf,
        ):
            yield Context(settings, service, replica, bus, status, stop, live, cordon, secret)
        with contextlib.suppress(TimeoutError, BusUnavailable):
            async with asyncio.timeout(2.0):
                await presence.leave()
    finally:
        beating.set()
        beats.cancel()
        noting.cancel()
        leaving.cancel()
        await asyncio.gather(beats, noting, leaving, return_exceptions=True)
        await asyncio.to_thread(TRACES.stop)
        endpoints.close()
        await bus.close()
        _end_after(0.0)
        if (error := _error_of(beats)) is not None:
            raise error


def _starters() -> list[int]:
    """Return the id of the parent, which may be ``penstock up``, and of a rank's launcher's; the kernel replaces dead ones."""
    return [process.pid for process in psutil.Process().parents()[: 1 + ("RANK" in os.environ)]]


async def _leave(stop: asyncio.Event, settings: Settings, bus: Bus, starters: list[int]) -> None:
    """Do not wait for the bus of a ``penstock up`` that was killed: the kernel stops both it and this process."""
    await stop.wait()
    now = _starters()[: len(starters)]  # RANK may be new: a single rank without a launcher sets it itself
    if settings.bus.url.startswith("unix:") and now != starters:
        bus.wait_no_more()


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


async def _claim(bus: Bus, settings: Settings) -> None:
    try:
        await claim(bus, settings.run.id, settings.internal.owner)
    except BaseException:
        await bus.close()
        raise


@contextlib.asynccontextmanager
async def attend(settings: Settings) -> AsyncIterator[tuple[asyncio.Event, Status]]:
    """Serve metrics without a bus; SIGTERM and SIGINT set the event. It ends like :func:`serve`."""
    stop, _ = _listen_for_stop(settings.bus.drain_s)
    status = Status()
    endpoints = Endpoints(
        own_host(settings),
        settings.run.metrics_port,
        "run.metrics_port",
        lambda: {"ready": status.ready, "state": status.state},
    )
    status.address = endpoints.address
    try:
        async with event_loop.watched():
            yield stop, status
    finally:
        endpoints.close()
        _end_after(0.0)


def _listen_for_stop(drain_s: float) -> tuple[asyncio.Event, Callable[[], None]]:
    """Return an event set by SIGTERM and SIGINT, and a function that sets it; both start the time limit."""
    stop = asyncio.Event()

    def told_to_stop() -> None:
        if not stop.is_set():
            stop.set()
            _end_after(drain_s + _LEAVE_S)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told_to_stop)
    return stop, told_to_stop


def _end_after(seconds: float) -> None:
    """Have this process ended after ``seconds``; 0: not.

    The kernel keeps SIGALRM from process 1, which a service is in its container, so a thread ends it a second later.
    """
    signal.alarm(math.ceil(seconds))
    if seconds:
        faulthandler.dump_traceback_later(math.ceil(seconds) + 1, exit=True, file=2)
    else:
        faulthandler.cancel_dump_traceback_later()


def seconds_left() -> float:
    """Return the time before :func:`serve` ends this process; 0 if not stopping."""
    return signal.getitimer(signal.ITIMER_REAL)[0]


def readiness(status: Status, bus_available: bool) -> dict[str, Json]:
    """Return /readyz: ``ready``, state, checks by name."""
    checks: dict[str, Json] = {
        "bus": {"ok": bus_available, "detail": "answers" if bus_available else "does not answer"},
        "work": {"ok": status.ready, "detail": status.last_error or status.state},
    }
    return {"ready": status.ready and bus_available, "state": status.state, "checks": checks}


def own_host(settings: Settings) -> str:
    """Return this process's address: ``run.host``, else its pod's, else that of the route to the bus.

    Raises:
        SettingsError: the route is not known.
    """
    if named := settings.run.host or os.environ.get("POD_IP"):
        return named
    server = connection.first_server(settings.bus.url)
    return "127.0.0.1" if server is None else _address_towards(*server)


def _address_towards(host: str, port: int) -> str:
    """Return the local address of the route to a server; sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SettingsError(
            f"no route to the bus at {host}:{port}, by which this machine finds its own address ({error}): change "
            "bus.url, or set run.host to the address at which others reach this machine"
        ) from error


def main(
    service: str,
    run: Callable[[Settings, str], Awaitable[int | None]],
    arguments: Sequence[str] | None = None,
    *,
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Run a service; return its exit code.

    It is 0 if stopped in order, ``INVALID_SETTINGS``, 2 if it cannot start here and now (settings that do not fit the
    place, a bus that does not answer), 1 for a bug, or ``run``'s. ``loop`` replaces asyncio's event loop.
    """
    try:
        try:
            settings, replica = parse(service, sys.argv[1:] if arguments is None else arguments)
        except SettingsError as error:
            return refuse(service, error, INVALID_SETTINGS)
        log.set_up(settings.telemetry.log_level, replica)
        with asyncio.Runner(loop_factory=loop) as runner:
            try:
                code = runner.run(_awaited(run(settings, replica)))
                return settings.internal.stopped_exit_status if code is None else code
            except Exception as error:  # noqa: BLE001 (reported before the runner waits for what does not end)
                return _report(service, error)
            finally:
                _end_after(_LEAVE_S)  # the runner waits for cancelled tasks and for threads
    except Exception as error:  # noqa: BLE001 (the outermost edge: the caller leaves, and no library adds its last words to the traceback)
        return _report(service, error)
    finally:
        _end_after(0.0)


def _report(service: str, error: Exception) -> int:
    """Print what ended a service; return its exit code."""
    if isinstance(error, (SettingsError, BusUnavailable)):
        return refuse(service, error)
    print(escaped(cut(redacted("".join(traceback.format_exception(error))))), file=sys.stderr)  # noqa: T201
    return 1


def leave(code: int) -> NoReturn:
    """Exit with ``code`` after exit handlers and flushing, without waiting for threads.

    A library's endless thread (a rendezvous with a stopped process) would abort the interpreter's exit in C++.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse(service: str, error: Exception, code: int = 2) -> int:
    """Print why a service cannot start; return its exit code. Lines begin with the service's name, for `penstock up`."""
    for line in str(error).splitlines():
        print(f"penstock {service}: {escaped_line(cut(redacted(line)))}", file=sys.stderr)  # noqa: T201
    return code


async def _awaited(work: Awaitable[int | None]) -> int | None:
    return await work
