"""Exports on the bus: what the coordinator orders, and the trainer, which has the weights and their libraries, makes.

::

    coordinator                                       trainer, rank 0
    place(7, version 40) ──────────▶ orders() ──▶ take(7, me) ──▶ a process of its own writes the folder
    look(7)              ◀───────────────────────── answer(7, me, …)
    withdraw(7)          ──────────▶ an order that is gone, or that another trainer took, is given up

An order stays until the coordinator withdraws it, so a trainer that died is followed by the next one; ``attempts`` counts them. Who took
an order last may answer it, nobody else. A number is that of the coordinator's operation. This module makes nothing.
"""

import dataclasses
import json
import logging
from pathlib import Path

from shared.bus.bus import Bus
from shared.bus.keys import key
from shared.bus.messages import PolicyVersion
from shared.errors import PenstockError
from shared.settings import Settings

log = logging.getLogger(__name__)

EXPORTS = key("exports", "hash", "until withdrawn", "number → a requested export; number:taker, :attempts and :answer")


@dataclasses.dataclass(frozen=True, slots=True)
class ExportResult:
    """What became of an order."""

    done: bool
    detail: str
    """What it was made from, or why it was not."""
    folder: str = ""
    """Where it lies."""
    step: int = 0
    """Optimizer step of the version."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExportRequest:
    """One version that somebody wants in Hugging Face form."""

    number: int
    version: PolicyVersion
    adapter: bool
    """The adapter alone."""
    taker: str = ""
    """Who makes it; empty: nobody yet."""
    attempts: int = 0
    """How often it was taken."""
    answer: ExportResult | None = None


def export_folder(settings: Settings, version: PolicyVersion, *, adapter: bool = False) -> Path:
    """Return where an export lies for which nobody named a place."""
    return settings.run_folder / "exports" / f"v{version:06d}{'-adapter' if adapter else ''}"


def check_free(folder: Path) -> None:
    """Raise PenstockError where an export to ``folder``, which must be new or empty, would meet what lies there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PenstockError(f"expected a new or empty folder to write to, found {folder} in use: change --to")


class Exports:
    """The orders of a run."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def place(self, number: int, version: PolicyVersion, *, adapter: bool) -> None:
        """Order a version, unless it is ordered already under this number."""
        text = json.dumps({"version": int(version), "adapter": adapter})
        await self._bus.write(EXPORTS, "HSETNX", str(number), text)

    async def withdraw(self, number: int) -> None:
        """Forget an order and its answer."""
        fields = [str(number), *(f"{number}:{name}" for name in ("taker", "attempts", "answer"))]
        await self._bus.write(EXPORTS, "HDEL", *fields)

    async def look(self, number: int) -> ExportRequest | None:
        """Return an order; None where there is none of this number."""
        return next((order for order in await self.orders() if order.number == number), None)

    async def orders(self) -> list[ExportRequest]:
        """Return every order, oldest first."""
        raw = await self._bus.hgetall(EXPORTS)
        fields = {name.decode(errors="replace"): text.decode(errors="replace") for name, text in raw.items()}
        numbers = sorted(int(name) for name in fields if name.isascii() and name.isdigit())
        orders = [_order(number, fields) for number in numbers]
        return [order for order in orders if order is not None]

    async def take(self, number: int, taker: str) -> int:
        """Take an order, from whoever had it; return which attempt this is, 0 where the order is gone."""
        return int(await self._bus.script("take_export", number=number, taker=taker))

    async def answer(self, number: int, taker: str, answer: ExportResult) -> bool:
        """Say what became of an order; False where it is gone, or another took it."""
        text = json.dumps(dataclasses.asdict(answer))
        return bool(await self._bus.script("answer_export", number=number, taker=taker, answer=text))


def _order(number: int, fields: dict[str, str]) -> ExportRequest | None:
    try:
        asked, answer = json.loads(fields[str(number)]), fields.get(f"{number}:answer")
        return ExportRequest(
            number,
            PolicyVersion(int(asked["version"])),
            bool(asked["adapter"]),
            fields.get(f"{number}:taker", ""),
            int(fields.get(f"{number}:attempts", 0)),
            None if answer is None else ExportResult(**json.loads(answer)),
        )
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        log.warning("unreadable order of an export passed over", extra={"number": number, "error": repr(error)[:200]})
        return None
