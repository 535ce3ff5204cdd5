"""Settings that may change during a run: numbered revisions on the bus.

::

    PATCH /v1/run/settings ──▶ change(expected revision) ──▶ live: revision, revision → {changes, values, reason, …}
                                                               │ read with every heartbeat; by the trainer before every step
                                                               ▼
                                       settings(revision) = the run's file + the values of that revision

Revision 0 is the run's file; others hold all values that differ. Settings outside ``CHANGEABLE`` never change. A process
that knows a newer revision than the bus puts it back: the bus has lost its data.
"""

import dataclasses
import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import key
from penstock.shared.bus.messages import Json
from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings
from penstock.shared.settings.reading.loading import override

log = logging.getLogger(__name__)

LIVE = key(
    "live", "hash", "the run's", "revision; revision → changed settings (JSON); step:revision → step of the change"
)

_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)

CHANGEABLE = (
    "algorithm.max_lag",
    "trainer.learning_rate",
    "sampling.temperature",
    "sampling.group_size",
    "reward.expression",
    "weights.update",
    "run.gpu_hours",
)


GROUP_GROWTH = 4
"""Maximum growth of groups over the run's file, which sized the services."""
FLIGHT_GROWTH = 16
"""Same for samples in flight: slots × sampling.group_size."""


@dataclasses.dataclass(frozen=True, slots=True)
class Revision:
    revision: int
    changes: dict[str, Json]
    """Requested: dotted key → value."""
    values: dict[str, Json]
    """All differences from the run's file."""
    reason: str
    at_s: float
    change_id: str = ""
    step: int = 0
    """Committed steps at the request. Later steps use it, except one whose batch was already taken."""


class Live:
    """A run's current settings.

    Args:
        settings: those of the run's file.
    """

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self._bus = bus
        self._file = settings
        self._listeners: list[Callable[[Settings], None]] = []
        self.settings = settings
        self.revision = 0
        self._applied: Revision | None = None

    def listen(self, listener: Callable[[Settings], None]) -> None:
        """Call ``listener`` after each change."""
        self._listeners.append(listener)

    async def refresh(self) -> Settings:
        """Read and apply the newest revision; return the settings."""
        return await self.hear(await self._bus.hget(LIVE, "revision"))

    async def hear(self, newest: bytes | None) -> Settings:
        """Apply the revision of this number; return the settings. One that cannot be applied is logged and skipped."""
        number = self.revision
        try:
            number = _number(newest)
            if number == self.revision:
                return self.settings
            if number < self.revision and self._applied is not None:
                await self._put_back(self._applied)
                return self.settings
            applied = await self.read(number)
            settings = self._with(applied)
            check_growth(self._file, settings)
        except (SettingsError, *_UNREADABLE) as error:
            log.error("settings cannot be applied", extra={"revision": number, "reason": str(error)[:500]})
            return self.settings
        self.settings, self.revision, self._applied = settings, number, applied
        log.info("settings changed", extra={"revision": number})
        for listener in self._listeners:
            listener(settings)
        return settings

    async def newest(self) -> int:
        return _number(await self._bus.hget(LIVE, "revision"))

    async def at(self, number: int) -> Settings:
        """Return a revision's settings; the run's file if unknown."""
        if number == self.revision:
            return self.settings
        return self._with(await self.read(number))

    def _with(self, revision: Revision | None) -> Settings:
        return self._file if revision is None else override(self._file, revision.values)

    async def read(self, number: int) -> Revision | None:
        """Return a revision; None for 0 and unknown ones."""
        text, step = await self._bus.hmget(LIVE, str(number), f"step:{number}")
        return None if text is None else Revision(**{**json.loads(text), "step": int(step or 0)})

    async def kept(self) -> list[str]:
        """Return the values of the newest revision that differ from the run's file, whose own have no effect."""
        revision = await self.read(self.revision)
        file = self._file.model_dump(mode="json")
        values = {} if revision is None else revision.values
        own = {key: file[table][name] for key in values for table, name in [key.split(".")]}
        return [
            f"{key} is {json.dumps(values[key])}, not {json.dumps(own[key])}"
            for key in values
            if values[key] != own[key]
        ]

    async def change(self, expected: int, changes: Mapping[str, Json], reason: str) -> Revision | None:
        """Create the revision after ``expected``; None if another was first.

        Raises:
            SettingsError: a value is wrong, may not change, or contradicts other settings.
        """
        check_changeable(changes)
        before = await self.read(expected)
        values: dict[str, Json] = {**({} if before is None else before.values), **changes}
        check_growth(self._file, override(self._file, values))
        made = Revision(expected + 1, dict(changes), values, reason, time.time(), uuid.uuid4().hex)
        text = json.dumps(dataclasses.asdict(made))
        if not await self._bus.script("change_settings", expected=expected, revision=text):
            return None
        await self.refresh()
        return await self.read(expected + 1)

    async def restore(self, number: int, values: Mapping[str, Json]) -> None:
        """Restore a checkpoint's revision to an empty bus, unless another process has put back a newer one."""
        if number > await self.newest():
            await self._put_back(Revision(number, {}, dict(values), "restored from a checkpoint", time.time()))

    async def _put_back(self, revision: Revision) -> None:
        number = revision.revision
        text = json.dumps(dataclasses.asdict(revision))
        fields = ("revision", number, str(number), text, f"step:{number}", revision.step)
        await self._bus.write(LIVE, "HSET", *fields)

    def values(self) -> dict[str, Json]:
        return {key: value_of(self.settings, key) for key in CHANGEABLE}


def _number(stored: bytes | None) -> int:
    number = int(stored or 0)
    if not 0 <= number < 1 << 53:
        raise ValueError(f"there is no revision {number} of the settings")
    return number


def check_changeable(changes: Mapping[str, object]) -> None:
    """Raise SettingsError for a fixed key."""
    wrong = [key for key in changes if key not in CHANGEABLE]
    if wrong:
        raise SettingsError(
            f"expected settings that may change during the run ({', '.join(CHANGEABLE)}), found {', '.join(wrong)}"
        )


def check_growth(file: Settings, settings: Settings) -> None:
    """Raise SettingsError if services sized by ``file`` may lack memory."""
    most, size = GROUP_GROWTH * file.sampling.group_size, settings.sampling.group_size
    if size > most:
        raise SettingsError(
            f"expected sampling.group_size of at most {most} during the run ({GROUP_GROWTH} times that of its file), "
            f"found {size}: "
            "set it in the file and resume, so that services are sized for it"
        )
    flight = FLIGHT_GROWTH * file.slots * file.sampling.group_size
    if settings.slots * size > flight:
        raise SettingsError(
            f"expected at most {flight:,} samples in flight during the run ({FLIGHT_GROWTH} times those of its file), "
            f"found "
            f"{settings.slots * size:,}: lower algorithm.max_lag or sampling.group_size, or set them in the file and resume"
        )


def value_of(settings: Settings, key: str) -> Json:
    table, name = key.split(".")
    value: Json = getattr(getattr(settings, table), name)
    return value
