"""Make the exports ordered over HTTP beside training, one process at a time.

::

    order ──▶ take ──▶ python -m penstock.services.trainer.export ──▶ exports/v000040, whole ──▶ answer

The process has low priority and no GPU, is killed first when memory runs out, and ends with this one. A dead trainer's
order is taken over, ``_ATTEMPTS`` times.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import sys
import uuid
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.exports import ExportRequest, ExportResult, Exports, export_folder
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.process.children import reap
from penstock.shared.process.telemetry import tell
from penstock.shared.settings import BusSettings, Settings, dumps

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_LONGEST_S = 3600.0
_ATTEMPTS = 2
_PRIORITY = 5
_FIRST_TO_DIE = "1000"
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class Exporter:
    def __init__(self, bus: Bus, settings: Settings) -> None:
        self._bus = bus
        self._ledger = Ledger(bus)
        self._exports = Exports(bus)
        self._settings = settings
        self._me = uuid.uuid4().hex
        self._lost: set[int] = set()
        """Taken by others, or gone with the bus's data: then a new order may have the number, and no taker yet."""
        self.reading = ""
        """Checkpoint being read, a folder (spared by cleanup) or URI."""

    async def run(self) -> None:
        """Make exports in the order of their numbers, forever."""
        while True:
            for order in await self._exports.orders():
                if order.answer is None and not (order.number in self._lost and order.taker):
                    await self._serve(order)
            await asyncio.sleep(_LOOK_S)

    async def _serve(self, order: ExportRequest) -> None:
        attempt = await self._exports.take(order.number, self._me)
        if attempt > _ATTEMPTS:
            detail = f"the trainer ended {_ATTEMPTS} times during the export: see its log"
            answer: ExportResult | None = ExportResult(done=False, detail=detail)
        else:
            answer = await self._make(order) if attempt else None
        if answer is None or not await self._exports.answer(order.number, self._me, answer):
            self._lost.add(order.number)
            return
        name = "policy exported" if answer.done else "export failed"
        await tell(self._bus, "trainer", name, f"version {order.version}: {answer.folder or answer.detail}")

    async def _make(self, order: ExportRequest) -> ExportResult | None:
        folder = export_folder(self._settings, order.version, adapter=order.adapter).absolute()
        record = await self._ledger.policy(order.version)
        step = 0 if record is None else record.step
        if folder.is_dir():
            return ExportResult(done=True, detail="it existed already", folder=str(folder), step=step)
        try:
            await asyncio.to_thread(_clear_unfinished, folder.parent)
            ended = await self._process(order, folder)
        except OSError as error:
            return ExportResult(done=False, detail=f"storage refused: {error}: free disk space in run.folder")
        finally:
            self.reading = ""
            await asyncio.to_thread(_clear_unfinished, folder.parent)
        return dataclasses.replace(ended, folder=str(folder), step=step) if ended and ended.done else ended

    async def _process(self, order: ExportRequest, folder: Path) -> ExportResult | None:
        self.reading = (await self._ledger.checkpoints()).get(order.version, "")
        command = [sys.executable, "-m", "penstock.services.trainer.export", "-", "--version", str(order.version)]
        command += ["--to", str(folder), "--dies-with", str(os.getpid())]
        command += ["--checkpoint", self.reading] if self.reading else []
        command += ["--adapter"] if order.adapter else []
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=_environment()
        )
        _lower(process.pid)
        log.info("export begun", extra={"version": int(order.version), "pid": process.pid})
        try:
            return await self._end_of(process, order)
        finally:
            if process.returncode is None:
                process.kill()
            await reap(process)

    async def _end_of(self, process: Process, order: ExportRequest) -> ExportResult | None:
        without_bus = self._settings.model_copy(update={"bus": BusSettings()})
        talking = asyncio.create_task(process.communicate(dumps(without_bus).encode()))
        until_s = asyncio.get_running_loop().time() + _LONGEST_S
        try:
            while not (await asyncio.wait([talking], timeout=_LOOK_S))[0]:
                now = await self._exports.look(order.number)
                if now is None or now.taker != self._me:
                    return None
                if asyncio.get_running_loop().time() > until_s:
                    detail = f"its process did not end within {_LONGEST_S:.0f} s: is storage slow?"
                    return ExportResult(done=False, detail=detail)
        finally:
            talking.cancel()
            await asyncio.gather(talking, return_exceptions=True)
        said, wrong = talking.result()
        return _ending(process.returncode or 0, said.decode(), wrong.decode(errors="replace"))


def _environment() -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if name not in _OF_A_RANK and not name.startswith("PENSTOCK_")
    }
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}


def _lower(pid: int) -> None:
    with contextlib.suppress(OSError):  # it may have ended; only Linux has /proc
        os.setpriority(os.PRIO_PROCESS, pid, _PRIORITY)
        Path(f"/proc/{pid}/oom_score_adj").write_text(_FIRST_TO_DIE, encoding="ascii")


def _ending(code: int, said: str, wrong: str) -> ExportResult:
    if code == 0:
        return ExportResult(done=True, detail=f"made from {json.loads(said.splitlines()[-1])['source']}")
    if code < 0:
        name = signal.Signals(-code).name
        detail = f"its process was killed by {name}: is there enough memory for a copy of the policy?"
        return ExportResult(done=False, detail=detail)
    last = next((line for line in reversed(wrong.splitlines()) if line.strip()), f"exit code {code}")
    return ExportResult(done=False, detail=last.removeprefix("export: "))


def _clear_unfinished(exports: Path) -> None:
    exports.mkdir(parents=True, exist_ok=True)
    for unfinished in exports.glob(".*.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)
