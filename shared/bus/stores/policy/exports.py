"""Exports: ordered by the coordinator, made by the trainer.

An order, numbered by its operation, stays until withdrawn, so another trainer can take over; only the last taker may
answer.
"""

import dataclasses
import json
import logging
from pathlib import Path

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import key
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import PenstockError
from penstock.shared.settings import Settings

log = logging.getLogger(__name__)

EXPORTS = key("exports", "hash", "until withdrawn", "number → a requested export; number:taker, :attempts and :answer")


@dataclasses.dataclass(frozen=True, slots=True)
class ExportResult:
    done: bool
    detail: str
    """Source, or reason for failure."""
    folder: str = ""
    step: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ExportRequest:
    number: int
    version: PolicyVersion
    adapter: bool
    taker: str = ""
    """Empty: none."""
    attempts: int = 0
    answer: ExportResult | None = None


def export_folder(settings: Settings, version: PolicyVersion, *, adapter: bool = False) -> Path:
    return settings.run_folder / "exports" / f"v{version:06d}{'-adapter' if adapter else ''}"


def check_free(folder: Path) -> None:
    """Raise PenstockError unless ``folder`` is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PenstockError(f"expected a new or empty folder to write to, found {folder} in use: change --to")


class Exports:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def place(self, number: int, version: PolicyVersion, *, adapter: bool) -> None:
        """Order a version, unless this number has an order."""
        text = json.dumps({"version": int(version), "adapter": adapter})
        await self._bus.write(EXPORTS, "HSETNX", str(number), text)

    async def withdraw(self, number: int) -> None:
        """Delete an order and its answer."""
        fields = [str(number), *(f"{number}:{name}" for name in ("taker", "attempts", "answer"))]
        await self._bus.write(EXPORTS, "HDEL", *fields)

    async def look(self, number: int) -> ExportRequest | None:
        return next((order for order in await self.orders() if order.number == number), None)

    async def orders(self) -> list[ExportRequest]:
        raw = await self._bus.hgetall(EXPORTS)
        fields = {name.decode(errors="replace"): text.decode(errors="replace") for name, text in raw.items()}
        numbers = sorted(int(name) for name in fields if name.isascii() and name.isdigit())
        orders = [_order(number, fields) for number in numbers]
        return [order for order in orders if order is not None]

    async def take(self, number: int, taker: str) -> int:
        """Take an order, also from others; return the attempt, 0 if gone."""
        return int(await self._bus.script("take_export", number=number, taker=taker))

    async def answer(self, number: int, taker: str, answer: ExportResult) -> bool:
        """Answer an order; False if gone or taken by another."""
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
        log.warning("unreadable export request skipped", extra={"number": number, "error": repr(error)[:200]})
        return None
