"""Replicas and dead letters over HTTP."""

import dataclasses
import time
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from starlette.exceptions import HTTPException

from penstock.services.coordinator.api.dependencies import Limit, Parts, page_of, soon
from penstock.services.coordinator.api.errors import Conflict
from penstock.services.coordinator.api.routes.run import accepted
from penstock.services.coordinator.operations.dead_letters import decode
from penstock.services.coordinator.run.monitor import numbers
from penstock.services.coordinator.schemas.resources import (
    DeadLetterChange,
    DeadLetterMessage,
    DeadLetterView,
    OperationView,
    Page,
    ReplicaChange,
    ServiceView,
)
from penstock.services.coordinator.schemas.run import Command
from penstock.shared.bus.stores.experience import dead_letters
from penstock.shared.bus.stores.experience.dead_letters import (
    CURSOR_PATTERN,
    ENTRY_PATTERN,
    DeadLetter,
    DeadLetterSource,
)
from penstock.shared.bus.stores.policy.ledger import ENDED
from penstock.shared.bus.stores.replicas.cordon import Word, cordons, tell_replica, uncordon
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat, heartbeats
from penstock.shared.process.telemetry import tell

Replica = Annotated[str, Path(min_length=1, max_length=200, description="The replica's name.")]
After = Annotated[str | None, Query(min_length=1, max_length=200, description="`next` of the page before.")]
LetterCursor = Annotated[str | None, Query(pattern=CURSOR_PATTERN, description="`next` of the page before.")]
Entry = Annotated[str, Path(pattern=ENTRY_PATTERN, description="Its ID among the stream's dead letters.")]
_TAKING = ("episodes", "rollout", "reward")
_READY = ("working", "waiting")


def service_routes(parts: Parts) -> APIRouter:
    router = APIRouter(prefix="/v1/services", tags=["services"])

    @router.get("", operation_id="listServices", summary="Every live or silent replica, by name")
    async def services(cursor: After = None, limit: Limit = 100) -> Page[ServiceView]:
        matching = [view for view in await soon(_services(parts)) if cursor is None or view.replica > cursor]
        return page_of(matching, limit, lambda view: view.replica)

    @router.get("/{replica}", operation_id="getService", summary="One replica")
    async def service(replica: Replica) -> ServiceView:
        matching = [view for view in await soon(_services(parts)) if view.replica == replica]
        if not matching:
            raise _nobody(replica)
        return matching[0]

    @router.post("/{replica}/cordon", operation_id="cordonService", summary="Give it no new work; it keeps running")
    async def cordon(replica: Replica, command: Command | None = None) -> ReplicaChange:
        return await soon(_tell(parts, replica, Word.CORDONED, command))

    @router.post("/{replica}/uncordon", operation_id="uncordonService", summary="Give it work again")
    async def uncordon_(replica: Replica, command: Command | None = None) -> ReplicaChange:
        return await soon(_tell(parts, replica, None, command))

    @router.post(
        "/{replica}/drain",
        operation_id="drainService",
        summary="Let it finish its work and exit",
        status_code=202,
    )
    async def drain(response: Response, replica: Replica, command: Command | None = None) -> OperationView:
        await soon(_tell(parts, replica, Word.DRAINING, command))
        return accepted(response, await soon(parts.operations.begin("drain", "finishing", {"replica": replica})))

    return router


async def _services(parts: Parts) -> list[ServiceView]:
    """Return live replicas, and silent ones of a run that has not ended."""
    beats, told = await heartbeats(parts.bus), await cordons(parts.bus)
    status = await parts.ledger.status()
    views = {beat.replica: _service(beat, told.get(beat.replica), status.head) for beat in beats}
    for beat, silent_s in () if status.state in ENDED else parts.monitor.replicas.silent():
        since_s = time.time() - silent_s
        last = dataclasses.replace(beat, state="silent", activity="no heartbeat for", activity_since_s=since_s)
        views.setdefault(beat.replica, _service(last, told.get(beat.replica), status.head))
    return [views[replica] for replica in sorted(views)]


def _service(beat: Heartbeat, word: Word | None, head: int | None) -> ServiceView:
    behind = None if head is None or beat.version is None else max(0, head - beat.version)
    return ServiceView.model_validate(
        {
            **dataclasses.asdict(beat),
            "values": numbers(beat.values),
            "versions_behind": behind,
            "healthy": beat.state in _READY and not beat.last_error,
            "cordon": word,
        }
    )


async def _tell(parts: Parts, replica: str, word: Word | None, command: Command | None) -> ReplicaChange:
    beats = {beat.replica: beat for beat in await heartbeats(parts.bus)}
    before = (await cordons(parts.bus)).get(replica)
    if replica not in beats and before is None:
        raise _nobody(replica)
    if replica in beats and beats[replica].service not in _TAKING:
        raise Conflict(
            f"expected a {' or '.join(_TAKING)} replica, but {replica} is a {beats[replica].service}, of which there "
            f"is only one"
        )
    if word is None:
        await uncordon(parts.bus, replica)
    else:
        await tell_replica(parts.bus, replica, word)
    if before is not word:
        reason = command.reason if command is not None else ""
        name = "replica uncordoned" if word is None else f"replica {word.value}"
        await tell(parts.bus, "api", name, f"{replica}: {reason}" if reason else replica, replica=replica)
    return ReplicaChange(replica=replica, cordon=word, changed=before is not word)


def _nobody(replica: str) -> HTTPException:
    return HTTPException(404, f"no live replica is named {replica!r}")


# ---------------------------------------------------------------- dead letters


def dead_letter_routes(parts: Parts) -> APIRouter:
    """Return the routes under /v1/dead-letters."""
    router = APIRouter(prefix="/v1/dead-letters", tags=["dead letters"])

    @router.get("", operation_id="listDeadLetters", summary="Dead letters by stream, oldest first")
    async def letters(
        cursor: LetterCursor = None, limit: Limit = 100, stream: DeadLetterSource | None = None
    ) -> Page[DeadLetterView]:
        buried = await soon(dead_letters.read_page(parts.bus, cursor or "", limit + 1, stream))
        page = page_of(buried, limit, lambda letter: letter.cursor)
        return Page(items=[_letter(letter) for letter in page.items], next=page.next)

    @router.get("/{stream}/{entry}", operation_id="getDeadLetter", summary="One dead letter, decoded")
    async def letter(stream: DeadLetterSource, entry: Entry) -> DeadLetterMessage:
        dead_letter = await soon(dead_letters.read_one(parts.bus, stream, entry))
        if dead_letter is None:
            raise _gone(stream, entry)
        message, unreadable = await soon(decode(parts.bus, dead_letter))
        return DeadLetterMessage(**_letter(dead_letter).model_dump(), message=message, unreadable=unreadable)

    @router.post("/{stream}/{entry}/requeue", operation_id="requeueDeadLetter", summary="Requeue it")
    async def requeue(stream: DeadLetterSource, entry: Entry) -> DeadLetterChange:
        done = await soon(dead_letters.revive(parts.bus, stream, entry))
        if done < 0:
            raise Conflict("the run has ended: no replica would handle the group")
        if not done:
            raise _gone(stream, entry)
        parts.changed()
        await tell(parts.bus, "api", "dead letter requeued", f"{entry} of {stream.value}", stream=stream.value)
        return DeadLetterChange(stream=stream, entry=entry, outcome="requeued")

    @router.post("/{stream}/{entry}/discard", operation_id="discardDeadLetter", summary="Remove it from the run")
    async def discard(stream: DeadLetterSource, entry: Entry, command: Command | None = None) -> DeadLetterChange:
        reason = command.reason if command is not None else ""
        if not await soon(dead_letters.discard(parts.bus, stream, entry, reason)):
            raise _gone(stream, entry)
        parts.changed()
        await tell(parts.bus, "api", "dead letter discarded", f"{entry} of {stream.value}", stream=stream.value)
        return DeadLetterChange(stream=stream, entry=entry, outcome="discarded")

    return router


def _letter(dead_letter: DeadLetter) -> DeadLetterView:
    return DeadLetterView.model_validate({**dataclasses.asdict(dead_letter), "data_bytes": len(dead_letter.data)})


def _gone(stream: DeadLetterSource, entry: str) -> HTTPException:
    return HTTPException(404, f"{stream.value} has no dead letter {entry}")
