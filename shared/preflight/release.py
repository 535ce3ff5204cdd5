"""Checks of a Helm release through kubectl: pods that do not start, and checks inside of those that run."""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.shared.errors import PenstockError
from penstock.shared.preflight.finding import Finding, failed

Object = Mapping[str, Any]
_TIMEOUT_S = 60.0
_LOG_LINE = re.compile(r"[EWI]\d{4} ")
_MARK = "/var/penstock/runs/.preflight"
_CAUSES = (
    (
        "FailedAttachVolume",
        "Multi-Attach",
        "use storage.runs.accessMode = ReadWriteOnce for pods on one node, or a ReadWriteMany class",
    ),
    ("FailedMount", "", "check that the claim or secret exists, and that its storage class can mount it on this node"),
    (
        "FailedScheduling",
        "",
        "free or add nodes with what the pod requests, or change resources, gpu, nodeSelector or tolerations",
    ),
)
"""Reason of an event, a text in its message, and the fix."""
_WAITING = {
    "ImagePullBackOff": "check image.registry, image.tag and image.pullSecrets",
    "ErrImagePull": "check image.registry, image.tag and image.pullSecrets",
    "CreateContainerConfigError": "check that the secrets and config maps that it names exist",
}
_RUN = ("--config", "/etc/penstock/run.toml")
_CHECKS = {"coordinator": _RUN, "reward": _RUN, "rollout": _RUN, "trainer": (*_RUN, "--shm-mib", "64")}
"""Checks inside of each role's pod."""


class Kubectl:
    """The user's kubectl, in one namespace. Raises PenstockError: it is missing or refuses."""

    def __init__(self, namespace: str = "", program: str = "kubectl") -> None:
        self._command = [program, *(["--namespace", namespace] if namespace else [])]

    def __call__(self, *words: str, accepted: Sequence[int] = (0,)) -> str:
        """Return the output of a command."""
        try:
            done = subprocess.run(
                [*self._command, *words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except FileNotFoundError:
            raise PenstockError("expected kubectl, found none: install it, and choose your cluster's context") from None
        except subprocess.TimeoutExpired:
            raise PenstockError(
                f"expected an answer of the cluster, found none in {_TIMEOUT_S:g} s: check kubectl get pods"
            ) from None
        if done.returncode not in accepted:
            lines = [line for line in done.stderr.splitlines() if not _LOG_LINE.match(line)]
            sentence = " ".join(" ".join(lines).split())[:300] or f"exit status {done.returncode}"
            raise PenstockError(
                f"expected kubectl {words[0]} to succeed, found: {sentence}: check your context and namespace"
            )
        return done.stdout

    def objects(self, kind: str, *words: str) -> list[Object]:
        return list(json.loads(self("get", kind, *words, "--output", "json"))["items"])


def examine(kubectl: Kubectl, release: str) -> Iterator[Finding]:
    """Check the pods of ``release``, those that run from inside."""
    pods = kubectl.objects(
        "pods", "--selector", f"app.kubernetes.io/part-of=penstock,app.kubernetes.io/instance={release}"
    )
    if not pods:
        yield failed(
            "release",
            f"pods of the release {release}",
            "none",
            "check its name and namespace with helm list --all-namespaces",
        )
    events = kubectl.objects("events")
    replaced = {_place(pod) for pod in pods if _is_ready(pod)}
    for pod in pods:
        if pod["status"].get("phase") != "Failed" or _place(pod) not in replaced:
            yield from _stuck(pod, events)
    running = {_role(pod): _name(pod) for pod in pods if _is_ready(pod)}
    for role, name in running.items():
        if role in _CHECKS:
            yield from _asked(kubectl, name, _CHECKS[role])
    yield from _shared_volume(kubectl, {_role(pod): _name(pod) for pod in pods if _is_ready(pod) and _has_claim(pod)})


def _stuck(pod: Object, events: Sequence[Object]) -> Iterator[Finding]:
    name = _name(pod)
    if _is_ready(pod) or pod["status"].get("phase") == "Succeeded":
        return
    status = pod["status"]
    for container in [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]:
        waiting = container.get("state", {}).get("waiting", {}).get("reason", "")
        if waiting in _WAITING:
            yield failed(name, f"the container {container['name']} to start", waiting, _WAITING[waiting])
        for state in (container.get("state", {}), container.get("lastState", {})):
            ended = state.get("terminated", {})
            if ended.get("exitCode") and container["name"] == "preflight" and ended.get("message"):
                yield Finding(name, False, ended["message"].strip().splitlines()[-1])
                return
    own = [event for event in events if event["involvedObject"].get("name") == name]
    for reason, text, fix in _CAUSES:
        messages = [event["message"] for event in own if event["reason"] == reason and text in event["message"]]
        if messages:
            yield failed(name, "the pod to start", messages[-1].rstrip("."), fix)
            return


def _asked(kubectl: Kubectl, name: str, words: Sequence[str]) -> list[Finding]:
    """Run checks in a pod; exit status 1 means that one failed."""
    lines = kubectl(
        "exec", name, "--", "python", "-m", "penstock.shared.preflight", "--json", *words, accepted=(0, 1)
    ).splitlines()
    of_pod = [Finding(**json.loads(line)) for line in lines if line.startswith("{")]
    return [Finding(f"{finding.check} in {name}", finding.ok, finding.sentence) for finding in of_pod]


def _shared_volume(kubectl: Kubectl, running: Mapping[str, str]) -> Iterator[Finding]:
    """Check that coordinator and rollout see what the trainer writes."""
    if not {"trainer", "coordinator"} <= running.keys():
        return
    yield from _asked(kubectl, running["trainer"], ["--leave", _MARK])
    for role in ("coordinator", "rollout"):
        if role in running:
            yield from _asked(kubectl, running[role], ["--seen", _MARK])
    kubectl("exec", running["trainer"], "--", "rm", "-f", _MARK)


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def _role(pod: Object) -> str:
    return str(pod["metadata"]["labels"]["app.kubernetes.io/component"])


def _place(pod: Object) -> tuple[str, str]:
    """What the replacement of a Job's pod has too: its Job and index."""
    metadata = pod["metadata"]
    index = metadata.get("annotations", {}).get("batch.kubernetes.io/job-completion-index", "")
    return metadata["labels"].get("batch.kubernetes.io/job-name", ""), index


def _has_claim(pod: Object) -> bool:
    return any(volume["name"] == "runs" and "persistentVolumeClaim" in volume for volume in pod["spec"]["volumes"])


def _is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
