"""All runs on a server, and the settings of those registered over HTTP."""

import time

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import RUN, Key, Keys, key
from penstock.shared.bus.stores.policy.ledger import Ledger, RunStatus
from penstock.shared.bus.stores.replicas.heartbeats import SERVICE

SETTINGS = key("settings", "string", "until the run is deleted", "the TOML of a run that was registered over HTTP")
_AT_ONCE = 500


async def registered_settings(bus: Bus) -> str | None:
    text = await bus.get(SETTINGS)
    return None if text is None else text.decode()


async def keep_registered(bus: Bus, text: str) -> None:
    """Register a run's settings again, if the bus lost them."""
    await bus.write(SETTINGS, "SET", text, "NX")


class Registry:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def runs(self) -> list[str]:
        return await self._with(RUN)

    async def registered(self) -> list[str]:
        return await self._with(SETTINGS)

    async def status(self, run_id: str) -> tuple[RunStatus, bool] | None:
        bus = self._bus.of_run(run_id)
        if not await bus.ask("EXISTS", RUN):
            return None
        return await Ledger(bus).status(), await bus.get(SETTINGS) is not None

    async def register(self, run_id: str, settings: str) -> bool:
        """Register a run; False if its id is taken."""
        return bool(await self._bus.of_run(run_id).script("register", text=settings, now_s=time.time()))

    async def working(self, run_id: str) -> int:
        return len(await self._bus.keys_like(Keys(run_id).of(SERVICE.of("*"))))

    async def delete(self, run_id: str) -> bool:
        """Delete a run; False if it is running or paused."""
        if not await self._bus.of_run(run_id).script("unregister"):
            return False
        names = await self._bus.keys_like(Keys(run_id).named("*"))
        for start in range(0, len(names), _AT_ONCE):
            await self._bus.unlink(names[start : start + _AT_ONCE])
        return True

    async def _with(self, kind: Key) -> list[str]:
        names = await self._bus.keys_like(f"penstock:{{*}}:{kind.name}")
        return sorted(name.removeprefix("penstock:{").removesuffix(f"}}:{kind.name}") for name in set(names))
