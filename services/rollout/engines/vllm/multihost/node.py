"""A further host of an engine, which only runs workers; it uses neither bus nor run state."""

import asyncio
import contextlib
import datetime
import logging
import multiprocessing
import threading
import time
from typing import Any

from penstock.services.rollout.engines.engine import EngineDied
from penstock.services.rollout.engines.vllm.arguments import engine_args, serving
from penstock.services.rollout.engines.vllm.multihost.hosts import Hosts
from penstock.shared.process.service import attend
from penstock.shared.settings import Settings

log = logging.getLogger(__name__)

_ASK_EVERY_S, _SILENT_S = 1.0, 15.0


async def hold_workers(settings: Settings, arguments: dict[str, Any], hosts: Hosts) -> None:
    """Hold this host's workers until the first host ends them; raises SettingsError or EngineDied."""
    async with attend(settings) as (stop, status):
        workers = Workers(arguments, hosts)
        stopping = asyncio.ensure_future(stop.wait())
        try:
            either: set[asyncio.Future[Any]] = {workers.ready, stopping}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not workers.ready.done():
                return
            workers.ready.result()
            status.state = "working"
            log.info("workers are ready", extra={"node": hosts.node, "nodes": hosts.nodes})
            stopping.add_done_callback(lambda _: setattr(status, "state", "stopping"))
            why = await workers.ended
            if not stop.is_set():
                raise EngineDied(f"the engine of this replica ended: {why}")
        finally:
            stopping.cancel()
            workers.kill()


class Workers:
    """vLLM's executor, in its own thread."""

    def __init__(self, arguments: dict[str, Any], hosts: Hosts) -> None:
        self._arguments, self._hosts = arguments, hosts
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        """Done once the workers have met the first host's."""
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """Done, with the reason, once they or the first host are gone."""
        threading.Thread(target=self._hold, name="workers", daemon=True).start()

    def kill(self) -> None:
        """End all workers, including waiting ones."""
        for child in multiprocessing.active_children():
            child.kill()

    def _hold(self) -> None:
        try:
            executor = self._open()
        except Exception as error:  # noqa: BLE001 (raised where `ready` is awaited)
            self._tell(self.ready.set_exception, error)
            return
        self._tell(self.ready.set_result, None)
        threading.Thread(target=self._watch_first, name="first host", daemon=True).start()
        executor.start_worker_monitor(inline=True)
        self._tell(self.ended.set_result, "a worker of this host ended")

    def _open(self) -> Any:
        made = engine_args(self._arguments, self._hosts.own)
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        with serving(self._arguments["model"]):
            return MultiprocExecutor(made.create_engine_config(headless=True), monitor_workers=False)

    def _watch_first(self) -> None:
        self._tell(self.ended.set_result, f"the first host does not respond: {outlast(self._hosts.rendezvous)}")

    def _tell(self, call: Any, value: Any) -> None:
        def once() -> None:
            with contextlib.suppress(asyncio.InvalidStateError):
                call(value)

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(once)


def outlast(rendezvous: str) -> str:
    """Wait until the rendezvous at host:port stops answering; return why. vLLM's workers alone would wait forever."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, _, port = rendezvous.rpartition(":")
    patience = datetime.timedelta(seconds=_SILENT_S)
    try:
        store = TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=patience)
        while True:
            store.check(["penstock"])
            time.sleep(_ASK_EVERY_S)
    except Exception as error:  # noqa: BLE001 (torch raises several kinds)
        return str(error).partition("\n")[0]
