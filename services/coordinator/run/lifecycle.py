"""Run lifecycle: start, evaluation and end.

::

    created ──(version 0 live, initial evaluation done, autostart)──▶ running ◀──▶ paused
    running ──(committed step = run.steps)──▶ final evaluation ──▶ close ──▶ finished
    finished ──(run.steps raised)──▶ running
    any ──(POST /v1/run/stop)──▶ stopped ──▶ close

    close = drop the rest (`run_ended`) ──▶ records ──▶ summary.json ──▶ report.html

Every part is idempotent, with its state on the bus.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from penstock.services.coordinator.evaluation.evaluator import Due, Evaluator, take_all
from penstock.services.coordinator.evaluation.regression_gate import RegressionGate
from penstock.services.coordinator.evaluation.results import Evaluation, Evaluations
from penstock.services.coordinator.records import summary
from penstock.services.coordinator.records.jsonl import read
from penstock.services.coordinator.records.recorder import Recorder
from penstock.services.coordinator.records.report import write_report
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import (
    CANNOT_CONTINUE,
    ENDED,
    NOTED,
    Ledger,
    RunState,
    RunStatus,
    read_status,
)
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.stores.run.functions import read_functions
from penstock.shared.errors import BusFull
from penstock.shared.files.durable import write_whole
from penstock.shared.inputs import read_inputs
from penstock.shared.process.telemetry import tell
from penstock.shared.settings import Settings
from penstock.shared.settings.evaluation import HeldOutSet

log = logging.getLogger(__name__)

SOURCE = "coordinator"
ENDED_REASON = "run_ended"
_LONGEST_S = 3600.0
_FULL_S = 1.0
"""Retry delay while the bus is full."""
_STATE_FILE = "run_state.json"
_NOTE_EVERY_S = 10.0
"""What the run's clock may lose with the bus."""
_COMPLETE = "every step is committed"


def due(
    status: RunStatus, head_step: int, evaluated: Sequence[Evaluation], steps: int, sets: Sequence[HeldOutSet]
) -> Due | None:
    """The initial and final one cover every set; otherwise a set is due at multiples of its ``every_steps``."""
    names = tuple(held_out.name for held_out in sets)
    if status.state in ENDED or status.head is None:
        return None
    if not any(evaluation.initial for evaluation in evaluated) and head_step == 0 and status.step == 0:
        return Due(names, initial=True)
    if status.state is not RunState.RUNNING or any(evaluation.version == status.head for evaluation in evaluated):
        return None
    if status.step >= steps:
        return Due(names, final=True) if status.head == status.newest_version else None
    late = tuple(held_set.name for held_set in sets if _passed_a_multiple(head_step, evaluated, held_set))
    return Due(late) if late else None


def _passed_a_multiple(head_step: int, evaluated: Sequence[Evaluation], held_out: HeldOutSet) -> bool:
    every_steps = held_out.every_steps
    last = max((evaluation.step for evaluation in evaluated if evaluation.set == held_out.name), default=0)
    return head_step // every_steps > last // every_steps


class Lifecycle:
    def __init__(
        self,
        bus: Bus,
        ledger: Ledger,
        settings: Settings,
        evaluator: Evaluator | None,
        gate: RegressionGate,
        recorder: Recorder,
        opened: Callable[[], None],
        folder: Path,
        poll_s: float = 0.1,
        offer: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._bus = bus
        self._ledger = ledger
        self._settings = settings
        self._evaluator = evaluator
        self._gate = gate
        self._recorder = recorder
        self._opened = opened
        self._folder = folder
        self._poll_s = poll_s
        self._results = Evaluations(bus)
        self._offer = offer
        self._seen: RunStatus | None = None
        self._note_again_s = 0.0
        self._wake = asyncio.Event()
        self.gate_open = False
        self.closed = False
        """The run has ended and its records are complete."""

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        await self._ledger.note("doing", "")  # from the previous leader
        while True:
            if not await self.advance():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_s):
                        await self._wake.wait()
                self._wake.clear()

    async def advance(self) -> bool:
        status = await self._ledger.status()
        if not status.created_at_s:
            await self._create()
            return True
        if _notable(self._seen) != _notable(status) or time.monotonic() > self._note_again_s:
            await asyncio.to_thread(self._note_state, status)
            self._note_again_s = time.monotonic() + _NOTE_EVERY_S
        self._seen = status
        if status.state is RunState.FINISHED and status.step < self._settings.run.steps and status.head is not None:
            return await self._extend(status.step)
        if status.state in ENDED:
            return await self._end(status.state)
        if status.head is None:
            return False
        evaluated = await self._evaluations()
        if await self._evaluate(status, evaluated) or await self._gate.act(status, evaluated):
            return True
        self._open()
        if status.state is RunState.CREATED and self._settings.coordinator.autostart:
            return await self._start(status.head)
        if status.state is RunState.RUNNING and status.step >= self._settings.run.steps:
            return status.head == status.newest_version and await self._end(RunState.FINISHED)
        return False

    def _note_state(self, status: RunStatus) -> None:
        with contextlib.suppress(OSError), self._recorder.writing():  # else the state before stays
            note_state(self._folder, status)

    async def _create(self) -> None:
        """Create a new run, or one that the server has lost, as it was: paused, stopped, with what it had been offered."""
        await self._bus.make_groups()
        if self._offer is not None:
            await self._offer()
        await create(self._ledger, self._folder, self._seen)

    def _open(self) -> None:
        if not self.gate_open:
            self.gate_open = True
            self._opened()

    async def _start(self, head: int) -> bool:
        started, _ = await self._ledger.transition(RunState.RUNNING, "autostart", [RunState.CREATED])
        if started:
            self._opened()
            await tell(self._bus, SOURCE, "run started", f"version {head} is live")
        return started

    async def _extend(self, step: int) -> bool:
        await self._ledger.reopen()
        reason = f"extended from {step} to {self._settings.run.steps} steps"
        extended, _ = await self._ledger.transition(RunState.RUNNING, reason, [RunState.FINISHED])
        self.closed = False
        self._open()
        if extended:
            self._opened()
            await tell(self._bus, SOURCE, "run extended", reason, step=step, steps=self._settings.run.steps)
        return extended

    # ---------------------------------------------------------------- evaluate

    async def _evaluations(self) -> list[Evaluation]:
        revoked = await self._ledger.revoked()
        return [evaluation for evaluation in await self._results.read() if evaluation.version not in revoked]

    async def _evaluate(self, status: RunStatus, evaluated: list[Evaluation]) -> bool:
        if self._evaluator is None or status.head is None:
            return False
        under_way = await self._evaluator.under_way()
        version = status.head if under_way is None else under_way.version
        record = await self._ledger.policy(version)
        step = status.step if record is None else record.step
        next_due = due(status, step, evaluated, self._settings.run.steps, self._evaluator.sets)
        if next_due is None and under_way is None:
            return False
        next_due = next_due or Due(())  # the one in progress knows its sets
        if not next_due.initial and not (under_way is not None and under_way.initial):
            self._open()
        await self._ledger.note("doing", f"evaluating version {version}")

        async def progress(answered: int, problems: int) -> None:
            said = f"evaluating version {version}: {answered} of {problems} problems have answers"
            await self._ledger.note("doing", said)

        try:
            await self._evaluator.evaluate(version, step, next_due, progress)
        except BusFull as error:
            log.warning("evaluation waits for memory on the bus", extra={"error": str(error)})
            await asyncio.sleep(_FULL_S)
        await self._ledger.note("doing", "")
        return True

    # ---------------------------------------------------------------- end

    async def _end(self, state: RunState) -> bool:
        if await self._is_closed():
            return False
        await self._ledger.note("doing", "ending: waiting for the trainer")
        await self._wait_for_trainer(state)
        await self.close(state)
        return True

    async def _is_closed(self) -> bool:
        if not self.closed:
            self.closed = (await self._ledger.status()).closed
        return self.closed

    async def close(self, state: RunState) -> None:
        if await self._is_closed() or not await self._can_close(state):
            return
        await self._ledger.note("doing", "ending: dropping what is left")
        dropped = await drain(self._bus)
        if not await self._can_close(state):
            return
        await self._ledger.note("doing", "ending: writing the report")
        status = await self._ledger.status()
        reason = _COMPLETE if state is RunState.FINISHED else status.reason
        await tell(self._bus, SOURCE, "run ended", reason, state=state.value, dropped=dropped)
        await self._recorder.catch_up()
        ended_as = dataclasses.replace(status, state=state, reason=reason)
        await self._recorder.with_room(lambda: self._write(ended_as))
        await self._ledger.note("doing", "")
        if state is RunState.FINISHED:
            allowed = [RunState.RUNNING, RunState.PAUSED]
            ended, now = await self._ledger.transition(state, reason, allowed, status.step)
            if not ended and now is not RunState.FINISHED:
                return
        await self._ledger.close()
        self.closed = True

    async def _can_close(self, state: RunState) -> bool:
        """Whether a run that is to finish still has all its steps: a rollback may have been accepted meanwhile."""
        status = await self._ledger.status()
        if state is not RunState.FINISHED or status.state is RunState.FINISHED:
            return True
        if status.step >= self._settings.run.steps and status.tip == status.newest_version:
            return True
        await self._ledger.note("doing", "")
        return False

    async def _write(self, status: RunStatus) -> None:
        evaluated = await self._evaluations()
        counts = await self._bus.counts()
        lines = read(self._folder / "metrics.jsonl")
        functions = await read_functions(self._bus)
        inputs, server = read_inputs(self._folder), self._bus.server
        changed = inputs.accepted if inputs is not None else ()
        result = await asyncio.to_thread(
            summary.summarize, self._settings, status, counts, evaluated, lines, server, functions, changed
        )
        with self._recorder.writing():
            summary.write(result, self._folder)
        await asyncio.to_thread(write_report, self._folder, self._recorder.writing)

    async def _wait_for_trainer(self, state: RunState) -> None:
        """Wait for the trainer's heartbeat after the last commit: up to ``bus.drain_s``, or as long as it makes a step, whose
        groups would be dropped under it, or writes the policy. After a stop it begins none that it has not noted.
        """
        committed_at_s = (await self._ledger.status()).last_commit_s or 0.0
        until_s = time.monotonic() + max(_LONGEST_S, self._settings.bus.drain_s)
        drained_s = time.monotonic() + self._settings.bus.drain_s
        while time.monotonic() < until_s and await self._can_close(state):
            beats = [beat for beat in await heartbeats(self._bus) if beat.service == "trainer"]
            are_idle = all(beat.state != "working" and beat.seen_at_s > committed_at_s for beat in beats)
            if are_idle and not await self._ledger.is_in_step():
                return
            if time.monotonic() > drained_s and not any(beat.state == "working" for beat in beats):
                return
            await asyncio.sleep(0.1)


async def create(ledger: Ledger, folder: Path, seen: RunStatus | None = None) -> None:
    """Create the run, unless the bus knows it: in the state ``seen`` last, or else noted in its folder, or as a new one."""
    if not (await ledger.status()).created_at_s:
        await ledger.create(seen or noted_state(folder))


def note_state(folder: Path, status: RunStatus) -> None:
    """Record the run's state in its folder, for a coordinator that starts on an empty bus. May raise OSError."""
    if status.reason.startswith(CANNOT_CONTINUE):
        return  # its trainer finds out again
    noted = {name: value for name in ("state", "created_at_s", *NOTED) if (value := getattr(status, name)) is not None}
    noted |= {"closed_at_s": status.changed_at_s} if status.closed else {}
    write_whole(folder / _STATE_FILE, json.dumps(noted))


def _notable(status: RunStatus | None) -> tuple[RunState, str, bool] | None:
    return None if status is None else (status.state, status.reason, status.closed)


def noted_state(folder: Path) -> RunStatus | None:
    """Return what was recorded; None if nothing was, or if it cannot be read."""
    try:
        noted = json.loads((folder / _STATE_FILE).read_text(encoding="utf-8"))
        return read_status({name.encode(): str(value).encode() for name, value in noted.items()})
    except (OSError, ValueError, AttributeError):
        return None


async def drain(bus: Bus) -> int:
    """Return how many groups were dropped as ``dropped:run_ended``."""
    dropped = 0
    while True:
        taken = 0
        for stream in streams.TRAINING_STREAMS:
            for delivery in await take_all(bus, stream):
                taken += 1
                dropped += await bus.drop(delivery, ENDED_REASON)
        if not taken:
            break
    for stream in streams.EVALUATION_STREAMS:
        for delivery in await take_all(bus, stream):
            await bus.acknowledge(delivery)
    return dropped
