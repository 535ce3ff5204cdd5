"""Scale the run's workloads to zero once it is over, so that it holds no GPU (``run.onFinish`` of the Helm chart).

::

    records complete ──▶ the trainer's copies are stored ──▶ PATCH …/scale {"spec": {"replicas": 0}}, each until it succeeds

KEDA would restore its minimum, so its ScaledObjects are deleted first: who may change one may scale any workload with it.

Helm creates them and scales the workloads up again when a longer run is deployed, while coordinators of the old pod template, one after
the other, still lead and count the run as over. The ledger therefore notes which template has released it.
"""

import asyncio
import dataclasses
import http
import logging
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.services.coordinator.run.notices import notice
from penstock.services.coordinator.schemas.run import NoticeView
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat
from penstock.shared.errors import PenstockError
from penstock.shared.http.answer import Answer, NoHttpAnswer
from penstock.shared.http.client import HttpClient
from penstock.shared.process.telemetry import tell

log = logging.getLogger(__name__)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Token, namespace and certificate authority, which Kubernetes mounts."""
_LOOK_S = 1.0
_TIMEOUT_S = 10.0
_MERGE = "application/merge-patch+json"


class ReleaseFailed(PenstockError):
    """The Kubernetes API did not scale an object."""


class KubernetesScale:
    """Client of the API server of this pod's cluster; one connection per request, with the current token."""

    def __init__(self, environment: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> None:
        self._environment = environment
        self._account = account

    async def scale(self, target: str) -> None:
        """Scale ``target``, group/version/resource/name or …=replicas, to zero or to that number.

        A ScaledObject is deleted. What does not exist is done.

        Raises:
            ReleaseFailed: with the reason.
        """
        group, version, resource, last = target.split("/")
        name, _, replicas = last.partition("=")
        try:
            path = f"/apis/{group}/{version}/namespaces/{self._read('namespace')}/{resource}/{name}"
            if resource == "scaledobjects":
                answer = await self._request("DELETE", path)
            else:
                answer = await self._request("PATCH", f"{path}/scale", {"spec": {"replicas": int(replicas or 0)}})
        except (OSError, KeyError, NoHttpAnswer) as error:
            raise ReleaseFailed(f"could not scale {resource}/{name} to {replicas or 'zero'}: {error!r}") from error
        if not answer.is_success and answer.status != http.HTTPStatus.NOT_FOUND:
            said = " ".join(answer.text().split())[:300]
            raise ReleaseFailed(f"could not scale {resource}/{name} to {replicas or 'zero'}: {answer.status} {said}")

    async def _request(self, method: str, path: str, body: Mapping[str, Mapping[str, int]] | None = None) -> Answer:
        host, port = self._environment["KUBERNETES_SERVICE_HOST"], self._environment["KUBERNETES_SERVICE_PORT"]
        address = f"[{host}]" if ":" in host else host
        trust = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        headers = {"Authorization": f"Bearer {self._read('token')}", "Content-Type": _MERGE}
        async with HttpClient(verify=trust, timeout_s=_TIMEOUT_S, trust_env=False) as client:
            given: dict[str, Any] = {} if body is None else {"json": body}
            return await client.ask(method, f"https://{address}:{port}{path}", headers=headers, **given)

    def _read(self, name: str) -> str:
        return (self._account / name).read_text(encoding="utf-8").strip()


@dataclasses.dataclass(eq=False)
class Release:
    """The leader's loop."""

    bus: Bus
    ledger: Ledger
    targets: Sequence[str]
    """What to scale, in this order; at last this coordinator's own Deployment, if another is to take over."""
    beats: Callable[[], Sequence[Heartbeat]]
    steps: int
    cluster: KubernetesScale = dataclasses.field(default_factory=KubernetesScale)
    pod_template: str = ""
    """Empty: not known."""
    _released: set[str] = dataclasses.field(default_factory=set, init=False)
    _trouble: str = dataclasses.field(default="", init=False)

    async def run(self) -> None:
        while self.targets:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Scale down whatever is due, once."""
        status = await self.ledger.status()
        if not status.is_over(self.steps):
            self._released.clear()
            return
        if self.pod_template and status.released == self.pod_template:
            return
        storing = any(beat.service == "trainer" and not beat.values.get("stored") for beat in self.beats())
        due = [] if storing else [target for target in self.targets if target not in self._released]
        troubles = await self._scale_all(due)
        if troubles and troubles[0] != self._trouble:
            log.warning("GPUs are not released", extra={"error": troubles[0]})
        self._trouble = next(iter(troubles), "")
        if due and not troubles:
            await self.ledger.note_released(self.pod_template)
            await tell(self.bus, "coordinator", "workloads released", f"scaled: {', '.join(due)}")

    def notices(self) -> list[NoticeView]:
        """Return why GPUs are still held, if they are."""
        if not self._trouble:
            return []
        text = f"{self._trouble}: the coordinator tries again; `helm uninstall` frees the GPUs too"
        return [notice("release", "error", text)]

    async def _scale_all(self, targets: Sequence[str]) -> list[str]:
        troubles = []
        for target in targets:
            if trouble := await self._scale(target):
                troubles.append(trouble)
                if "=" in target:  # without its successor, this coordinator stays
                    break
        return troubles

    async def _scale(self, target: str) -> str:
        try:
            await self.cluster.scale(target)
        except ReleaseFailed as error:
            return str(error)
        self._released.add(target)
        return ""
