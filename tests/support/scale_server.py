"""An HTTPS API server that scales workloads for one pod's ServiceAccount, as strictly as Kubernetes does.

It checks the token, the Role's rules, the content type and the body, and records what it was asked. Objects are those of
a rendered release. It stands for an API server: none was available.
"""

import datetime
import ipaddress
import json
import re
import ssl
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.chart import Json, Release

TOKEN = "token-of-the-pod"
KINDS = {
    "deployments": ("apps/v1", "Deployment"),
    "statefulsets": ("apps/v1", "StatefulSet"),
    "leaderworkersets": ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
    "scaledobjects": ("keda.sh/v1alpha1", "ScaledObject"),
}
_PATH = re.compile(r"/apis/([^/]+/[^/]+)/namespaces/([^/]+)/([^/]+)/([^/]+?)(/scale)?")


class ScaleServer:
    """Listens on 127.0.0.1 until closed; ``account`` is the folder that a pod of ``namespace`` would have mounted."""

    def __init__(self, release: Release, namespace: str, folder: Path) -> None:
        self.release, self.namespace = release, namespace
        self.patched: list[str] = []
        self.failures: list[int] = []
        """Statuses of the next answers."""
        self.account = folder / "account"
        self.account.mkdir()
        key = _certificate(folder, self.account / "ca.crt")
        (self.account / "token").write_text(TOKEN)
        (self.account / "namespace").write_text(namespace)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.account / "ca.crt", key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        host, port = self._server.server_address[:2]
        return {"KUBERNETES_SERVICE_HOST": str(host), "KUBERNETES_SERVICE_PORT": str(port)}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, headers: Json, body: bytes) -> tuple[int, Json]:
        if self.failures:
            return _status(self.failures.pop(0), "ServerTimeout")
        if headers["authorization"] != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        match = _PATH.fullmatch(path)
        if match is None or (match[3] == "scaledobjects") == bool(match[5]) or KINDS[match[3]][0] != match[1]:
            return _status(404, "NotFound")
        if not self._allows(method, match):
            return _status(403, "Forbidden")
        if method == "DELETE":
            return self._delete(match)
        if headers["content-type"] != "application/merge-patch+json":
            return _status(415, "UnsupportedMediaType")
        return self._patch(match, json.loads(body))

    def _allows(self, method: str, match: re.Match[str]) -> bool:
        """Whether a Role that is bound to the coordinator's account allows the request."""
        (binding,) = self.release.of("RoleBinding")
        (role,) = [
            role_manifest
            for role_manifest in self.release.of("Role")
            if role_manifest["metadata"]["name"] == binding["roleRef"]["name"]
        ]
        account = {"kind": "ServiceAccount", "name": "demo-penstock-coordinator", "namespace": self.namespace}
        resource = match[3] + (match[5] or "")
        return (
            match[2] == self.namespace
            and binding["subjects"] == [account]
            and any(
                match[1].split("/")[0] in rule["apiGroups"]
                and resource in rule["resources"]
                and match[4] in rule["resourceNames"]
                and method.lower() in rule["verbs"]
                for rule in role["rules"]
            )
        )

    def _of(self, match: re.Match[str]) -> list[Json]:
        version, kind = KINDS[match[3]]
        return [
            manifest
            for manifest in self.release.objects
            if (manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]) == (version, kind, match[4])
        ]

    def _delete(self, match: re.Match[str]) -> tuple[int, Json]:
        kept = [manifest for manifest in self.release.objects if manifest not in self._of(match)]
        if len(kept) == len(self.release.objects):
            return _status(404, "NotFound")
        object.__setattr__(self.release, "objects", kept)
        self.patched.append(f"{match[3]}/{match[4]}")
        return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _patch(self, match: re.Match[str], body: Json) -> tuple[int, Json]:
        scaled = self._of(match)
        if not scaled:
            return _status(404, "NotFound")
        if (
            list(body) != ["spec"]
            or list(body["spec"]) != ["replicas"]
            or not isinstance(body["spec"]["replicas"], int)
        ):
            return _status(422, "Invalid")
        scaled[0]["spec"]["replicas"] = body["spec"]["replicas"]
        self.patched.append(f"{match[3]}/{match[4]}")
        scale = {"apiVersion": "autoscaling/v1", "kind": "Scale", "spec": body["spec"], "status": {"replicas": 1}}
        return 200, scale


def _handler(fake: ScaleServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, answer = fake.answer(self.command, self.path, {"authorization": "", **headers}, body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _do  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def _status(code: int, reason: str) -> tuple[int, Json]:
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}


def _certificate(folder: Path, certificate: Path, names: Sequence[str] = ("127.0.0.1",)) -> Path:
    """Write a self-signed ``certificate`` of ``names``; return the file of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.datetime.now(datetime.UTC)
    alternatives = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(name)) for name in names])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(alternatives, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private = folder / "key.pem"
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    private.write_bytes(key.private_bytes(*form))
    return private
