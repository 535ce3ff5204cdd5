"""Every example's pods find nodes on simulated clusters, or the chart refuses it with a sentence."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import pytest

from tests.support.chart import (
    ALL_CRDS,
    CASES,
    EXAMPLES,
    GPU,
    TRACKED,
    Json,
    Release,
    labels,
    merged,
    refusal,
    render,
    template_of,
    values,
)

pytestmark = pytest.mark.usefixtures("helm")
HOST, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
ARCH = {"kubernetes.io/arch": "amd64"}
TAINT = {"key": GPU, "effect": "NoSchedule"}


@dataclasses.dataclass
class Node:
    name: str
    gpus: int
    labels: dict[str, str]
    taints: Sequence[Json] = ()
    pods: list["Pod"] = dataclasses.field(default_factory=list)

    @property
    def free_gpus(self) -> int:
        return self.gpus - sum(pod.gpus for pod in self.pods)


@dataclasses.dataclass
class Pod:
    role: str
    template: Json

    @property
    def spec(self) -> Json:
        spec: Json = self.template["spec"]
        return spec

    @property
    def gpus(self) -> int:
        return sum(int(container["resources"]["requests"].get(GPU, 0)) for container in self.spec["containers"])

    @property
    def claims(self) -> set[str]:
        volumes = self.spec.get("volumes", ())
        return {volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume}


def nodes_of(count: int) -> list[Node]:
    """One untainted node with GPUs, or one without and tainted ones with GPUs of both kinds of pool."""
    if count == 1:
        return [Node("node-0", 8, {HOST: "node-0", ZONE: "a", **ARCH})]
    pools = itertools.cycle([("trainer", "NVIDIA-H200"), ("rollout", "NVIDIA-L40S")])
    gpu_nodes = [
        Node(
            f"node-{number}",
            8,
            {HOST: f"node-{number}", ZONE: "a", "pool": pool, f"{GPU}.product": product, **ARCH},
            [TAINT],
        )
        for number, (pool, product) in zip(range(1, count), pools, strict=False)
    ]
    return [Node("node-0", 0, {HOST: "node-0", ZONE: "a", **ARCH}), *gpu_nodes]


def pods_of(release: Release) -> Iterator[Pod]:
    """Yield pods as controllers create them; those without GPUs come first, which is the worst order."""
    made = []
    for owner in release.workloads():
        made += [Pod(labels(owner)["app.kubernetes.io/component"], template_of(owner))] * replicas_of(owner)
    yield from sorted(made, key=lambda pod: pod.gpus)


def replicas_of(owner: Json) -> int:
    spec = owner["spec"]
    match owner["kind"]:
        case "Job":
            return int(spec["completions"])
        case "LeaderWorkerSet":
            return int(spec["replicas"] * spec["leaderWorkerTemplate"]["size"])
    return int(spec.get("replicas", 1))


def place(pods: Sequence[Pod], nodes: Sequence[Node], one_node_claims: set[str]) -> list[Pod]:
    """Schedule ``pods`` until none fits; return those that stay pending."""
    pending = list(pods)
    while True:
        for pod, node in itertools.product(pending, nodes):
            if fits(pod, node, nodes, one_node_claims):
                node.pods.append(pod)
                pending.remove(pod)
                break
        else:
            return pending


def fits(pod: Pod, node: Node, nodes: Sequence[Node], one_node_claims: set[str]) -> bool:
    if pod.gpus > node.free_gpus or not pod.spec.get("nodeSelector", {}).items() <= node.labels.items():
        return False
    tolerated = pod.spec.get("tolerations", ())
    if any(not any(toleration["key"] == taint["key"] for toleration in tolerated) for taint in node.taints):
        return False
    for claim in pod.claims & one_node_claims:
        if any(claim in other.claims for another in nodes if another is not node for other in another.pods):
            return False  # Multi-Attach: the pod would be scheduled and wait for ever
    terms = (
        pod.spec.get("affinity", {}).get("podAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", ())
    )
    return all(beside(term, pod, node, nodes) for term in terms)


def beside(term: Json, pod: Pod, node: Node, nodes: Sequence[Node]) -> bool:
    """Whether a required term of pod affinity holds; the first pod that matches its own term may go anywhere."""
    others = [(holder, other) for holder in nodes for other in holder.pods if selects(term["labelSelector"], other)]
    if not others:
        return selects(term["labelSelector"], pod)
    key = term["topologyKey"]
    return any(holder.labels.get(key) == node.labels.get(key) for holder, _ in others)


def selects(selector: Json, pod: Pod) -> bool:
    own = pod.template["metadata"]["labels"]
    return selector["matchLabels"].items() <= own.items() and all(
        own[expression["key"]] in expression["values"] for expression in selector["matchExpressions"]
    )


@functools.cache
def rendered(name: str, access: str) -> Release:
    case = CASES[name]
    storage = {**case.get("storage", {}), "runs": {**case.get("storage", {}).get("runs", {}), "accessMode": access}}
    return render({**case, "storage": storage}, crds=ALL_CRDS)


@pytest.mark.parametrize("access", ["ReadWriteOnce", "ReadWriteMany"])
@pytest.mark.parametrize("count", [1, 2, 5, 9])
@pytest.mark.parametrize("name", ["one-gpu-node", "cpu-smoke"])
def test_the_examples_for_one_node_start_on_clusters_of_any_size(name: str, count: int, access: str) -> None:
    release, nodes = rendered(name, access), nodes_of(count)
    claims = {claim["metadata"]["name"] for claim in release.of("PersistentVolumeClaim")}
    one_node_claims = claims if access == "ReadWriteOnce" else set()
    assert len(claims) == 1
    assert not [pod.role for pod in place(list(pods_of(release)), nodes, one_node_claims)]
    if access == "ReadWriteOnce":
        (node,) = [node for node in nodes if any(pod.claims & claims for pod in node.pods)]
        assert {pod.role for pod in node.pods} >= {"coordinator", "trainer", "rollout"}


@pytest.mark.parametrize("name", ["external-redis", "object-storage", "two-pools", "two-nodes-per-engine"])
def test_the_other_examples_start_on_as_many_nodes_as_they_have_gpus_for(name: str) -> None:
    release = render(CASES[name], crds=ALL_CRDS)
    pods = list(pods_of(release))
    nodes = nodes_of(21)
    for node in nodes:
        node.labels.pop(f"{GPU}.product", None)
        for pod in pods:
            node.labels |= {key: value for key, value in pod.spec.get("nodeSelector", {}).items() if node.gpus}
    pools = [pod.spec.get("nodeSelector", {}) for pod in pods if pod.gpus]
    for number, node in enumerate(nodes[1:]):
        node.labels |= pools[number % len(pools)]
    assert not [pod.role for pod in place(pods, nodes, set())]


def test_a_trainer_that_starts_again_returns_to_the_node_of_its_volume() -> None:
    release, nodes = rendered("one-gpu-node", "ReadWriteOnce"), nodes_of(9)
    claims = {claim["metadata"]["name"] for claim in release.of("PersistentVolumeClaim")}
    place(list(pods_of(release)), nodes, claims)
    (home,) = [node for node in nodes if any(pod.role == "trainer" for pod in node.pods)]
    (trainer,) = [pod for pod in home.pods if pod.role == "trainer"]
    home.pods.remove(trainer)
    assert [node.name for node in nodes if fits(trainer, node, nodes, set())] == [home.name]


@pytest.mark.parametrize("count", [2, 5, 9])
@pytest.mark.parametrize("name", ["one-gpu-node", "cpu-smoke"])
def test_after_the_end_of_a_run_its_coordinators_and_tracker_find_another_node(name: str, count: int) -> None:
    case = merged(CASES[name], {"run": {"config": TRACKED}})
    release, nodes = render(case, crds=ALL_CRDS), nodes_of(count)
    nodes.append(Node("spare", 0, {HOST: "spare", ZONE: "a", **ARCH}))
    claims = {claim["metadata"]["name"] for claim in release.of("PersistentVolumeClaim")}
    pods = list(pods_of(release))
    assert not place(pods, nodes, claims)
    (home,) = [node for node in nodes if any(pod.role == "trainer" for pod in node.pods)]
    others = [node for node in nodes if node is not home]
    for node in nodes:  # the trainer is done, and the others' node is drained
        node.pods.clear()
    during = [pod for pod in pods if pod.role in ("coordinator", "tracking")]
    assert place(during, others, claims) == during
    own, resting = release.of("Deployment", "coordinator")
    after = [Pod("coordinator", template_of(resting))] * own["spec"]["replicas"]
    assert not place([*after, *(pod for pod in during if pod.role == "tracking")], others, claims)
    assert len([node for node in others if node.pods]) == 1


@pytest.mark.parametrize(
    "more", [{"trainer": {"nodes": 2}, "rollout": {"gpu": {"count": 2}}}, {"rollout": {"nodes": 2}}]
)
def test_a_volume_of_one_node_is_refused_where_pods_need_several(more: Json) -> None:
    config = values()["run"]["config"] + "\n[rollout.vllm]\ntensor_parallel_size = 2\n"
    storage = {"runs": {"accessMode": "ReadWriteOnce"}}
    error = refusal(values(storage=storage, run={"config": config}, **more), crds=ALL_CRDS)
    assert "expected storage.runs.accessMode = ReadWriteMany" in error
    assert "change the access mode, or use one node" in error


def test_affinity_of_the_users_stays_beside_that_of_the_fabric() -> None:
    term = {"topologyKey": ZONE, "labelSelector": {"matchLabels": {"app": "cache"}}}
    own = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    release = render(values(trainer={"affinity": own}, fabric={"topologyKey": "fabric"}))
    affinity = template_of(release.workload("trainer"))["spec"]["affinity"]["podAffinity"]
    required = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [rule["topologyKey"] for rule in required] == [ZONE, "fabric"]


def test_every_example_is_placed_here() -> None:
    tried = {"one-gpu-node", "cpu-smoke", "external-redis", "object-storage", "two-pools", "two-nodes-per-engine"}
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == tried
