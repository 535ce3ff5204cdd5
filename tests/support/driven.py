"""Rank 0 of a trainer in this process: the real driver and a training thread."""

import asyncio
import contextlib
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from penstock.services.trainer.loop import Trainer
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.rank0.artifacts import Rank0Artifacts
from penstock.services.trainer.rank0.driver import Driver
from penstock.services.trainer.rank0.mailbox.queues import Mailbox
from penstock.services.trainer.rank0.mailbox.results import ModelLoaded
from penstock.services.trainer.rank0.publication import Publication
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Event, Experience
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.cordon import Cordon
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.stores.replicas.place import Place
from penstock.shared.bus.stores.replicas.run_secret import RunSecret
from penstock.shared.bus.streams import EVENTS, EXPERIENCE
from penstock.shared.placement.lease import lease_of
from penstock.shared.placement.turns import TrainerTurns
from penstock.shared.process.service import Context
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings
from tests.support.raw_redis import raw


def own_devices(context: Context) -> TrainerTurns:
    """Return the turns of a trainer that shares no device."""
    return TrainerTurns(lease_of(context, "train"), context.settings, context.status)


class Driven:
    def __init__(self, bus: Bus, of: Settings) -> None:
        self.of, self.bus, self.ledger, self.stop = of, bus, Ledger(bus), asyncio.Event()
        cordon = Cordon(bus, "trainer-0", lambda: None)
        self.context = Context(
            of, "trainer", "trainer-0", bus, Status(), self.stop, Live(bus, of), cordon, RunSecret(bus)
        )
        self.mailbox = Mailbox()
        self.driver = Driver(self.context, self.mailbox, own_devices(self.context), Place(bus, "trainer-0", 1.0))
        self.root = of.run_folder / "checkpoints"

    async def feed(self, batch: list[Experience]) -> None:
        for group in batch:
            await self.bus.append(EXPERIENCE, {"id": str(group.group_id), "data": wire.encode(group)})

    async def step(self) -> int:
        return (await self.ledger.status()).step

    async def events(self) -> list[str]:
        rows = await raw(self.bus).xrange(self.bus.keys.of(EVENTS))
        return [wire.decode(fields[b"data"], Event).name for _, fields in rows]

    def train(self, engine: TrainingEngine) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.mailbox.send(ModelLoaded(engine.vocabulary, 0))
                publication = Publication(self.of, "127.0.0.1", RunSecret(self.bus))
                Trainer(engine, self.of, self.mailbox, Rank0Artifacts(self.of, publication)).run()
            except BaseException as error:
                self.mailbox.send(error)
                raise

    @contextlib.asynccontextmanager
    async def running(
        self, training: Callable[[], None]
    ) -> AsyncIterator["asyncio.Future[tuple[BaseException | None, BaseException | None]]"]:
        both = asyncio.gather(self.driver.run(), asyncio.to_thread(training), return_exceptions=True)
        try:
            yield both
        finally:
            self.stop.set()
            await both


def settings_of(bus: Bus, folder: Path, base: Settings, **trainer: Any) -> Settings:
    tables = base.model_dump()
    tables["run"] = {"id": bus.keys.run_id, "folder": folder}
    tables["weights"] = {"transport": "file", "folder": folder / "weights"}
    tables["internal"] = {"probe_every_versions": 0}
    tables["trainer"] = {"learning_rate": 1e-3, "zero_stage": 0, "checkpoint_every_steps": 1000, **trainer}
    return Settings.model_validate(tables)
