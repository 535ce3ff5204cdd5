"""Fetch the routes of a group's samples (:mod:`penstock.shared.model.routes`), as far as a shelf has them."""

import asyncio
import logging
from collections.abc import Sequence

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.claims import Claim
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience
from penstock.shared.errors import MessageError, ShelfLost
from penstock.shared.settings import TrainerSettings

log = logging.getLogger(__name__)

FETCH_S = 20.0
"""After which a sample is routed live."""
_GROUPS_AT_ONCE = 8
_MOST_BYTES = 1 << 12
"""Of a token's routes: 128 layers of 16 experts a token, in two bytes each."""


async def fetch_all(bus: Bus, experiences: Sequence[Experience], settings: TrainerSettings) -> list[dict[bytes, bytes]]:
    """Return :func:`fetch` of each, of a few groups at a time."""
    places = asyncio.Semaphore(_GROUPS_AT_ONCE)

    async def fetched(experience: Experience) -> dict[bytes, bytes]:
        async with places:
            return await fetch(bus, experience, settings)

    return await asyncio.gather(*map(fetched, experiences))


async def fetch(bus: Bus, experience: Experience, settings: TrainerSettings) -> dict[bytes, bytes]:
    """Return the payloads of the samples' claims; those that no holder has in time are missing, all without router replay."""
    group = experience.group
    if not settings.router_replay:
        return {}
    sizes = {
        sample.routes: _MOST_BYTES * (len(group.prompt_token_ids) + len(sample.token_ids))
        for sample in group.samples
        if sample.routes
    }
    payloads = await asyncio.gather(*(_fetched(bus, claim, most_bytes) for claim, most_bytes in sizes.items()))
    return {claim: payload for claim, payload in zip(sizes, payloads, strict=True) if payload}


async def _fetched(bus: Bus, data: bytes, most_bytes: int) -> bytes:
    try:
        claim = wire.decode(data, Claim)
        if bus.shelf is None or claim.size > most_bytes:
            raise MessageError(f"expected a shelf, and at most {most_bytes:,} bytes of routes, found {claim.size:,}")
        async with asyncio.timeout(FETCH_S):
            return await bus.shelf.fetch(claim)
    except (ShelfLost, MessageError, TimeoutError) as error:
        log.warning("sample will be routed live", extra={"reason": str(error) or f"no answer in {FETCH_S:.0f} s"})
        return b""
