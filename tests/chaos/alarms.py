"""Alarms that a fault must raise: alerts over Prometheus' HTTP API; guards in status, events, a metric and an alert.

::

    until no alert is raised ──▶ raised(...): the body causes the fault ──▶ seen(): each, once ──▶ the body mends it
"""

import asyncio
import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping

import yaml

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Event
from penstock.shared.bus.streams import EVENTS
from penstock.shared.files.durable import write_whole
from tests.chaos.hurried import hurried
from tests.chaos.run import Run
from tests.conftest import PATIENCE_S
from tests.deploy.test_alerts import RULES

_LOOK_S = 0.1
_PATIENCE_MINUTES = 120
"""Minutes; twice the longest range of the rules."""
PLACES = ("status", "alerts", "events", "trips")


@dataclasses.dataclass(slots=True)
class Fault:
    awaited: frozenset[str]
    """Alerts, and guards by place."""
    event: str
    trips: dict[str, float]
    """Trips before it, from Prometheus."""
    seen: set[str] = dataclasses.field(default_factory=set)

    @property
    def missing(self) -> frozenset[str]:
        return self.awaited - self.seen


class Alarms:
    def __init__(self, run: Run, bus: Bus) -> None:
        self._run = run
        self._bus = bus
        self._patience_s = PATIENCE_S
        self._faults: list[Fault] = []

    async def hurry(
        self, minute_s: float, times: Mapping[str, float], targets: Mapping[tuple[str, str, str], str]
    ) -> None:
        """Evaluate the shipped rules with minutes of ``minute_s`` seconds (``times``: see :func:`hurried`).

        ``targets``: (run, service, instance) → address of processes unknown to ``up``.
        """
        self._patience_s = max(PATIENCE_S, _PATIENCE_MINUTES * minute_s)
        folder = self._run.folder / "prometheus"
        await self._run.until((folder / "prometheus.yml").exists)
        config = json.loads((folder / "prometheus.yml").read_text())
        rules = folder / "hurried.yaml"
        rules.write_text(yaml.safe_dump(hurried(yaml.safe_load(RULES.read_text()), minute_s, times)))
        config["global"] = dict.fromkeys(("scrape_interval", "evaluation_interval"), f"{round(1000 * minute_s)}ms")
        config["rule_files"] = [str(rules)]
        (scrape,) = config["scrape_configs"]
        scrape["static_configs"] = [
            {"targets": [address], "labels": {"run": run, "service": service, "instance": name}}
            for (run, service, name), address in targets.items()
        ]
        write_whole(folder / "prometheus.yml", json.dumps(config))
        await self._run.until(lambda: self._run.prometheus.ask("up == 1"))
        self._run.send("prometheus", signal.SIGHUP)
        for _, _, name in targets:
            up = f'up{{instance="{name}"}} == 1'
            await self._run.until(lambda up=up: self._run.prometheus.ask(up))  # type: ignore[misc]

    @contextlib.asynccontextmanager
    async def raised(
        self, alerts: Collection[str] = (), guards: Collection[str] = ()
    ) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Check that the fault raises ``alerts`` (``name`` or ``name/instance``) and trips ``guards``, none raised
        before.

        Yields a wait for all of them. Starvation alerts may be raised before: on two cores either side may be short.
        """
        awaited = frozenset((*alerts, *(f"{name} in {place}" for name in guards for place in PLACES)))
        before = {*(name for name in alerts if "Starving" not in name), *(f"{name} in status" for name in guards)}
        await self.over(before)
        ((newest, _),) = await self._bus.newest(EVENTS, Event, 1)
        self._faults.append(Fault(awaited, newest, await asyncio.to_thread(self._trips)))
        started_s = time.monotonic()
        try:
            yield lambda: self.see(awaited)
            await self.see(awaited)
        finally:
            self._faults.pop()
            print(f"{time.monotonic() - started_s:5.1f} s: {', '.join(sorted({*alerts, *guards}))}")

    async def see(self, awaited: Collection[str]) -> None:
        """Wait until each of ``awaited`` was seen, since the fault if there is one."""
        seen = self._faults[-1].seen if self._faults else set()
        await self._look(awaited, lambda now: set(awaited) - seen - now, "never raised")

    async def over(self, awaited: Collection[str]) -> None:
        await self._look(awaited, lambda now: set(awaited) & now, "never over")

    async def _look(self, awaited: Collection[str], missing: Callable[[set[str]], set[str]], wrong: str) -> None:
        now: set[str] = set()
        try:
            async with asyncio.timeout(self._patience_s):
                while missing(now := await self._now(awaited)):
                    self._run.check()
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            raise AssertionError(
                f"{wrong} in {self._patience_s:.0f} s: {sorted(missing(now))}; there now: {sorted(now)}\n{self._run.report()}"
            ) from error

    async def _now(self, awaited: Collection[str]) -> set[str]:
        """Return raised alerts, also with instance, and guards by place.

        Other sources are read only if needed: the fault may harm them.
        """
        places = {
            name.rpartition(" in ")[2]
            for name in {*awaited, *(name for fault in self._faults for name in fault.missing)}
        }
        present: set[str] = set()
        for labels in await asyncio.to_thread(self._run.prometheus.firing):
            name = labels["alertname"]
            present |= {name, f"{name}/{labels.get('instance', '')}"}
            guard = "no_signal" if name == "PenstockRewardCollapse" else labels.get("guard")
            present |= {f"{guard} in alerts"}
        if "status" in places:
            answer = await self._run.ask("GET", "/v1/run")
            if answer is not None and answer.is_success:
                present |= {f"{guard['guard']} in status" for guard in answer.json()["guards"]}
        for fault in self._faults:
            fault.seen |= present
        if places & {"events", "trips"}:
            trips, events = await asyncio.to_thread(self._trips), await self._bus.newest(EVENTS, Event, 1000)
            for fault in self._faults:
                fault.seen |= {f"{name} in trips" for name in trips if trips[name] > fault.trips.get(name, 0.0)}
                fault.seen |= {f"{_guard(event)} in events" for entry, event in events if _is_after(entry, fault.event)}
        return present

    def _trips(self) -> dict[str, float]:
        rows = self._run.prometheus.ask("sum by (guard) (penstock_coordinator_guard_trips_total)")
        return {row["metric"]["guard"]: float(row["value"][1]) for row in rows}


def _guard(event: Event) -> str:
    return event.name.removeprefix("guard ")


def _is_after(entry: str, other: str) -> bool:
    left, right = (tuple(map(int, entry_id.split("-"))) for entry_id in (entry, other))
    return left > right
