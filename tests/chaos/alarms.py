"""What a run that tests harm must say of its faults: alerts over Prometheus' HTTP API; guards in status, events, a metric and an alert.

::

    until none of them is there ──▶ raised(...): the body does the fault ──▶ until each was seen at least once ──▶ the test mends it
"""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

import yaml

from shared.bus import Bus
from shared.messages import Event
from shared.streams import EVENTS
from tests.chaos.hurried import hurried
from tests.chaos.run import PATIENCE_S, Run
from tests.conftest import until
from tests.test_alerts import RULES

_LOOK_S = 0.1


class Alarms:
    """The alarms of one run."""

    def __init__(self, run: Run, bus: Bus) -> None:
        self._run = run
        self._bus = bus
        self._seen: list[set[str]] = []
        """What was seen since each fault that is not over, the newest last."""

    # ---------------------------------------------------------------- shorter minutes

    async def hurry(self, minute_s: Callable[[str], float], scrape_s: float, targets: dict[str, str]) -> None:
        """Let Prometheus scrape every ``scrape_s`` and evaluate the shipped rules with minutes of ``minute_s(name)`` seconds.

        ``targets``: instance → address of what ``up`` did not start, nor hears of: executors.
        """
        folder = self._run.folder / "prometheus"
        await until((folder / "prometheus.yml").exists, timeout_s=PATIENCE_S)
        config = json.loads((folder / "prometheus.yml").read_text())
        rules = folder / "hurried.yaml"
        rules.write_text(yaml.safe_dump(hurried(yaml.safe_load(RULES.read_text()), minute_s)))
        config["global"] = dict.fromkeys(("scrape_interval", "evaluation_interval"), f"{round(1000 * scrape_s)}ms")
        config["rule_files"] = [str(rules)]
        (scrape,) = config["scrape_configs"]
        scrape["static_configs"] = [
            {"targets": [address], "labels": {"run": self._run.folder.name, "service": "executor", "instance": name}}
            for name, address in targets.items()
        ]
        _replace(folder / "prometheus.yml", json.dumps(config))
        await until(lambda: self._run.prometheus.ask("up == 1"), timeout_s=PATIENCE_S)
        self._run.send("prometheus", signal.SIGHUP)
        await until(lambda: self._run.prometheus.ask(f'up{{instance="{min(targets)}"}} == 1'), timeout_s=PATIENCE_S)

    # ---------------------------------------------------------------- what is said

    @contextlib.asynccontextmanager
    async def raised(self, alerts: Collection[str], guards: Collection[str] = ()) -> AsyncIterator[None]:
        """Hold that the body's fault raises ``alerts`` (names, or ``name/instance``) and trips ``guards``, and that none was there before.

        Of two cores one side may be short without a fault, so who starves may be there before.
        """
        wanted = {*alerts, *(f"{name} in {place}" for name in guards for place in ("status", "alerts"))}
        await self.over({name for name in wanted if "tarving" not in name})
        trips = {name: self._trips(name) for name in guards}
        newest = [entry for entry, _ in await self._bus.newest(EVENTS, Event)]
        self._seen.append(set())
        try:
            yield
            await self.see(wanted)
        finally:
            self._seen.pop()
        events = await self._bus.newest(EVENTS, Event, 1000)
        told = {event.name for entry, event in events[: [entry for entry, _ in events].index(newest[0])]}
        for name in guards:
            assert f"guard {name}" in told
            await until(lambda name=name: self._trips(name) > trips[name], timeout_s=PATIENCE_S)

    async def see(self, wanted: Collection[str]) -> None:
        """Wait until each of ``wanted`` was seen at least once, since the fault (:meth:`raised`) where there is one."""
        seen = self._seen[-1] if self._seen else set()
        missing: set[str] = set()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while missing := set(wanted) - seen:
                    seen |= await self._now()
                    self._run.check()
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            raise AssertionError(f"never raised: {sorted(missing)}\n{self._run.report()}") from error

    async def over(self, wanted: Collection[str]) -> None:
        """Wait until none of ``wanted`` is raised any more."""
        left = set(wanted)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while left := set(wanted) & await self._now():
                    self._run.check()
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            raise AssertionError(f"never over: {sorted(left)}\n{self._run.report()}") from error

    async def _now(self) -> set[str]:
        """What is raised now: alerts by name, and with their instance; each guard that status or an alert names."""
        found: set[str] = set()
        for labels in await asyncio.to_thread(self._run.prometheus.firing):
            name = labels["alertname"]
            found |= {name, f"{name}/{labels.get('instance', '')}"}
            guard = "no_signal" if name == "PenstockRewardCollapse" else labels.get("guard")
            found |= {f"{guard} in alerts"}
        answer = await self._run.ask("GET", "/v1/run")
        if answer is not None and answer.is_success:
            found |= {f"{guard['guard']} in status" for guard in answer.json()["guards"]}
        for seen in self._seen:
            seen |= found
        return found

    def _trips(self, guard: str) -> float:
        rows = self._run.prometheus.ask(f'sum(penstock_coordinator_guard_trips_total{{guard="{guard}"}})')
        return float(rows[0]["value"][1]) if rows else 0.0


def _replace(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.replace(path)
