"""Puts the coordinator together: what each part is handed, in which order they start and stop.

::

    promotion ──wake──▶ admission ◀──open── lifecycle ──▶ evaluator, recorder, summary, report
        └───────wake──────────────────────────▲  ▲
                                              │  └── api (commands)      monitor ──▶ gauges, GET /v1/run

Order of shutdown: stop admitting, promoting and leading; bring the records up to date; close the API. The coordinator
holds nothing: killed at any moment, it goes on from the bus.
"""

import asyncio
import contextlib
import dataclasses
from pathlib import Path

from services.coordinator import dataset
from services.coordinator.admission import Admission, Limits
from services.coordinator.api import Parts, make_app
from services.coordinator.evaluation import Evaluator
from services.coordinator.lifecycle import Lifecycle
from services.coordinator.monitor import Monitor
from services.coordinator.promotion import Promotion
from services.coordinator.recorder import Recorder
from services.coordinator.server import Server
from shared.bus import Bus
from shared.errors import SettingsError
from shared.ledger import Ledger, RunState
from shared.messages import PolicyVersion, Sampling
from shared.service import Context, serve
from shared.settings import Settings
from shared.telemetry import Status

_CLOSE_WITHIN_S = 8.0


@dataclasses.dataclass(frozen=True, slots=True)
class Data:
    """The problems of a run."""

    train: dataset.Dataset
    heldout: dataset.Dataset | None


@dataclasses.dataclass(frozen=True, slots=True)
class Coordinator:
    """The parts of one coordinator, wired."""

    promotion: Promotion
    admission: Admission
    lifecycle: Lifecycle
    recorder: Recorder
    monitor: Monitor
    api: Parts


async def start(settings: Settings, replica: str) -> None:
    """Coordinate one run until told to stop.

    Raises:
        SettingsError: the folder, the dataset, the port or the bus are not as the settings say.
    """
    folder = prepare_folder(settings)
    data = await asyncio.to_thread(load_data, settings)
    server = Server(settings.coordinator.host, settings.coordinator.port)
    try:
        async with serve(settings, "coordinator", replica, None) as context:
            context.status.address = server.address
            await _coordinate(context, assemble(context.bus, settings, data, folder, context.status), server, folder)
    finally:
        server.close()


async def _coordinate(context: Context, parts: Coordinator, server: Server, folder: Path) -> None:
    await Ledger(context.bus).create()
    context.status.state = "working"
    announce = folder / "coordinator.json"
    async with asyncio.TaskGroup() as outer:
        serving = outer.create_task(server.run(make_app(parts.api), announce, context.settings.run.id))
        async with asyncio.TaskGroup() as inner:
            loops = (
                parts.promotion.run,
                parts.admission.run,
                parts.lifecycle.run,
                parts.recorder.run,
                parts.monitor.run,
            )
            tasks = [inner.create_task(loop()) for loop in loops]
            await context.stop.wait()
            context.status.state = "stopping"
            for task in tasks:
                task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_WITHIN_S):
                await _leave(context.bus, parts)
        serving.cancel()


async def _leave(bus: Bus, parts: Coordinator) -> None:
    if (await Ledger(bus).status()).state is RunState.STOPPED:
        await parts.lifecycle.close(RunState.STOPPED)  # told to stop while it closed the run
    await parts.recorder.catch_up()


def assemble(bus: Bus, settings: Settings, data: Data, folder: Path, status: Status) -> Coordinator:
    """Return the parts of a coordinator over ``bus``."""
    ledger = Ledger(bus)
    sampling = settings.sampling
    recorder = Recorder(bus, folder, settings.coordinator.sample_every_steps)
    evaluator = None if data.heldout is None else make_evaluator(bus, ledger, data.heldout, settings)

    def look() -> None:
        monitor.forget()
        admission.wake()
        lifecycle.wake()

    def promoted(version: int) -> None:
        status.version = PolicyVersion(version)
        look()

    lifecycle = Lifecycle(bus, ledger, settings, evaluator, recorder, lambda: admission.wake(), folder)
    admission = Admission(
        bus,
        ledger,
        data.train,
        dataset.Order(len(data.train), settings.run.seed, shuffle=settings.data.shuffle),
        Sampling(sampling.group_size, sampling.max_new_tokens, sampling.temperature),
        Limits(settings.slots, settings.algorithm.groups_per_step, settings.run.steps),
        lambda: lifecycle.gate_open,
    )
    monitor = Monitor(bus, settings, lifecycle.activity, lambda: lifecycle.closed, status)
    api = Parts(bus, ledger, monitor, status, look)
    return Coordinator(
        Promotion(bus, ledger, settings.weights.fan_out, promoted), admission, lifecycle, recorder, monitor, api
    )


def make_evaluator(bus: Bus, ledger: Ledger, heldout: dataset.Dataset, settings: Settings) -> Evaluator:
    """Return what evaluates on ``heldout``: greedily, one sample a problem, given up when the run is stopped."""
    greedy = Sampling(samples=1, max_new_tokens=settings.sampling.max_new_tokens, temperature=0.0)

    async def stopped() -> bool:
        return (await ledger.status()).state is RunState.STOPPED

    return Evaluator(bus, heldout, settings.evaluation, greedy, settings.run.seed, stopped)


def load_data(settings: Settings) -> Data:
    """Load the run's datasets.

    Raises:
        SettingsError: a dataset cannot be used.
    """
    path, scorers = settings.evaluation.path, [scorer.name for scorer in settings.reward.scorers]
    return Data(
        train=dataset.load(settings.data.path, settings.data, "data.path", scorers),
        heldout=None if path is None else dataset.load(path, settings.data, "evaluation.path", scorers),
    )


def prepare_folder(settings: Settings) -> Path:
    """Make the run's folder and return it.

    Raises:
        SettingsError: it cannot be written.
    """
    folder = settings.run_folder
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("", encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise SettingsError(
            f"expected a folder that can be written at {folder}, found: {error}: change run.folder"
        ) from error
    return folder
