"""Which replicas keep which version for an evaluation: written by the coordinator with the evaluation, read by replicas before they swap.

::

    coordinator   start_evaluation: description, holding, prompts ── one script, refused once a newer version is the head
    replica       told of a newer version ─▶ reads the holding ─▶ it is named, and serves that version: it stays on it
    coordinator   end_evaluation: the holding is gone ─▶ the replica goes on to the head

A version newer than the held one is told only after the holding was written, so a replica that reads it then cannot miss it. Nobody has to
let go by himself but for the time: a replica keeps a version for ``timeout_s`` at most, counted by its own clock from when it first saw it.
"""

import dataclasses
import json
import logging

from shared.bus.bus import Bus
from shared.bus.messages import PolicyVersion

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    """A version that is evaluated now."""

    version: PolicyVersion
    replicas: tuple[str, ...]
    """Those that keep it and answer; empty: all."""
    timeout_s: float

    def names(self, replica: str) -> bool:
        """Whether ``replica`` is to keep it."""
        return not self.replicas or replica in self.replicas

    def encode(self) -> str:
        """Return it as the bus holds it."""
        return json.dumps(dataclasses.asdict(self))


async def holding(bus: Bus) -> Holding | None:
    """Return what is held now, if anything."""
    text = await bus.call(lambda: bus.client.hget(bus.keys.evaluation, "holding"))
    if text is None:
        return None
    try:
        found = json.loads(text)
        replicas = tuple(str(name) for name in found["replicas"])
        return Holding(PolicyVersion(int(found["version"])), replicas, float(found["timeout_s"]))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        log.warning("unreadable holding passed over", extra={"error": repr(error)})
        return None


async def appoint(bus: Bus, to_hold: Holding) -> bool:
    """Name other replicas for the evaluation under way; False when it is over."""
    return bool(await bus.script("appoint", [bus.keys.evaluation], [to_hold.version, to_hold.encode()]))
