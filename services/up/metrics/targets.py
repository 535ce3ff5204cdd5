"""Tell Prometheus where the metrics of a run's processes are: ``runs/.metrics/<run id>.json``, as its file_sd reads it.

Beside the runs' folders, not in them: file_sd takes a pattern in the last part of a path only, and one Prometheus may watch all runs.

Every target has three labels: ``run``, ``service`` and ``instance``, the replica's name, which stays over restarts, as its port does
not. The chart's PodMonitor sets the same three, so that dashboards and alerts hold in both places. No process labels its own metrics
with them. A replica that is gone stays a target, for its silence is what an alert is about; one that was told to leave, and did, does not.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from services.client.views import ReplicaView
from services.up.plan import PROMETHEUS, ProcessPlan
from shared.bus.stores.cordon import Word
from shared.files.durable import Kept


def targets_file(run_folder: Path) -> Path:
    """Return where the addresses of a run's metrics stand."""
    return run_folder.parent / ".metrics" / f"{run_folder.name}.json"


class Targets:
    """The addresses of one run's metrics, written down whenever one changes."""

    def __init__(
        self, run_folder: Path, run_id: str, plans: Sequence[ProcessPlan], tell: Callable[[str], None]
    ) -> None:
        file = targets_file(run_folder)
        file.parent.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):  # another user's, of whom this one shares the folder of runs
            file.parent.chmod(0o755)  # addresses are no secrets, and Prometheus may be another user's
        self._file = Kept(file, tell, mode=0o644)
        self._run_id = run_id
        self._known = {
            plan.name: (plan.service, f"{plan.address[0]}:{plan.address[1]}")
            for plan in plans
            if plan.address is not None and plan.service != PROMETHEUS
        }
        self._leaving: set[str] = set()
        self._write()

    def update(self, replicas: Iterable[ReplicaView]) -> None:
        """Take the addresses that heartbeats tell, and give up those of replicas that were drained."""
        there = {replica.replica: replica for replica in replicas}
        told = {name: (replica.service, replica.address) for name, replica in there.items() if replica.address}
        left = self._leaving - set(there)
        known = {name: address for name, address in (self._known | told).items() if name not in left}
        self._leaving = {name for name, replica in there.items() if replica.cordon == Word.DRAINING}
        if known != self._known:
            self._known = known
            self._write()

    def _write(self) -> None:
        groups = [
            {"targets": [address], "labels": {"run": self._run_id, "service": service, "instance": name}}
            for name, (service, address) in sorted(self._known.items())
        ]
        self._file.write(json.dumps(groups, indent=2) + "\n")

    async def run(self) -> None:
        """Write what could not be written when it changed, until cancelled."""
        await self._file.run()
