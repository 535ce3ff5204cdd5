"""One rank of the trainer; rank 0 also drives all ranks from the bus.

::

    rank 0      event loop: ``rank0/driver`` ◀── mailbox ──▶ training thread: ``loop``
    others                                                   main thread: ``loop``

Without RANK in its environment it is the only rank, or the launcher of ``trainer.ranks``.
"""

import asyncio
import contextlib
import os
import signal
import threading

from penstock.services.trainer.launcher import LAUNCHER
from penstock.services.trainer.rank0.driver import Driver
from penstock.services.trainer.rank0.mailbox.commands import TURN_S
from penstock.services.trainer.rank0.mailbox.queues import Mailbox, NoMailbox
from penstock.shared.bus.stores.replicas.place import Place
from penstock.shared.placement.turns import trainer_turns
from penstock.shared.process import log
from penstock.shared.process.endpoints import Endpoints
from penstock.shared.process.importing import importing
from penstock.shared.process.parent import die_with
from penstock.shared.process.service import Context, own_host, serve
from penstock.shared.process.telemetry import tell
from penstock.shared.settings import Settings


async def run(settings: Settings, replica: str) -> int:
    if "RANK" in os.environ and not die_with(int(os.environ.get(LAUNCHER, os.getppid())), signal.SIGKILL):
        return 0
    if int(os.environ.get("RANK", "0")) == 0:
        return await _run_rank_0(settings, replica)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())  # rank 0 is notified, and decides when to stop
        signal.siginterrupt(number, False)
    log.set_up(settings.telemetry.log_level, f"{replica}.{os.environ['RANK']}")
    if os.environ["LOCAL_RANK"] == "0":  # for this host's pod's probes
        Endpoints(own_host(settings), settings.run.metrics_port, "run.metrics_port", lambda: {"ready": True})
    with importing():
        from penstock.services.trainer.checkpoint.share_uploader import uploading_share
        from penstock.services.trainer.rank0.artifacts import Artifacts
        from penstock.services.trainer.rank0.publication import Publication
        from penstock.services.trainer.training import train

    shares = uploading_share(settings) if os.environ["LOCAL_RANK"] == "0" else contextlib.nullcontext()
    with shares, contextlib.closing(Publication(settings, own_host(settings))) as publication:
        finished = train(settings, NoMailbox(), Artifacts(settings, publication), stopping.is_set)
    # A host's first rank speaks for it. Of rank 0's host that is rank 0, which the launcher must not end early.
    return 0 if finished or os.environ["LOCAL_RANK"] != "0" else settings.internal.stopped_exit_status


async def _run_rank_0(settings: Settings, replica: str) -> int:
    async with serve(settings, "trainer", replica) as context:
        place = Place(context.bus, replica, settings.internal.heartbeat_s)
        if not await _has_place(context, place):
            return settings.internal.stopped_exit_status
        context.status.start.begin("waiting for the device")
        async with trainer_turns(context) as turns:
            while not await turns.acquire(1.0):  # the other ranks wait for this one before they load
                if context.stop.is_set():
                    return settings.internal.stopped_exit_status
                await place.renew()
            context.status.start.begin("importing torch")
            mailbox = Mailbox()
            driver = Driver(context, mailbox, turns, place)
            training = asyncio.to_thread(_train, context, mailbox)
            for error in await asyncio.gather(driver.run(), training, return_exceptions=True):
                if error is not None:
                    raise error
            return 0 if driver.finished else settings.internal.stopped_exit_status


async def _has_place(context: Context, place: Place) -> bool:
    """Wait while the trainer that took this one's place is alive; return False if this one stops first."""
    while other := await place.occupant():
        context.status.values["stored"] = 1.0  # it has nothing that is not stored
        if not context.status.start.activity.endswith(other):
            context.status.start.begin(f"waiting for the end of the other trainer, {other}")
            detail = f"{other} has taken this one's place and is alive: {context.replica} waits until it ends; stop one of them"
            await tell(context.bus, context.replica, "second trainer", detail)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(context.stop.wait(), TURN_S)
            return False
    context.status.values.pop("stored", None)
    return True


def _train(context: Context, mailbox: Mailbox) -> None:
    """Train on this thread, which also imports torch: the driver works meanwhile."""
    try:
        with importing():
            from penstock.services.trainer.rank0.artifacts import Rank0Artifacts
            from penstock.services.trainer.rank0.publication import Publication
            from penstock.services.trainer.training import train
    except BaseException as error:
        mailbox.send(error)
        raise
    with contextlib.closing(Publication(context.settings, context.host, context.secret)) as publication:
        train(context.settings, mailbox, Rank0Artifacts(context.settings, publication))
