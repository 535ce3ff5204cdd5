"""Prometheus targets of a run: ``runs/.metrics/<run id>.json``, in file_sd format (docs/operations.md, "Watch").

Outside the run folders, because file_sd allows patterns in a path's last part only. A replica that disappears stays,
for alerts; a drained one does not.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from penstock.services.client.views import ReplicaView
from penstock.services.up.plan import PROMETHEUS, ProcessPlan
from penstock.shared.bus.stores.replicas.cordon import Word
from penstock.shared.files.durable import UpdatedFile


def targets_file(run_folder: Path) -> Path:
    return run_folder.parent / ".metrics" / f"{run_folder.name}.json"


class Targets:
    def __init__(
        self, run_folder: Path, run_id: str, plans: Sequence[ProcessPlan], tell: Callable[[str], None]
    ) -> None:
        file = targets_file(run_folder)
        file.parent.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):  # the shared folder belongs to another user
            file.parent.chmod(0o755)  # not secret; read by other users
        self._file = UpdatedFile(file, tell, mode=0o644)
        self._run_id = run_id
        self._known = {
            plan.name: (plan.service, f"{plan.address[0]}:{plan.address[1]}")
            for plan in plans
            if plan.address is not None and plan.service != PROMETHEUS
        }
        self._leaving: set[str] = set()
        self._write()

    def update(self, replicas: Iterable[ReplicaView]) -> None:
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
        await self._file.run()
