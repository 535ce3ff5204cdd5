"""Laws of `penstock doctor --cluster`: one sentence for each fault of a release. A program stands for kubectl; what it
runs "in a pod" are the real checks.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.services.cli.__main__ import main
from penstock.shared.errors import PenstockError
from penstock.shared.preflight import node
from penstock.shared.preflight.finding import failed
from penstock.shared.preflight.release import Kubectl
from tests.conftest import PATIENCE_S, Server
from tests.support.chart import ROOT

Json = dict[str, Any]
KUBECTL = """#!{python}
import json, pathlib, subprocess, sys
words = sys.argv[1:]
assert words[:2] == ["--namespace", "research"], words
if words[2] == "get":
    print((pathlib.Path(__file__).parent / (words[3] + ".json")).read_text())
else:
    command = [word.replace("/etc/penstock/run.toml", {config!r}).replace("/var/penstock/runs", {runs!r}) for word in words[5:]]
    command[0] = {{"python": sys.executable}}.get(command[0], command[0])
    sys.exit(subprocess.run(command).returncode)
"""


def pod(role: str, *, ready: bool = False, **status: Any) -> Json:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    volumes = [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}]
    return {
        "metadata": {"name": f"my-run-penstock-{role}-0", "labels": {"app.kubernetes.io/component": role}},
        "spec": {"volumes": volumes if role != "reward" else []},
        "status": {"phase": "Running" if ready else "Pending", "conditions": conditions, **status},
    }


def event(role: str, reason: str, message: str) -> Json:
    return {"involvedObject": {"name": f"my-run-penstock-{role}-0"}, "reason": reason, "message": message}


def doctor(
    folder: Path, pods: Sequence[Json], events: Sequence[Json] = (), bus: str = "unix:///missing"
) -> tuple[int, str]:
    for kind, items in (("pods", pods), ("events", events)):
        (folder / f"{kind}.json").write_text(json.dumps({"items": items}))
    config = folder / "run.toml"
    config.write_text(f'run.id = "r"\nbus.url = "{bus}"\n')
    (folder / "runs").mkdir(exist_ok=True)
    program = folder / "kubectl"
    program.write_text(KUBECTL.format(python=sys.executable, config=str(config), runs=str(folder / "runs")))
    program.chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "penstock.services.cli",
        "doctor",
        "--cluster",
        "my-run",
        "--namespace",
        "research",
    ]
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "COLUMNS": "400"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("pods", "events", "sentence"),
    [
        (
            [pod("rollout")],
            [
                event(
                    "rollout",
                    "FailedAttachVolume",
                    'Multi-Attach error for volume "runs" Volume is already used by pod(s) trainer-0',
                )
            ],
            'FAIL my-run-penstock-rollout-0: expected the pod to start, found Multi-Attach error for volume "runs" Volume is already used by '
            "pod(s) trainer-0: use storage.runs.accessMode = ReadWriteOnce for pods on one node, or a ReadWriteMany class",
        ),
        (
            [pod("trainer")],
            [event("trainer", "FailedScheduling", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")],
            "FAIL my-run-penstock-trainer-0: expected the pod to start, found 0/3 nodes are available: 3 Insufficient nvidia.com/gpu: free or "
            "add nodes with what the pod requests, or change resources, gpu, nodeSelector or tolerations",
        ),
        (
            [
                pod(
                    "trainer",
                    initContainerStatuses=[
                        {
                            "name": "preflight",
                            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                            "lastState": {
                                "terminated": {
                                    "exitCode": 1,
                                    "message": "driver: expected a driver, found none: add one\n",
                                }
                            },
                        }
                    ],
                )
            ],
            [],
            "FAIL my-run-penstock-trainer-0: driver: expected a driver, found none: add one",
        ),
        (
            [
                pod(
                    "reward",
                    containerStatuses=[{"name": "reward", "state": {"waiting": {"reason": "ImagePullBackOff"}}}],
                )
            ],
            [],
            "FAIL my-run-penstock-reward-0: expected the container reward to start, found ImagePullBackOff: check image.registry, image.tag "
            "and image.pullSecrets",
        ),
        (
            [],
            [],
            "FAIL release: expected pods of the release my-run, found none: check its name and namespace with helm list --all-namespaces",
        ),
    ],
)
def test_a_pod_that_does_not_start_is_one_sentence(
    tmp_path: Path, pods: Sequence[Json], events: Sequence[Json], sentence: str
) -> None:
    assert doctor(tmp_path, pods, events) == (1, sentence + "\n")


def test_pods_that_run_are_checked_from_inside(tmp_path: Path, own_server: Server) -> None:
    ended = {"exitCode": 1, "message": "driver: expected a driver, found none"}
    replaced = pod(
        "trainer", phase="Failed", initContainerStatuses=[{"name": "preflight", "state": {"terminated": ended}}]
    )
    pods = [pod("coordinator", ready=True), replaced, pod("trainer", ready=True)]
    status, said = doctor(tmp_path, pods, bus=own_server.url)
    assert status == 1, said
    lines = {line.partition(":")[0] for line in said.splitlines()}
    assert lines == {
        f"{mark} {check} in my-run-penstock-{role}-0"
        for role in ("coordinator", "trainer")
        for mark, checks in (("ok  ", ("settings", "bus", "replicas", "clock", "volume")), ("FAIL", ("maxmemory",)))
        for check in checks
    } | {"ok   shm in my-run-penstock-trainer-0"}
    assert not list((tmp_path / "runs").iterdir())


def test_a_refusal_of_kubectl_is_its_sentence_without_its_log(tmp_path: Path) -> None:
    program = tmp_path / "kubectl"
    program.write_text(
        '#!/bin/sh\necho "E1123 03:33:18.6 7593 memcache.go:265] noise" >&2\necho "the server refused" >&2\nexit 1\n'
    )
    program.chmod(0o755)
    with pytest.raises(PenstockError) as refused:
        Kubectl(program=str(program)).objects("pods")
    assert str(refused.value) == (
        "expected kubectl get to succeed, found: the server refused: check your context and namespace"
    )


def test_a_laptop_without_a_gpu_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = failed("driver", "a driver", "none", "install one")
    monkeypatch.setattr(node, "driver", lambda: missing)
    monkeypatch.setattr(node, "_DEVICE", str(tmp_path / "nvidiactl"))
    assert main(["doctor"]) == 0
    assert "ok   driver: no NVIDIA GPU: models run on the CPU" in capsys.readouterr().out
    (tmp_path / "nvidiactl").touch()
    assert main(["doctor"]) == 1
    assert "FAIL driver: expected a driver" in capsys.readouterr().out
