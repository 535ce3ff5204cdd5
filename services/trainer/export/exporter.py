"""Makes the exports that were ordered over HTTP, beside training: one at a time, each in a process of its own.

::

    order ──▶ take ──▶ python -m services.trainer.export ──▶ exports/.7/v000040 ──rename──▶ exports/v000040 ──▶ answer

The process reads files only, at a low priority and without a GPU, and the kernel ends it with this one; where memory runs out, it goes
first. So training waits for nothing (this module imports no torch), and the cleanup of checkpoints leaves the one that is read. An order whose trainer died is taken
by the next, ``_ATTEMPTS`` times. Rank 0 only; it runs in the event loop of the main thread.
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

from shared.bus.bus import Bus
from shared.bus.stores.exports import ExportRequest, ExportResult, Exports, export_folder
from shared.bus.stores.ledger import Ledger
from shared.process.telemetry import tell
from shared.settings import BusSettings, Settings, dumps

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_LONGEST_S = 3600.0
_ATTEMPTS = 2
_PRIORITY = 10
_FIRST_TO_DIE = "1000"
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class Exporter:
    """The trainer's side of :class:`shared.bus.stores.exports.Exports`; ``run`` for ever. It lives on the event loop."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self._bus = bus
        self._ledger = Ledger(bus)
        self._exports = Exports(bus)
        self._settings = settings
        self._me = uuid.uuid4().hex
        self._lost: set[int] = set()
        """Orders that another trainer took from this one."""
        self.reading = ""
        """Folder, or URI in object storage, of the checkpoint that is read now; cleanup leaves the folder."""

    async def run(self) -> None:
        """Make what is ordered, in the order of numbers, for ever."""
        while True:
            for order in await self._exports.orders():
                if order.answer is None and order.number not in self._lost:
                    await self._serve(order)
            await asyncio.sleep(_LOOK_S)

    async def _serve(self, order: ExportRequest) -> None:
        attempt = await self._exports.take(order.number, self._me)
        if attempt > _ATTEMPTS:
            detail = (
                f"expected a trainer that lives while it exports, found that it ended {_ATTEMPTS} times: see its log"
            )
            answer: ExportResult | None = ExportResult(done=False, detail=detail)
        else:
            answer = await self._make(order) if attempt else None
        if answer is None or not await self._exports.answer(order.number, self._me, answer):
            self._lost.add(order.number)
            return
        name = "policy exported" if answer.done else "export failed"
        await tell(self._bus, "trainer", name, f"version {order.version}: {answer.folder or answer.detail}")

    async def _make(self, order: ExportRequest) -> ExportResult | None:
        """Return what became of it; None where nobody wants it from us any more."""
        folder = export_folder(self._settings, order.version, adapter=order.adapter).absolute()
        record = await self._ledger.policy(order.version)
        step = 0 if record is None else record.step
        if folder.is_dir():
            return ExportResult(done=True, detail="it was there already", folder=str(folder), step=step)
        beside = folder.parent / f".{order.number}"
        try:
            await asyncio.to_thread(_make_room, folder.parent, beside)
            ended = await self._process(order, beside / folder.name)
            if ended is None or not ended.done:
                return ended
            await asyncio.to_thread(_move, beside / folder.name, folder)
        except OSError as error:
            return ExportResult(done=False, detail=f"storage refused: {error}: make room in run.folder")
        finally:
            self.reading = ""
            await asyncio.to_thread(shutil.rmtree, beside, ignore_errors=True)
        return dataclasses.replace(ended, folder=str(folder), step=step)

    async def _process(self, order: ExportRequest, folder: Path) -> ExportResult | None:
        self.reading = (await self._ledger.checkpoints()).get(order.version, "")
        command = [sys.executable, "-m", "services.trainer.export", "-", "--version", str(order.version)]
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
                await _reap(process)

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
                    detail = (
                        f"expected its process to end within {_LONGEST_S:.0f} s, found it at work: is storage slow?"
                    )
                    return ExportResult(done=False, detail=detail)
        finally:
            talking.cancel()
            await asyncio.gather(talking, return_exceptions=True)
        said, wrong = talking.result()
        return _ending(process.returncode or 0, said.decode(), wrong.decode(errors="replace"))


async def _reap(process: Process) -> None:
    """Wait for a process that was killed, also when cancelled meanwhile: nothing of it is left behind."""
    cancelled: asyncio.CancelledError | None = None
    while process.returncode is None:
        try:
            await process.wait()
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _environment() -> dict[str, str]:
    """Return the environment of a process that is no rank, sees no GPU and is told no secret of the run."""
    kept = {
        name: value for name, value in os.environ.items() if name not in _OF_A_RANK and not name.startswith("PENSTOCK_")
    }
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}


def _lower(pid: int) -> None:
    with contextlib.suppress(OSError):  # it may have ended; no Linux: no /proc
        os.setpriority(os.PRIO_PROCESS, pid, _PRIORITY)
        Path(f"/proc/{pid}/oom_score_adj").write_text(_FIRST_TO_DIE, encoding="ascii")


def _ending(code: int, said: str, wrong: str) -> ExportResult:
    if code == 0:
        return ExportResult(done=True, detail=f"made from {json.loads(said.splitlines()[-1])['source']}")
    if code < 0:
        name = signal.Signals(-code).name
        detail = f"expected its process to end by itself, found it killed by {name}: is there memory for a copy of the policy?"
        return ExportResult(done=False, detail=detail)
    last = next((line for line in reversed(wrong.splitlines()) if line.strip()), f"exit code {code}")
    return ExportResult(done=False, detail=last.removeprefix("export: "))


def _make_room(root: Path, beside: Path) -> None:
    """Make ``beside``, without what earlier attempts left."""
    root.mkdir(parents=True, exist_ok=True)
    for old in root.glob(".*"):
        shutil.rmtree(old, ignore_errors=True)
    beside.mkdir()


def _move(made: Path, folder: Path) -> None:
    if not folder.is_dir():  # another trainer's is as good
        made.rename(folder)
