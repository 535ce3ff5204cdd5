"""Assemble the coordinator, and order its start and shutdown.

::

    lease ──leads──▶ promotion ──wake──▶ admission ◀──open── lifecycle ──▶ evaluator, recorder, summary, report
                         └───────wake──────────────────────────▲  ▲        guards, rollbacks, operations
                                                               │  └── api (commands)      monitor ──▶ gauges, GET /v1/run

Every coordinator answers the API; one leads. Shutdown: stop leading; complete the records; release the lease; close the
API.
"""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path

import psutil

from penstock.services.coordinator.admission import dataset, first_rows
from penstock.services.coordinator.admission.admission import Admission, terms_of
from penstock.services.coordinator.admission.bus_full import Shortage
from penstock.services.coordinator.admission.demonstrations import experience
from penstock.services.coordinator.api.app import make_app
from penstock.services.coordinator.api.auth import Access, open_access
from penstock.services.coordinator.api.dependencies import Parts
from penstock.services.coordinator.api.server import ApiServer
from penstock.services.coordinator.data import Data, load_data, order_of
from penstock.services.coordinator.evaluation.evaluator import Evaluator, GateCheck
from penstock.services.coordinator.evaluation.regression_gate import RegressionGate
from penstock.services.coordinator.operations.operations import Operations
from penstock.services.coordinator.policies.exports import KIND as EXPORT
from penstock.services.coordinator.policies.exports import Exporting
from penstock.services.coordinator.policies.promotion import Promotion
from penstock.services.coordinator.policies.relay_tree import FAN_OUT
from penstock.services.coordinator.policies.rollback import KIND as ROLLBACK
from penstock.services.coordinator.policies.rollback import Rollbacks, request
from penstock.services.coordinator.records.recorder import Recorder
from penstock.services.coordinator.records.report import DATA
from penstock.services.coordinator.run.capacity import measure
from penstock.services.coordinator.run.commands import Steering
from penstock.services.coordinator.run.gpu_hours import GpuHours
from penstock.services.coordinator.run.guards import Guards
from penstock.services.coordinator.run.leader_lease import Lease
from penstock.services.coordinator.run.lifecycle import SOURCE, Lifecycle, create
from penstock.services.coordinator.run.monitor import Monitor
from penstock.services.coordinator.run.notices import notice
from penstock.services.coordinator.run.release import Release
from penstock.services.coordinator.run.run_clock import RunClock
from penstock.services.coordinator.schemas.run import NoticeView
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.bus.stores.experience.rehearsal import offer
from penstock.shared.bus.stores.policy import held_out as held_out_store
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.stores.run.registry import keep_registered, registered_settings
from penstock.shared.errors import SettingsError
from penstock.shared.files.durable import no_space
from penstock.shared.inputs import INPUTS, Inputs, read_inputs, settle_inputs
from penstock.shared.placement.grants import DeviceGrants
from penstock.shared.process.service import Context, serve
from penstock.shared.process.telemetry import Status, tell
from penstock.shared.settings import Settings
from penstock.shared.settings.evaluation import HeldOutSet
from penstock.shared.settings.guards import OF_GENERATION, Guard, GuardsSettings
from penstock.shared.tasks import beside

_CLOSE_WITHIN_S = 8.0
_ANNOUNCE_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Coordinator:
    promotion: Promotion
    admission: Admission
    lifecycle: Lifecycle
    recorder: Recorder
    monitor: Monitor
    rollbacks: Rollbacks
    guards: Guards
    operations: Operations
    devices: DeviceGrants
    gpu_hours: GpuHours
    clock: RunClock
    release: Release
    lease: Lease
    api: Parts

    async def lead(self, term: int, stop: asyncio.Event) -> None:
        """Run the leader's loops under ``term``, until ``stop``."""
        self.api.ledger.term = term
        await self.clock.resume(psutil.Process().create_time(), time.time())
        async with beside(*(loop() for loop in self.leading)):
            await stop.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_WITHIN_S):
                await self._leave()

    @property
    def leading(self) -> tuple[Callable[[], Coroutine[None, None, None]], ...]:
        return (
            self.promotion.run,
            self.admission.run,
            self.lifecycle.run,
            self.recorder.run,
            self.rollbacks.run,
            self.guards.run,
            self.operations.run,
            self.devices.run,
            self.gpu_hours.run,
            self.clock.run,
            self.release.run,
        )

    async def _leave(self) -> None:
        if (await self.api.ledger.status()).state is RunState.STOPPED:
            await self.lifecycle.close(RunState.STOPPED)
        if self.lifecycle.closed and all(beat.service == "coordinator" for beat in await heartbeats(self.api.bus)):
            await self.operations.give_up(
                "the run's services ended before it was complete: `penstock export` reads a finished run's files"
            )
        await self.recorder.catch_up()


async def start(settings: Settings, replica: str) -> None:
    """Coordinate one run until stopped. Raises SettingsError: folder, dataset, port or bus is unusable."""
    access = open_access(settings.coordinator)
    folder = prepare_folder(settings)
    inputs = await asyncio.to_thread(check_inputs, settings, folder)
    data = await asyncio.to_thread(load_data, settings)
    said = {f"changed input {number}": text for number, text in enumerate(inputs.accepted, 1)}
    said["long prompts"] = await asyncio.to_thread(first_rows.long_prompts, settings, data.train)
    doubts = [notice(about, "warning", text) for about, text in said.items() if text]
    server = ApiServer(settings.coordinator.host, settings.coordinator.port)
    with contextlib.closing(server):
        async with serve(settings, "coordinator", replica) as context:
            context.status.start.begin("offering the data")
            await context.live.refresh()
            if kept := await context.live.kept():
                detail = f"{'; '.join(kept)}: revision {context.live.revision} overrides the run's settings"
                await tell(context.bus, SOURCE, "live settings kept", detail)
            doubts += await _doubt_replication(context.bus)
            data = dataclasses.replace(data, notices=(*data.notices, *doubts))
            for doubt in data.notices:
                await tell(context.bus, DATA, doubt.about, doubt.text)
            offering = functools.partial(_offer, context.bus, settings, data, await registered_settings(context.bus))
            await offering()
            parts = assemble(context.bus, context.live, data, folder, context.status, access, replica, offering)
            await _coordinate(context, parts, server, folder)


async def _doubt_replication(bus: Bus) -> list[NoticeView]:
    """Return a notice if a failover of the bus may lose more steps than need be; a leader restarts in any case."""
    try:
        text = await bus.check_replication()
    except SettingsError as error:
        text = str(error)
    return [notice("bus replication", "warning", text)] if text else []


async def _offer(bus: Bus, settings: Settings, data: Data, registered: str | None) -> None:
    """Offer what other services wait for, at the start and whenever the bus has lost its data."""
    if registered is not None:
        await keep_registered(bus, registered)
    if not settings.kind.generates:
        await _offer_held_out(bus, settings, data)
    else:
        scorers = [scorer.name for scorer in settings.reward.scorers]
        await offer(bus, dataset.rows_to_try(data.train.problems, scorers))


async def _offer_held_out(bus: Bus, settings: Settings, data: Data) -> None:
    groups = []
    for held_set, problems in data.held_out:
        chosen = dataset.subset(len(problems), held_set.problems, settings.run.seed)
        groups += [experience(problems.problems[index], index, PolicyVersion(0)) for index in chosen]
    await held_out_store.offer(bus, groups)


async def _coordinate(context: Context, parts: Coordinator, server: ApiServer, folder: Path) -> None:
    await create(Ledger(context.bus), folder)
    announce = folder / "coordinator.json"
    async with asyncio.TaskGroup() as outer:
        serving = outer.create_task(server.run(make_app(parts.api), announce, context.settings.run.id))
        await server.answers.wait()
        context.status.state = "working"  # only now: readiness may be queried
        context.status.start.end()
        monitoring = outer.create_task(parts.monitor.run())
        measuring = outer.create_task(measure(context.bus, folder))
        leading = outer.create_task(parts.lease.run(lambda term: parts.lead(term, context.stop), context.stop))
        announcing = outer.create_task(_announce(parts.lease, server, announce, context.settings.run.id))
        await context.stop.wait()
        announcing.cancel()
        context.status.state = "stopping"
        if not parts.lease.leading:
            leading.cancel()
        await asyncio.wait([leading])
        monitoring.cancel()
        measuring.cancel()
        serving.cancel()


async def _announce(lease: Lease, server: ApiServer, path: Path, run_id: str) -> None:
    """Keep the leader's address in the run's folder."""
    while True:
        if lease.leading:
            server.announce(path, run_id)
        await asyncio.sleep(_ANNOUNCE_S)


def assemble(
    bus: Bus,
    live: Live,
    data: Data,
    folder: Path,
    status: Status,
    access: Access | None = None,
    replica: str = "",
    offering: Callable[[], Awaitable[None]] | None = None,
) -> Coordinator:
    ledger, settings = Ledger(bus), live.settings
    lease = Lease(bus, replica)
    recorder = Recorder(
        bus,
        folder,
        settings.coordinator.sample_every_steps,
        lambda: not ledger.term or (ledger.term == lease.term and lease.leading),
    )

    def look() -> None:
        monitor.forget()
        admission.wake()
        lifecycle.wake()

    def promoted(version: int) -> None:
        status.version = PolicyVersion(version)
        look()

    admission = Admission(
        bus,
        ledger,
        data.train,
        order_of(settings, data.train),
        lambda: terms_of(live.settings),
        lambda: lifecycle.gate_open,
        Shortage(bus, ledger),
    )
    monitor = Monitor(bus, live, status, lambda: [*data.notices, *_room(folder, recorder), *release.notices()])
    groups_per_step = settings.algorithm.groups_per_step
    guards = Guards(
        bus,
        ledger,
        fitting_guards(settings),
        groups_per_step,
        monitor.view,
        monitor.reports,
        monitor.beats,
        look,
        settings.internal.starving_window_s,
    )
    rollbacks = Rollbacks(
        bus,
        ledger,
        settings.weights.deadline_s,
        look,
        lambda rollback: operations.begin(ROLLBACK, rollback.stage, request(rollback)),
        has_replicas=settings.kind.generates,
    )
    gate = RegressionGate(bus, ledger, settings.evaluation, rollbacks, look)
    generated = data.held_out and settings.kind.generates
    evaluator = make_evaluator(bus, ledger, data.held_out, settings, gate.judge) if generated else None
    lifecycle = Lifecycle(
        bus, ledger, settings, evaluator, gate, recorder, lambda: admission.wake(), folder, offer=offering
    )
    steering = Steering(bus, ledger, rollbacks, groups_per_step, look)
    exporting = Exporting(bus, ledger, settings)
    operations = Operations(
        bus,
        {
            "pause": steering.drain_run,
            "drain": steering.drain_replica,
            ROLLBACK: rollbacks.see_through,
            EXPORT: exporting.see_through,
        },
    )
    api = Parts(
        bus,
        ledger,
        live,
        monitor,
        operations,
        steering,
        rollbacks,
        exporting,
        access or Access(),
        status,
        folder,
        look,
    )
    promotion = Promotion(bus, ledger, FAN_OUT, promoted)
    live.listen(lambda settings: look())
    devices = DeviceGrants(bus, ledger, settings, monitor.beats)
    gpu_hours = GpuHours(bus, ledger, live, monitor.beats, settings.internal.deadline_s, look)
    own = settings.internal
    release = Release(bus, ledger, own.release, monitor.beats, settings.run.steps, pod_template=own.pod_template)
    return Coordinator(
        promotion,
        admission,
        lifecycle,
        recorder,
        monitor,
        rollbacks,
        guards,
        operations,
        devices,
        gpu_hours,
        RunClock(bus, ledger, settings.run.steps),
        release,
        lease,
        api,
    )


def fitting_guards(settings: Settings) -> GuardsSettings:
    """With a teacher, groups with equal rewards have signal; without generation, nothing is to be said of replicas and rewards."""
    guards = settings.guards
    unfit: tuple[Guard, ...] = ("no_signal",) if settings.algorithm.distillation else ()
    unfit = unfit if settings.kind.generates else OF_GENERATION
    return guards.model_copy(update={"off": (*guards.off, *unfit)})


def _room(folder: Path, recorder: Recorder) -> list[NoticeView]:
    notices = []
    if full := no_space(folder):
        notices.append(notice("room", "error", f"{full}: free disk space there, and the run continues"))
    if recorder.trouble:
        notices.append(notice("records", "error", recorder.trouble))
    return notices


def make_evaluator(
    bus: Bus,
    ledger: Ledger,
    held_out: Sequence[tuple[HeldOutSet, dataset.Dataset]],
    settings: Settings,
    check: GateCheck,
) -> Evaluator:
    """Return an evaluator that gives up on a stop or revocation."""

    async def given_up(version: PolicyVersion) -> bool:
        return (await ledger.status()).state is RunState.STOPPED or version in await ledger.revoked()

    return Evaluator(bus, held_out, settings, given_up, check)


def check_inputs(settings: Settings, folder: Path) -> Inputs:
    """Return what the run was started with, noted if it is new. Raises SettingsError: something is another now."""
    inputs = settle_inputs(settings, folder)
    if read_inputs(folder) is None:
        inputs.write(folder / INPUTS)
    return inputs


def prepare_folder(settings: Settings) -> Path:
    """Create and return the run's folder. Raises SettingsError: not writable."""
    folder = settings.run_folder
    probe = folder / ".writable"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        probe.write_text("", encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise SettingsError(f"could not write in {folder}: {error}: change run.folder") from error
    return folder
