"""Laws of pools of replicas, of claims, of models that the release brings itself, and of the checks before a model is loaded."""

import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chart import ALL_CRDS, GPU, Json, environment, labels, play, refusal, render, template_of, values

pytestmark = pytest.mark.usefixtures("helm")
POOLS: list[Json] = [
    {"name": "reserved", "replicas": 2, "gpu": {"count": 2, "product": "NVIDIA-H100"}},
    {
        "name": "spot",
        "gpu": {"product": "NVIDIA-L40S"},
        "nodeSelector": {"pool": "spot"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "engine": {"gpu_memory_utilization": 0.8, "quantization": "fp8"},
        "autoscaling": {"enabled": True, "maxReplicas": 8, "entriesPerReplica": 64},
    },
]
MODELS = ["hf://Qwen/Qwen3-8B@main", "s3://team/models/judge", "pvc://weights/reward"]


def pooled() -> Json:
    run = {"config": values()["run"]["config"], "kind": "workloads"}
    return values(run=run, rollout={"pools": POOLS, "autoscaling": {"entriesPerReplica": 256}})


def test_each_pool_has_its_own_nodes_engine_and_size() -> None:
    release = render(pooled(), crds=ALL_CRDS)
    reserved, spot = release.of("Deployment", "rollout")
    assert [pool["metadata"]["name"] for pool in (reserved, spot)] == [
        "demo-penstock-rollout-reserved",
        "demo-penstock-rollout-spot",
    ]
    assert [pool["spec"].get("replicas") for pool in (reserved, spot)] == [2, None]
    pods = [template_of(pool)["spec"] for pool in (reserved, spot)]
    assert [pod["nodeSelector"] for pod in pods] == [
        {"nvidia.com/gpu.product": "NVIDIA-H100", "kubernetes.io/arch": "amd64"},
        {"nvidia.com/gpu.product": "NVIDIA-L40S", "kubernetes.io/arch": "amd64", "pool": "spot"},
    ]
    containers = [pod["containers"][0] for pod in pods]
    assert [container["resources"]["limits"][GPU] for container in containers] == [2, 1]
    assert {pod["serviceAccountName"] for pod in pods} == {"demo-penstock-rollout"}
    engine = {
        name: value
        for name, value in environment(containers[1]).items()
        if name.startswith("PENSTOCK__ROLLOUT__VLLM__")
    }
    assert engine == {
        "PENSTOCK__ROLLOUT__VLLM__GPU_MEMORY_UTILIZATION": "0.8",
        "PENSTOCK__ROLLOUT__VLLM__QUANTIZATION": "fp8",
    }


def test_no_workload_or_budget_of_a_pool_selects_pods_of_another_and_policies_select_all() -> None:
    release = render(pooled(), crds=ALL_CRDS)
    pods = [labels(template_of(deployment)) for deployment in release.of("Deployment", "rollout")]
    for kind in ("Deployment", "PodDisruptionBudget"):
        for number, manifest in enumerate(release.of(kind, "rollout")):
            selected_labels = manifest["spec"]["selector"]["matchLabels"].items()
            assert [selected_labels <= pod.items() for pod in pods] == [number == 0, number == 1]
    selected_labels = release.one("NetworkPolicy", "rollout")["spec"]["podSelector"]["matchLabels"].items()
    assert all(selected_labels <= pod.items() for pod in pods)


def test_a_pool_s_name_leaves_room_for_those_of_its_pods_however_long_its_parts_are() -> None:
    scaling = {"enabled": True, "minReplicas": 0, "maxReplicas": 1000}
    pools = [{"name": f"{letter}" * 20, "nodes": 2, "autoscaling": scaling} for letter in "ab"]
    config = values()["run"]["config"] + "\n[rollout.vllm]\ntensor_parallel_size = 2\n"
    long = values(run={"config": config}, rollout={"pools": pools, "nodes": 2}, fullnameOverride="p" * 40)
    release = render(long, crds=ALL_CRDS)
    names = [group["metadata"]["name"] for group in release.of("LeaderWorkerSet")]
    assert len(set(names)) == 2
    assert all(len(f"{name}-999") <= 52 for name in names)  # the StatefulSet of a group
    assert [scaled["spec"]["scaleTargetRef"]["name"] for scaled in release.of("ScaledObject")] == names
    (coordinator,) = template_of(release.workload("coordinator"))["spec"]["containers"]
    released = json.loads(environment(coordinator)["PENSTOCK__INTERNAL__RELEASE"])
    assert set(names) <= {target.rpartition("/")[2] for target in released}


@given(entries=st.integers(0, 3000))
@settings(max_examples=200)
def test_pools_are_filled_in_their_order(scaled: Json, entries: int) -> None:
    """The reserved pool holds 2 × 256 entries; the others need spot replicas of 64 each."""
    advanced = scaled["advanced"]["scalingModifiers"]
    match = re.fullmatch(r"max\(prompts \+ eval_prompts - (\d+), 0\)", advanced["formula"])
    assert match is not None
    assert advanced["metricType"] == "AverageValue"
    rest = max(entries - int(match[1]), 0)
    replicas = min(math.ceil(rest / int(advanced["target"])), scaled["maxReplicaCount"])
    assert replicas == min(8, max(0, math.ceil((entries - 512) / 64)))


@pytest.fixture(scope="module")
def scaled(helm: None) -> Json:
    (scaled_object,) = render(pooled(), crds=ALL_CRDS).of("ScaledObject", "rollout")
    spec: Json = scaled_object["spec"]
    assert spec["scaleTargetRef"]["name"] == "demo-penstock-rollout-spot"
    return spec


def test_keda_reaches_the_bus_where_only_a_pool_is_scaled() -> None:
    release = render(pooled(), crds=ALL_CRDS)
    (rule,) = release.one("NetworkPolicy", "bus")["spec"]["ingress"]
    keda = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "keda-operator"}}}
    assert keda in rule["from"]


def test_a_pool_that_follows_the_backlog_needs_keda() -> None:
    assert (
        "expected KEDA for rollout.pools with autoscaling, found no keda.sh/v1alpha1 in this cluster: install KEDA, or set "
        "autoscaling.enabled of pool spot to false"
    ) in refusal(
        values(rollout={"pools": [{**POOLS[1], "autoscaling": {"enabled": True, "minReplicas": 1}}]}),
        crds={"external.metrics.k8s.io/v1beta1": {}},
    )


def test_models_are_downloaded_by_one_job_and_awaited_by_those_who_read_them() -> None:
    release = render(values(models=MODELS, modelCache={"tokenSecret": "hub"}))
    (job,) = release.of("Job")
    (downloading,) = template_of(job)["spec"]["containers"]
    fetch = ["python", "-m", "penstock.shared.model.fetch"]
    assert downloading["command"] == [*fetch, "--into", "/var/penstock/models", *MODELS[:2]]
    assert environment(downloading)["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    for role, pod in release.pods():
        waiting = [
            container["command"] for container in pod["spec"].get("initContainers", ()) if container["name"] == "models"
        ]
        reads = role in ("rollout", "trainer")
        assert waiting == ([[*fetch, "--wait", "--into", "/var/penstock/models", *MODELS[:2]]] if reads else [])
        (container,) = pod["spec"]["containers"]
        mounts = {mount["mountPath"]: mount for mount in container.get("volumeMounts", ())}
        variables = environment(container) if "env" in container else {}
        assert (variables.get("HF_HUB_OFFLINE") == "1") is reads
        assert ("/var/penstock/claims/weights" in mounts) is reads
        if reads:
            assert mounts["/var/penstock/models"]["readOnly"]
            assert mounts["/var/penstock/cache"]["subPath"] == f"compiled/{role}"
        assert "HF_TOKEN" not in variables or role == "models"


def test_only_the_job_reaches_the_hub() -> None:
    release = render(values(models=MODELS, modelCache={"s3": {"endpoint": "https://store.example.org:9000"}}))
    open_to_all = {
        labels(policy)["app.kubernetes.io/component"]: rule["ports"]
        for policy in release.of("NetworkPolicy")
        for rule in policy["spec"].get("egress", ())
        if "to" not in rule
    }
    assert open_to_all == {"models": [{"port": 443}, {"port": 9000}]}


def test_the_job_of_models_and_the_check_run_where_defaults_say_and_the_job_may_have_the_trainer_s_role() -> None:
    placed: Json = {
        "nodeSelector": {"pool": "penstock"},
        "tolerations": [{"key": "team", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "priorityClassName": "research",
    }
    release = render(values(models=MODELS, defaults=placed))
    placed["nodeSelector"] = {"pool": "penstock", "kubernetes.io/arch": "amd64"}
    (job,) = release.of("Job")
    (check,) = (hook for hook in release.hooks if hook["kind"] == "Pod")
    for spec in (template_of(job)["spec"], check["spec"]):
        assert {key: spec[key] for key in placed} == placed
    assert template_of(job)["spec"]["serviceAccountName"] == "demo-penstock-trainer"
    (elsewhere,) = render(values(models=MODELS)).of("Job")
    assert elsewhere["metadata"]["name"] != job["metadata"]["name"]  # as a Job cannot be changed
    keyed = render(values(models=MODELS, modelCache={"s3": {"existingSecret": "keys"}}))
    assert template_of(keyed.of("Job")[0])["spec"]["serviceAccountName"] == "demo-penstock-models"
    accounts = [{account["metadata"]["name"] for account in either.of("ServiceAccount")} for either in (release, keyed)]
    assert accounts[1] - accounts[0] == {"demo-penstock-models"}


@pytest.mark.parametrize("source", ["oci://registry.example.org/model", "Qwen/Qwen3-8B", "hf://Qwen", "hf://a/b;rm"])
def test_another_kind_of_model_source_is_refused(source: str) -> None:
    assert (
        "expected models as hf://owner/name@revision, s3://bucket/prefix or pvc://claim/path, found "
        f'"{source}": change `models`; an image of a registry (oci://) can be mounted with extraVolumes'
    ) in refusal(values(models=[source])).replace("\\", "")


def test_models_on_a_volume_of_one_node_need_a_run_on_one_node() -> None:
    cache = {"accessMode": "ReadWriteOnce"}
    assert "expected modelCache.accessMode = ReadWriteMany, found ReadWriteOnce" in refusal(
        values(models=MODELS, modelCache=cache)
    )
    release = render(values(models=MODELS, modelCache=cache, storage={"runs": {"accessMode": "ReadWriteOnce"}}))
    (job,) = release.of("Job")
    (term,) = template_of(job)["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchExpressions"][0]["values"] == ["trainer"]
    assert {"key": GPU, "operator": "Exists", "effect": "NoSchedule"} in template_of(job)["spec"]["tolerations"]
    run = {"config": values()["run"]["config"], "kind": "pod"}
    alone = render(values(models=MODELS, modelCache=cache, storage={"runs": {"accessMode": "ReadWriteOnce"}}, run=run))
    (job,) = (job for job in alone.of("Job") if job["metadata"]["name"].startswith("demo-penstock-models"))
    (term,) = template_of(job)["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchExpressions"][0]["values"] == ["pod"]


def test_a_pod_with_gpus_checks_its_node_first_as_the_service_would_find_it() -> None:
    release = render(values(trainer={"rdma": {"resource": "rdma/hca"}}, fabric={"require": "rdma"}))
    for role, pod in release.pods():
        checks = [container for container in pod["spec"].get("initContainers", ()) if container["name"] == "preflight"]
        (container,) = pod["spec"]["containers"]
        gpus = GPU in container["resources"]["limits"]
        assert len(checks) == int(gpus)
        for check in checks:
            rdma = ["--rdma"] if role == "trainer" else []
            assert check["command"] == ["python", "-m", "penstock.shared.preflight", "--gpu", *rdma]
            for key in ("image", "resources", "securityContext"):
                assert check[key] == container[key]
    trainer = environment(template_of(release.workload("trainer"))["spec"]["containers"][0])
    assert trainer["PENSTOCK__FABRIC__REQUIRE"] == "rdma"


def test_every_service_says_which_release_it_belongs_to() -> None:
    for role, pod in render(values()).pods():
        if role in ("coordinator", "rollout", "reward", "trainer"):
            assert environment(pod["spec"]["containers"][0])["PENSTOCK__INTERNAL__OWNER"] == "research/demo"


def test_an_existing_claim_that_one_node_mounts_is_refused_for_a_run_on_several() -> None:
    claim = {"existingClaim": "demo-penstock-runs"}
    _, refused = play(
        [
            values(storage={"runs": {"accessMode": "ReadWriteOnce"}}),
            values(storage={"runs": {**claim, "accessMode": "ReadWriteMany"}}),
        ]
    )
    assert (
        "expected the claim demo-penstock-runs to be ReadWriteMany, found ReadWriteOnce: pods on several nodes cannot mount it; name "
        "another claim, or set storage.runs.accessMode to ReadWriteOnce to keep the run on one node"
    ) in refused.error


def test_a_reward_pod_with_gpus_has_time_to_load_its_models() -> None:
    for own, seconds in (
        ({}, 300),
        ({"gpu": {"count": 1}}, 2700),
        ({"gpu": {"count": 1}, "startupSeconds": 5400}, 5400),
    ):
        workload = render(values(reward=own)).workload("reward")
        (container,) = template_of(workload)["spec"]["containers"]
        probe = container["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == seconds
        assert workload["spec"]["progressDeadlineSeconds"] == seconds + 600
