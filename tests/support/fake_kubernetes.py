"""A small Kubernetes API server for Helm: version, discovery and objects.

It stores objects without validation, which is left to ``tests/deploy/test_chart.py``. Tests choose its API groups and
version.
"""

import base64
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

Json = dict[str, Any]

KINDS: Mapping[str, Mapping[str, str]] = {
    "v1": {
        "ConfigMap": "configmaps",
        "PersistentVolumeClaim": "persistentvolumeclaims",
        "Pod": "pods",
        "Secret": "secrets",
        "Service": "services",
        "ServiceAccount": "serviceaccounts",
    },
    "apps/v1": {"Deployment": "deployments", "StatefulSet": "statefulsets"},
    "batch/v1": {"Job": "jobs"},
    "rbac.authorization.k8s.io/v1": {"Role": "roles", "RoleBinding": "rolebindings"},
    "autoscaling/v2": {"HorizontalPodAutoscaler": "horizontalpodautoscalers"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
}
KEDA = {"keda.sh/v1alpha1": {"ScaledObject": "scaledobjects", "TriggerAuthentication": "triggerauthentications"}}
LEADER_WORKER_SET = {"leaderworkerset.x-k8s.io/v1": {"LeaderWorkerSet": "leaderworkersets"}}
JOB_SET = {"jobset.x-k8s.io/v1alpha2": {"JobSet": "jobsets"}}
EXTERNAL_METRICS: Mapping[str, Mapping[str, str]] = {"external.metrics.k8s.io/v1beta1": {}}
"""prometheus-adapter serves these; they cannot be created."""
OPERATOR = {"monitoring.coreos.com/v1": {"PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"}}

_OBJECT = re.compile(r"/(?:api|apis/[^/]+)/[^/]+/namespaces/[^/]+/[^/]+(/[^/]+)?")
"""A collection, or an object in it."""


class FakeKubernetes:
    """Listens on a free port of 127.0.0.1 until closed. ``version`` is the minor version of Kubernetes 1."""

    def __init__(self, version: int, more_kinds: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.kinds = {**KINDS, **(more_kinds or {})}
        self.version = version
        self.objects: dict[str, Json] = {}
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def kubeconfig(self) -> str:
        user = {"name": "test", "user": {}}
        cluster = {"name": "test", "cluster": {"server": f"http://127.0.0.1:{self._server.server_address[1]}"}}
        context = {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "research"}}
        text: str = yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [cluster],
                "users": [user],
                "contexts": [context],
                "current-context": "test",
            }
        )
        return text

    # ---------------------------------------------------------------- answers

    def answer(self, method: str, path: str, body: Json | None) -> tuple[int, Json]:
        if _OBJECT.fullmatch(path):
            with self._lock:
                return self._object(method, path, body)
        return self._discovery(path)

    def _object(self, method: str, path: str, body: Json | None) -> tuple[int, Json]:
        if method == "POST":
            assert body is not None
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return _status(409, "AlreadyExists")
        elif method == "GET" and not _OBJECT.fullmatch(path)[1]:  # type: ignore[index]  # as in `answer`
            items = [_ended(item) for name, item in self.objects.items() if name.rpartition("/")[0] == path]
            return 200, {"kind": "List", "apiVersion": "v1", "items": items}
        elif path not in self.objects:
            return _status(404, "NotFound")
        if method == "DELETE":
            return 200, self.objects.pop(path)
        if method == "PATCH":
            assert body is not None
            body = _merged(self.objects[path], body)
        if body is not None:
            self.objects[path] = _with_data(body)
        return (201 if method == "POST" else 200), self.objects[path]

    def _discovery(self, path: str) -> tuple[int, Json]:
        if path == "/version":
            number = {"major": "1", "minor": str(self.version), "gitVersion": f"v1.{self.version}.0"}
            return 200, {**number, "platform": "linux/amd64"}
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": self._groups()}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version in self.kinds:
            return 200, {"kind": "APIResourceList", "groupVersion": version, "resources": self._resources(version)}
        return _status(404, "NotFound")

    def _groups(self) -> list[Json]:
        groups = []
        for version in self.kinds:
            group, slash, number = version.partition("/")
            if slash:
                listed = {"groupVersion": version, "version": number}
                groups.append({"name": group, "versions": [listed], "preferredVersion": listed})
        return groups

    def _resources(self, version: str) -> list[Json]:
        verbs = ["create", "delete", "get", "list", "patch", "update"]
        return [
            {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
            for kind, plural in self.kinds[version].items()
        ]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # headers and body are two writes

            def _do(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                body = None if self.command in ("DELETE", "GET") else body
                status, answer = fake.answer(self.command, self.path.partition("?")[0], body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _do  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


def _status(code: int, reason: str) -> tuple[int, Json]:
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}


def _ended(item: Json) -> Json:
    """Say that a JobSet or Job has ended, if its class of Kueue's priorities is called so."""
    ended = item["metadata"].get("labels", {}).get("kueue.x-k8s.io/priority-class") == "ended"
    conditions = {"Job": "Failed", "JobSet": "Completed"}
    return {**item, "status": {"conditions": [{"type": conditions[item["kind"]], "status": "True"}]}} if ended else item


def _with_data(body: Json) -> Json:
    """Move a secret's ``stringData`` to ``data`` in base64, like an API server."""
    texts = body.get("stringData", {})
    data = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
    return {**body, "data": {**body.get("data", {}), **data}} if texts else body


def _merged(old: Json, new: Json) -> Json:
    """Merge ``new`` over ``old``, replacing lists: close enough to a strategic merge."""
    merged = dict(old)
    for key, value in new.items():
        if key.startswith("$"):
            continue
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = value
    return merged
