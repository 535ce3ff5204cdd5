"""Exports over HTTP, made by the trainer, which has the weights (docs/api.md, "Export")."""

import asyncio
import time

from penstock.services.coordinator.operations.operations import OperationOutcome, Report, StateConflict
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Json, PolicyRecord, PolicyVersion
from penstock.shared.bus.stores.policy.exports import ExportRequest, ExportResult, Exports
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.stores.run.operations import Operation, OperationState
from penstock.shared.settings import Settings

KIND = "export"
_LOOK_S = 0.3
_PATIENCE_S = 120.0


class Exporting:
    def __init__(self, bus: Bus, ledger: Ledger, settings: Settings, patience_s: float = _PATIENCE_S) -> None:
        self._bus = bus
        self._ledger = ledger
        self._exports = Exports(bus)
        self._has_adapter = settings.policy.lora.rank > 0
        self._patience_s = patience_s

    async def check(self, record: PolicyRecord, *, adapter: bool) -> None:
        if adapter and not self._has_adapter:
            raise StateConflict(
                "this run trains whole weights and has no adapter (policy.lora.rank = 0): leave adapter out"
            )
        revoked, checkpoints = await asyncio.gather(self._ledger.revoked(), self._ledger.checkpoints())
        if record.version in revoked:
            raise StateConflict(f"version {record.version} was revoked")
        initial = record.version == 0 and not adapter
        if record.version not in checkpoints and not record.location and not initial:
            usable = sorted({*(checkpoints.keys() - revoked), *([] if adapter else [PolicyVersion(0)])})
            known = ", ".join(map(str, usable)) or "none yet"
            raise StateConflict(
                f"version {record.version} has no checkpoint; there are {known} "
                "(trainer.checkpoint_every_steps and trainer.keep_last set how many)"
            )

    async def see_through(self, operation: Operation, report: Report) -> OperationOutcome:
        version, adapter = PolicyVersion(_number(operation)), operation.request["adapter"] is True
        seen_s = time.monotonic()
        while True:
            await self._exports.place(operation.id, version, adapter=adapter)
            order = await self._exports.look(operation.id)
            if any(beat.service == "trainer" for beat in await heartbeats(self._bus)):
                seen_s = time.monotonic()
            outcome = await self._outcome(version, order, time.monotonic() - seen_s)
            if outcome is not None:
                await self._exports.withdraw(operation.id)
                return outcome
            await report(*_phase(order))
            await asyncio.sleep(_LOOK_S)

    async def _outcome(
        self, version: PolicyVersion, order: ExportRequest | None, alone_s: float
    ) -> OperationOutcome | None:
        if order is not None and order.answer is not None:
            return _ended(order, order.answer)
        if version in await self._ledger.revoked():
            return OperationOutcome(
                OperationState.CANCELLED, f"version {version} was revoked: a rollback left its branch"
            )
        if alone_s > self._patience_s:
            detail = (
                f"no trainer took the export for {self._patience_s:.0f} s: start one, or run on a machine with the "
                "run's folder: `penstock export --here`"
            )
            return OperationOutcome(OperationState.FAILED, detail)
        return None


def _number(operation: Operation) -> int:
    version = operation.request["version"]
    assert isinstance(version, int)
    return version


def _ended(order: ExportRequest, answer: ExportResult) -> OperationOutcome:
    if not answer.done:
        return OperationOutcome(OperationState.FAILED, answer.detail)
    result: dict[str, Json] = {
        "version": int(order.version),
        "step": answer.step,
        "folder": answer.folder,
        "adapter": order.adapter,
    }
    return OperationOutcome(OperationState.SUCCEEDED, f"it is in {answer.folder}: {answer.detail}", result)


def _phase(order: ExportRequest | None) -> tuple[str, str]:
    if order is None or not order.attempts:
        return "waiting", "for the trainer"
    return "writing", "" if order.attempts == 1 else f"attempt {order.attempts}: the trainer ended in the one before"
