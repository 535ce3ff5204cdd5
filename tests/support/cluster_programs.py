"""Programs named ``helm`` and ``kubectl``, in place of those of a machine with a cluster.

``helm`` renders with real Helm (helm-sdkpy) against the small API server of ``fake_kubernetes`` and keeps what it rendered.
``kubectl`` answers from that, and forwards to the port in ``COORDINATOR_PORT``. Both note their command lines.
"""

import base64
import json
import os
import sys
import time
from pathlib import Path

import yaml

from tests.support.chart import ALL_CRDS, ROOT, Json, labels, play


def install(folder: Path) -> Path:
    """Write both programs to ``folder``, for PATH."""
    folder.mkdir()
    for name in ("helm", "kubectl"):
        path = folder / name
        path.write_text(
            f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m tests.support.cluster_programs {name} "$@"\n'
        )
        path.chmod(0o755)
    return folder


def calls(state: Path) -> list[str]:
    """Return the command lines so far."""
    return (state / "calls").read_text().splitlines()


def helm(state: Path, words: list[str]) -> None:
    if words[0] == "version":
        print(f'version.BuildInfo{{Version:"{os.environ.get("HELM_VERSION", "v4.0.4")}", GoVersion:"go1.25.0"}}')
    if words[:2] == ["get", "manifest"]:
        print(
            (state / "manifest.yaml").read_text()
            if (state / "manifest.yaml").exists()
            else sys.exit("Error: release: not found")
        )
    if words[0] != "upgrade":
        return
    assert words[1] == "demo", "which the player installs"
    steps = json.loads((state / "steps").read_text()) if (state / "steps").exists() else []
    steps.append(json.load(sys.stdin))
    release = play(steps, crds=ALL_CRDS, chart=Path(words[2]))[-1]
    if release.error:
        sys.exit(f"Error: {release.error}")
    if "--dry-run=server" not in words:
        (state / "manifest.yaml").write_text(release.manifest)
        (state / "steps").write_text(json.dumps(steps))
    print(f"NAME: demo\nMANIFEST:\n---\n{release.manifest}")


def kubectl(state: Path, words: list[str]) -> None:
    objects: list[Json] = list(yaml.safe_load_all((state / "manifest.yaml").read_text()))
    if words[:2] == ["get", "services"]:
        print(json.dumps({"items": [manifest for manifest in objects if manifest["kind"] == "Service"]}))
    elif words[:2] == ["get", "secret"]:
        (secret,) = [
            manifest
            for manifest in objects
            if manifest["kind"] == "Secret" and labels(manifest)["app.kubernetes.io/component"] == "api"
        ]
        print(base64.b64encode(secret["stringData"]["token"].encode()).decode(), end="")
    elif words[0] == "port-forward":
        if not os.environ.get("COORDINATOR_PORT"):
            sys.exit("error: unable to forward port because pod is not running. Current status=Pending")
        print(f"Forwarding from 127.0.0.1:{os.environ['COORDINATOR_PORT']} -> 8000", flush=True)
        time.sleep(3600)
    else:
        print("[pod/demo-penstock-trainer-0] a line of the log")


if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    place = Path(os.environ["CLUSTER_STATE"])
    with (place / "calls").open("a") as file:
        file.write(" ".join([program, *arguments]) + "\n")
    {"helm": helm, "kubectl": kubectl}[program](place, arguments)
