"""Rows on which every scorer is tried before training, written by the coordinator before it admits anything."""

import logging
from collections.abc import Sequence

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import key
from penstock.shared.bus.messages import Prompt
from penstock.shared.errors import MessageError

log = logging.getLogger(__name__)

REHEARSAL = key("rehearsal", "hash", "the run's", "index → prompt on which scorers are tried before training")


async def offer(bus: Bus, prompts: Sequence[Prompt]) -> None:
    """Replace the prompts."""
    await bus.write(REHEARSAL, "DEL")
    fields = [part for index, prompt in enumerate(prompts) for part in (str(index), wire.encode(prompt))]
    await bus.write(REHEARSAL, "HSET", *fields)


async def offered(bus: Bus) -> list[Prompt]:
    """Return the prompts; unreadable ones are logged and skipped."""
    rows = await bus.hgetall(REHEARSAL)
    prompts = []
    for index in sorted(rows):
        try:
            prompts.append(wire.decode(rows[index], Prompt))
        except MessageError as error:
            log.warning("unreadable prompt skipped", extra={"error": str(error)})
    return prompts
