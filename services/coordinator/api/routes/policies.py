"""Policy history over HTTP: versions, lineage, marks and comparison."""

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from starlette.exceptions import HTTPException

from penstock.services.coordinator.api.dependencies import Limit, Parts, page_of, soon
from penstock.services.coordinator.api.errors import Conflict
from penstock.services.coordinator.api.routes.run import accepted
from penstock.services.coordinator.evaluation.results import evaluations_of
from penstock.services.coordinator.policies.exports import KIND as EXPORT
from penstock.services.coordinator.policies.lineage import common_ancestor, compare
from penstock.services.coordinator.run.monitor import evaluation_view, numbers
from penstock.services.coordinator.schemas.resources import Comparison, OperationView, Page, PolicyMark, PolicyView
from penstock.services.coordinator.schemas.run import Command, Export
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.bus.stores.policy.policies import PolicyState
from penstock.shared.process.telemetry import tell

Version = Annotated[int, Path(ge=0, le=2**53, description="The version's number.")]
After = Annotated[str | None, Query(pattern=r"^[0-9]{1,15}$", description="`next` of the page before.")]
Only = Annotated[PolicyState | None, Query(description="Only versions in this state.")]
Listed = Callable[[int, int, PolicyState | None], Awaitable[Page[PolicyView]]]
"""Return a number of versions in a state (None: any) after one."""


def policy_views(
    listed: Listed,
    viewed: Callable[[int], Awaitable[PolicyView]],
    compared: Callable[[int, int], Awaitable[Comparison]],
) -> APIRouter:
    """Return the reading routes of the versions that the functions return. They raise HTTPException: an unknown version."""
    router = APIRouter(prefix="/v1/policies", tags=["policies"])

    @router.get(
        "",
        operation_id="listPolicies",
        summary="Every policy version with its parent, oldest first",
        response_model=Page[PolicyView],
    )
    async def policies(cursor: After = None, limit: Limit = 100, state: Only = None) -> Response:
        page = await soon(listed(-1 if cursor is None else int(cursor), limit, state))
        return Response(page.model_dump_json(), media_type="application/json")  # valid: not checked twice

    @router.get("/{version}", operation_id="getPolicy", summary="One policy version")
    async def policy(version: Version) -> PolicyView:
        return await soon(viewed(version))

    @router.get("/{version}/compare/{other}", operation_id="comparePolicies", summary="Two versions side by side")
    async def compare_policies(version: Version, other: Version) -> Comparison:
        return await soon(compared(version, other))

    return router


def policy_routes(parts: Parts) -> APIRouter:
    listed, viewed, compared = (functools.partial(_page, parts), functools.partial(_policy, parts), functools.partial(_compare, parts))  # fmt: skip
    router = policy_views(listed, viewed, compared)

    @router.post(
        "/{version}/rollback",
        operation_id="rollBack",
        summary="Roll the run back to this version: weights, optimizer, step and dataset position",
        status_code=202,
    )
    async def roll_back(version: Version, response: Response, command: Command | None = None) -> OperationView:
        target = (await soon(_record(parts, version))).version
        begun = await soon(parts.rollbacks.begin(target, command.reason if command is not None else ""))
        return accepted(response, begun)

    @router.post(
        "/{version}/export",
        operation_id="exportPolicy",
        summary="Export it in Hugging Face form to the run's folder",
        status_code=202,
    )
    async def export(version: Version, response: Response, command: Export | None = None) -> OperationView:
        adapter = command is not None and command.adapter
        record = await soon(_record(parts, version))
        await soon(parts.exporting.check(record, adapter=adapter))
        asked = {"version": int(record.version), "adapter": adapter}
        return accepted(response, await soon(parts.operations.begin(EXPORT, "waiting", asked)))

    @router.post("/{version}/pin", operation_id="pinPolicy", summary="Protect its checkpoint from cleanup")
    async def pin(version: Version) -> PolicyMark:
        return await soon(_mark(parts, version, pinned=True))

    @router.post("/{version}/unpin", operation_id="unpinPolicy", summary="Allow cleanup to delete its checkpoint")
    async def unpin(version: Version) -> PolicyMark:
        return await soon(_mark(parts, version, pinned=False))

    @router.post("/{version}/release", operation_id="releasePolicy", summary="Mark it as released")
    async def release(version: Version) -> PolicyMark:
        return await soon(_mark(parts, version, released=True))

    @router.post("/{version}/withdraw", operation_id="withdrawPolicy", summary="Remove the released mark")
    async def withdraw(version: Version) -> PolicyMark:
        return await soon(_mark(parts, version, released=False))

    return router


_EXAMINED = 2000
"""Versions that one request examines; its `next` continues after them."""


async def _page(parts: Parts, after: int, limit: int, state: PolicyState | None) -> Page[PolicyView]:
    """Return the versions in ``state`` after one; None: in any."""
    if state in (PolicyState.LIVE, PolicyState.REVOKED):
        head = (await parts.ledger.status()).head
        known = await parts.ledger.revoked() if state is PolicyState.REVOKED else {head} - {None}
        records = await parts.ledger.records(
            sorted(version for version in known if version is not None and version > after)[: limit + 1]
        )
        page = page_of(records, limit, lambda record: str(record.version))
        return Page(items=await _views(parts, page.items), next=page.next)
    fitting: list[PolicyRecord] = []
    for _ in range(0, _EXAMINED, limit):
        records = await parts.ledger.page(after, limit + 1)
        states = {} if state is None else await parts.ledger.policy_states(record.version for record in records)
        for record in records[:limit]:
            after = record.version
            fitting += [record] if state in (None, states.get(record.version)) else []
            if len(fitting) == limit:
                break
        is_last = not records or after == records[-1].version
        if is_last or len(fitting) == limit:
            return Page(items=await _views(parts, fitting), next=None if is_last else str(after))
    return Page(items=await _views(parts, fitting), next=str(after))


async def _views(parts: Parts, records: Sequence[PolicyRecord]) -> list[PolicyView]:
    ledger, versions = parts.ledger, [record.version for record in records]
    states, checkpoints, pins, released, evaluated = await asyncio.gather(
        ledger.policy_states(versions),
        ledger.checkpoints(),
        ledger.pins(),
        ledger.released(),
        evaluations_of(parts.bus, versions),
    )
    return [
        PolicyView.model_validate(
            {
                **{field.name: getattr(record, field.name) for field in dataclasses.fields(record)},
                "metrics": numbers(record.metrics),
                "state": states.get(record.version),
                "checkpoint": checkpoints.get(record.version),
                "evaluations": [evaluation_view(evaluation) for evaluation in evaluated.get(record.version, ())],
                "pinned": record.version in pins,
                "released": record.version in released,
            }
        )
        for record in records
    ]


async def _policy(parts: Parts, version: int) -> PolicyView:
    return (await _views(parts, [await _record(parts, version)]))[0]


async def _record(parts: Parts, version: int) -> PolicyRecord:
    record = await parts.ledger.policy(PolicyVersion(version))
    if record is None:
        newest = (await parts.ledger.status()).newest_version
        known = "none yet" if newest is None else f"versions up to {newest}"
        raise HTTPException(404, f"this run has no policy version {version}; it has {known}")
    return record


async def _compare(parts: Parts, version: int, other: int) -> Comparison:
    left, right = await _record(parts, version), await _record(parts, other)
    ancestor = await common_ancestor(parts.ledger, left, right, await parts.ledger.revoked())
    evaluated = await evaluations_of(parts.bus, [left.version, right.version])
    views = {int(of): [evaluation_view(evaluation) for evaluation in known] for of, known in evaluated.items()}
    return compare(left, right, ancestor, views)


async def _mark(parts: Parts, number: int, *, pinned: bool | None = None, released: bool | None = None) -> PolicyMark:
    version, ledger = (await _record(parts, number)).version, parts.ledger
    changed, word = False, ""
    if pinned is not None:
        if pinned and version not in await ledger.checkpoints():
            raise Conflict(f"version {version} has no checkpoint to keep")
        changed, word = await ledger.pin(version, pinned=pinned), "pinned" if pinned else "unpinned"
    if released is not None:
        state = (await ledger.policy_states([version])).get(version)
        if released and state is PolicyState.REVOKED:
            raise Conflict(f"version {version} was revoked")
        changed, word = await ledger.release(version, released=released), "released" if released else "withdrawn"
    if changed:
        await tell(parts.bus, "api", f"policy {word}", f"version {version} was {word}", version=int(version))
    pins, out = await asyncio.gather(ledger.pins(), ledger.released())
    return PolicyMark(version=version, pinned=version in pins, released=version in out, changed=changed)
