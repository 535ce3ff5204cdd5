"""The context of a rollout replica in this process."""

import asyncio

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.replicas.cordon import Cordon
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.stores.replicas.run_secret import RunSecret
from penstock.shared.placement.lease import lease_of
from penstock.shared.placement.turns import ReplicaTurns
from penstock.shared.process.service import Context
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings


def context(settings: Settings, bus: Bus, name: str, status: Status, taking: asyncio.Event | None = None) -> Context:
    """Return a context whose replica takes prompts while ``taking`` is set; None: always."""
    cordon = Cordon(bus, name, lambda: None)
    cordon.taking = taking or cordon.taking
    live, secret = Live(bus, settings), RunSecret(bus)
    return Context(settings, "rollout", name, bus, status, asyncio.Event(), live, cordon, secret)


def own_device(made: Context) -> ReplicaTurns:
    """Return the turns of a replica that shares no device."""
    return ReplicaTurns(lease_of(made, "generate"), made.status)
