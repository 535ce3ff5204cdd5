"""The chart, as real Helm renders it for clusters of several versions, with and without the CRDs that it can use."""

import functools
import itertools
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.coordinator.monitor import SHOWN, STREAM_ENTRIES
from shared.settings import load
from shared.streams import EVAL_PROMPTS, EVAL_ROLLOUTS, PROMPTS, ROLLOUTS, Keys
from tests.chart import (
    ALL_CRDS,
    CHART,
    EXAMPLES,
    NEWEST,
    OLDEST,
    ROOT,
    Json,
    Release,
    environment,
    labels,
    merged,
    play,
    play_all,
    refusal,
    render,
    template_of,
    values,
)
from tests.conftest import need, need_module
from tests.fake_kubernetes import EXTERNAL_METRICS, JOB_SET, KEDA, LEADER_WORKER_SET, OPERATOR

EVERYTHING: Json = {
    "executor": {"enabled": True, "runtimeClassName": "gvisor"},
    "commonLabels": {"team": "research"},
    "storage": {"data": {"existingClaim": "models"}},
    "bus": {"caSecret": "bus-ca"},
    "defaults": {
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"app.kubernetes.io/part-of": "penstock"}},
            }
        ],
        "extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    },
    "fabric": {"topologyKey": "fabric"},
    "image": {"pullSecrets": [{"name": "pull"}]},
}
CASES: Mapping[str, Json] = {
    "defaults": values(),
    **{path.stem: values(path.stem) for path in sorted(EXAMPLES.glob("*.yaml"))},
    "everything": values("two-pools", **EVERYTHING),
    "two-nodes-per-engine": values(
        "two-nodes-per-engine",
        run={"config": values()["run"]["config"] + "\n[rollout.vllm]\ntensor_parallel_size = 16\n"},
    ),
}
NEEDS_CRDS = ("two-pools", "everything", "two-nodes-per-engine")
GPU = "nvidia.com/gpu"
Kinds = Mapping[str, Mapping[str, str]]


@pytest.fixture(scope="module", autouse=True)
def _tools() -> None:
    need_module("helm_sdkpy", "helm-sdkpy")
    need_module("kubernetes_validate", "kubernetes-validate")


@pytest.fixture(scope="module")
def matrix(_tools: None) -> Mapping[tuple[str, int, bool], Release]:
    """Every case on the oldest and the newest cluster, with the CRDs and, where the case allows it, without."""
    found: dict[tuple[str, int, bool], Release] = {}
    for version, crds in itertools.product((OLDEST, NEWEST), (True, False)):
        names = [name for name in CASES if crds or name not in NEEDS_CRDS]
        played = play_all([[CASES[name]] for name in names], version=version, crds=ALL_CRDS if crds else None)
        found |= {(name, version, crds): release for name, (release,) in zip(names, played, strict=True)}
    assert not [release.error for release in found.values() if release.error]
    return found


@pytest.fixture(scope="module")
def releases(matrix: Mapping[tuple[str, int, bool], Release]) -> list[Release]:
    return list(matrix.values())


def everything(found: Release) -> list[Json]:
    return [*found.objects, *found.hooks]


# ---------------------------------------------------------------- schemas of Kubernetes and of the CRDs


def test_every_object_is_valid_for_the_cluster_it_was_rendered_for(
    matrix: Mapping[tuple[str, int, bool], Release], monkeypatch: pytest.MonkeyPatch
) -> None:
    import kubernetes_validate
    from kubernetes_validate import utils

    monkeypatch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))  # or read a file an object
    different = {
        (version, json.dumps(one, sort_keys=True))  # most objects are the same in every case
        for (_, version, _), release in matrix.items()
        for one in everything(release)
        if one["apiVersion"] not in ALL_CRDS and one["kind"] != "Secret"
    }
    assert len(different) > 100
    for version, text in different:
        kubernetes_validate.validate(json.loads(text), f"1.{version}", strict=True)
    for version in (OLDEST, NEWEST):
        kubernetes_validate.validate(
            matrix["defaults", version, True].one("Secret", "bus"), f"1.{version}", strict=True
        )


def test_every_custom_resource_is_one_of_its_crd(releases: list[Release]) -> None:
    need_module("cloudcoil", "cloudcoil-models-keda and cloudcoil-models-prometheus-operator")
    from cloudcoil.models.keda import v1alpha1 as keda
    from cloudcoil.models.prometheus_operator import v1 as operator

    models = {"ScaledObject": keda.ScaledObject, "TriggerAuthentication": keda.TriggerAuthentication}
    models |= {"PodMonitor": operator.PodMonitor, "PrometheusRule": operator.PrometheusRule}
    seen = set()
    for one in itertools.chain.from_iterable(release.objects for release in releases):
        if one["kind"] in models:
            found = models[one["kind"]].model_validate(one).model_dump(mode="json", by_alias=True, exclude_unset=True)
            assert found["spec"] == one["spec"]  # a field that the CRD does not know would be gone
            seen.add(one["kind"])
    assert seen == models.keys()


JOB_SET_FIELDS: Json = {
    "network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "replicatedJobs": {"name", "replicas", "template", "groupName", "dependsOn"},
}
"""What the CRD of JobSet (v1alpha2, 0.10) documents of the fields that the chart uses; no package has a model of it."""


def test_every_job_set_has_fields_of_its_crd_and_holds_a_job(
    matrix: Mapping[tuple[str, int, bool], Release],
) -> None:
    import kubernetes_validate

    found = [(version, one) for (_, version, _), release in matrix.items() for one in release.of("JobSet")]
    assert len(found) == 2 * len(CASES)
    for version, one in found:
        spec, (replicated,) = one["spec"], one["spec"]["replicatedJobs"]
        assert spec.keys() == JOB_SET_FIELDS.keys()
        assert spec["network"].keys() <= JOB_SET_FIELDS["network"]
        assert spec["failurePolicy"].keys() <= JOB_SET_FIELDS["failurePolicy"]
        assert replicated.keys() <= JOB_SET_FIELDS["replicatedJobs"]
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": one["metadata"], **replicated["template"]}
        kubernetes_validate.validate(job, f"1.{version}", strict=True)


LEADER_WORKER_SET_FIELDS: Json = {
    "": {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig"},
    "leaderWorkerTemplate": {"leaderTemplate", "workerTemplate", "size", "restartPolicy", "subGroupPolicy"},
    "rolloutStrategy": {"type", "rollingUpdateConfiguration"},
}
"""What the types of LeaderWorkerSet (v1) declare of the fields that the chart uses; no package has a model of it."""


def test_every_leader_worker_set_has_fields_of_its_crd_and_holds_a_pod(
    matrix: Mapping[tuple[str, int, bool], Release],
) -> None:
    import kubernetes_validate

    found = [(version, one) for (_, version, _), release in matrix.items() for one in release.of("LeaderWorkerSet")]
    assert len(found) == 2
    for version, one in found:
        spec = one["spec"]
        for name, fields in LEADER_WORKER_SET_FIELDS.items():
            assert (spec[name] if name else spec).keys() <= fields
        rolling = spec["rolloutStrategy"]["rollingUpdateConfiguration"]
        assert (spec["rolloutStrategy"]["type"], rolling) == ("RollingUpdate", {"maxSurge": 0, "maxUnavailable": 1})
        pods = {"selector": {"matchLabels": labels(template_of(one))}, "template": template_of(one)}
        as_one_that_kubernetes_knows = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": one["metadata"]}
        kubernetes_validate.validate({**as_one_that_kubernetes_knows, "spec": pods}, f"1.{version}", strict=True)


def test_custom_resources_are_made_only_where_their_crds_are(
    matrix: Mapping[tuple[str, int, bool], Release],
) -> None:
    bare, full = matrix["defaults", NEWEST, False], matrix["defaults", NEWEST, True]
    assert not [one for one in bare.objects if one["apiVersion"] in ALL_CRDS]
    assert len(full.of("PodMonitor")) == 1
    assert "This cluster has no Prometheus operator" in bare.notes
    assert "This cluster has no Prometheus operator" not in full.notes


def test_dashboards_alerts_and_their_labels_come_with_the_chart(
    matrix: Mapping[tuple[str, int, bool], Release],
) -> None:
    full = matrix["defaults", NEWEST, True]
    shown = {name: json.loads(text) for one in full.of("ConfigMap", "metrics") for name, text in one["data"].items()}
    assert shown == {file.name: json.loads(file.read_text()) for file in (CHART / "dashboards").iterdir()}
    (rules,) = full.of("PrometheusRule")
    assert rules["spec"] == yaml.safe_load((CHART / "rules" / "penstock.yaml").read_text())
    (monitor,) = full.of("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert {found["targetLabel"] for found in endpoint["relabelings"]} == {"service", "instance", "run"}


# ---------------------------------------------------------------- objects fit together


def test_every_selector_selects_the_pods_that_it_means_and_no_others(releases: list[Release]) -> None:
    for release in releases:
        pods = dict(release.pods())
        for one in release.objects:
            if one["kind"] in ("Service", "Deployment", "StatefulSet", "PodDisruptionBudget"):
                selector = one["spec"]["selector"]
                wanted = selector.get("matchLabels", selector)
                found = [role for role, pod in pods.items() if wanted.items() <= labels(pod).items()]
                assert found == [labels(one)["app.kubernetes.io/component"]]


def test_every_port_that_is_named_exists(releases: list[Release]) -> None:
    for release in releases:
        ports = {role: {port["name"]: port["containerPort"] for port in ports_of(pod)} for role, pod in release.pods()}
        for role, pod in release.pods():
            for container in pod["spec"]["containers"]:
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    asked = container.get(probe, {})
                    for how in ("httpGet", "tcpSocket"):
                        assert how not in asked or asked[how]["port"] in ports[role]
        for service in release.of("Service"):
            named = ports[labels(service)["app.kubernetes.io/component"]]
            assert all(port["targetPort"] in named and port["name"] in named for port in service["spec"]["ports"])
        for monitor in release.of("PodMonitor"):
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                assert any(endpoint["port"] in named for named in ports.values())


def ports_of(pod: Json) -> list[Json]:
    return [port for container in pod["spec"]["containers"] for port in container.get("ports", ())]


def test_every_key_and_claim_that_is_mounted_exists(releases: list[Release]) -> None:
    given = {"bus-ca": {"ca.crt"}, "penstock-bus": {"url"}, "penstock-bus-ca": {"ca.crt"}}  # secrets that users make
    given["checkpoint-store"] = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    for release in releases:
        maps = {one["metadata"]["name"]: set(one["data"]) for one in release.of("ConfigMap")}
        secrets = given | {one["metadata"]["name"]: set(one["stringData"]) for one in release.of("Secret")}
        claims = {one["metadata"]["name"] for one in release.of("PersistentVolumeClaim")}
        claims |= {"models", "models-and-data"}
        accounts = {one["metadata"]["name"] for one in release.of("ServiceAccount")}
        for _, pod in release.pods():
            assert pod["spec"]["serviceAccountName"] in accounts
            volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
            templates = {claim["metadata"]["name"] for claim in templates_of(release, pod)}
            for container in pod["spec"]["containers"]:
                assert len({mount["mountPath"] for mount in container["volumeMounts"]}) == len(
                    container["volumeMounts"]
                )
                for mount in container["volumeMounts"]:
                    volume = volumes.get(mount["name"], {})
                    assert volume or mount["name"] in templates
                    if "configMap" in volume:
                        assert mount.get("subPath", "valkey.conf") in maps[volume["configMap"]["name"]]
                    if "secret" in volume:
                        assert secrets[volume["secret"]["secretName"]]
                        items = {item["key"] for item in volume["secret"].get("items", ())}
                        assert items <= secrets[volume["secret"]["secretName"]]
                    if "persistentVolumeClaim" in volume:
                        assert volume["persistentVolumeClaim"]["claimName"] in claims
                for source in environment(container).values() if "env" in container else ():
                    if isinstance(source, dict) and "secretKeyRef" in source:
                        assert source["secretKeyRef"]["key"] in secrets[source["secretKeyRef"]["name"]]


def templates_of(release: Release, pod: Json) -> list[Json]:
    owners = [one for one in release.of("StatefulSet") if template_of(one) is pod]
    return [claim for one in owners for claim in one["spec"].get("volumeClaimTemplates", ())]


def test_network_policies_deny_everything_and_open_only_ports_that_exist(releases: list[Release]) -> None:
    for release in releases:
        pods = list(release.pods())
        ports = {port["containerPort"] for _, pod in pods for port in ports_of(pod)} | {53, 6379, 443}
        deny, *rest = sorted(release.of("NetworkPolicy"), key=lambda one: "default-deny" not in one["metadata"]["name"])
        assert deny["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert "ingress" not in deny["spec"]
        assert "egress" not in deny["spec"]
        wanted = deny["spec"]["podSelector"]["matchLabels"]
        assert all(wanted.items() <= labels(pod).items() for _, pod in pods)
        for policy in rest:
            for rule in [*(policy["spec"]["ingress"] or ()), *policy["spec"]["egress"]]:
                assert {port["port"] for port in rule.get("ports", ())} <= ports
        assert {labels(one)["app.kubernetes.io/component"] for one in rest} == {role for role, _ in pods}


def test_the_executor_has_no_way_out_and_holds_no_secret() -> None:
    release = render(CASES["everything"], crds=ALL_CRDS)
    pod = release.one("Deployment", "executor")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert release.one("NetworkPolicy", "executor")["spec"]["egress"] == []
    assert pod["runtimeClassName"] == "gvisor"
    assert not [source for source in environment(container).values() if "secretKeyRef" in str(source)]
    assert not [one for one in pod["volumes"] if "secret" in one or "persistentVolumeClaim" in one]
    assert "PENSTOCK__BUS__URL" not in environment(container)
    reward = environment(release.one("Deployment", "reward")["spec"]["template"]["spec"]["containers"][0])
    assert reward["PENSTOCK__REWARD__EXECUTOR__ADDRESS"] == "demo-penstock-executor:9500"


# ---------------------------------------------------------------- pods


def test_every_gpu_pod_requests_what_it_limits_and_tolerates_the_taint(releases: list[Release]) -> None:
    seen = 0
    for role, pod in itertools.chain.from_iterable(release.pods() for release in releases):
        for container in pod["spec"]["containers"]:
            resources = container["resources"]
            assert "memory" in resources["limits"]
            assert {"cpu", "memory"} <= resources["requests"].keys()
            if GPU in resources["requests"]:
                seen += 1
                assert role in ("rollout", "trainer", "reward")
                assert resources["limits"][GPU] == resources["requests"][GPU]
                taint = {"key": GPU, "operator": "Exists", "effect": "NoSchedule"}
                assert taint in pod["spec"]["tolerations"]
                assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert seen > 10


def test_no_image_is_latest_and_every_one_comes_from_the_registry(releases: list[Release]) -> None:
    for _, pod in itertools.chain.from_iterable(release.pods() for release in releases):
        for container in pod["spec"]["containers"]:
            assert re.fullmatch(r"registry\.(test|example\.org)/team/\S+:\d[\w.]+", container["image"])


def test_every_pod_passes_the_restricted_pod_security_standard_but_those_with_rdma(releases: list[Release]) -> None:
    exceptions = {("rollout", "capabilities added: ['IPC_LOCK']"), ("trainer", "capabilities added: ['IPC_LOCK']")}
    found = {
        (role, wrong)
        for role, pod in itertools.chain.from_iterable(release.pods() for release in releases)
        for wrong in breaches(pod["spec"])
    }
    assert found <= exceptions
    assert ("trainer", "capabilities added: ['IPC_LOCK']") in found  # the examples with RDMA are looked at


RESTRICTED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected"}


def breaches(spec: Json) -> Iterator[str]:
    """Yield what the restricted Pod Security Standard (Kubernetes 1.37) forbids in a pod."""
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield name
    for volume in spec["volumes"]:
        if not volume.keys() - {"name"} <= RESTRICTED_VOLUMES | {"secret"}:
            yield f"volume {volume}"
    pod = spec.get("securityContext", {})
    for container in [*spec["containers"], *spec.get("initContainers", ())]:
        own = container.get("securityContext", {})
        if not own.get("runAsNonRoot", pod.get("runAsNonRoot")):
            yield "may run as root"
        if own.get("runAsUser", pod.get("runAsUser")) == 0:
            yield "runs as root"
        if own.get("privileged") or own.get("allowPrivilegeEscalation", True):
            yield "may gain privileges"
        if own.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in ("RuntimeDefault", "Localhost"):
            yield "no seccomp profile"
        if own.get("capabilities", {}).get("drop") != ["ALL"]:
            yield "capabilities kept"
        if added := [name for name in own["capabilities"].get("add", ()) if name != "NET_BIND_SERVICE"]:
            yield f"capabilities added: {added}"
        if any("hostPort" in port for port in container.get("ports", ())):
            yield "a port of the host"


def test_the_files_of_a_pod_are_read_only_and_no_pod_has_a_token(releases: list[Release]) -> None:
    for release in releases:
        assert all(one["automountServiceAccountToken"] is False for one in release.of("ServiceAccount"))
        for _, pod in release.pods():
            assert pod["spec"]["automountServiceAccountToken"] is False
            assert all(one["securityContext"]["readOnlyRootFilesystem"] for one in pod["spec"]["containers"])


def test_a_pod_may_take_longer_to_end_than_its_service_to_drain() -> None:
    release = render(values(bus={"drainSeconds": 45}))
    leave_s = 10  # shared.service ends a process so long after bus.drain_s
    for role in ("coordinator", "rollout", "reward", "trainer"):
        spec = template_of(release.workload(role))["spec"]
        (container,) = spec["containers"]
        assert environment(container)["PENSTOCK__BUS__DRAIN_S"] == "45"
        pre_stop = int(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])[1])
        assert spec["terminationGracePeriodSeconds"] >= 45 + leave_s + pre_stop


@pytest.mark.parametrize("crds", [None, JOB_SET])
def test_the_settings_that_a_pod_is_given_are_settings(tmp_path: Path, crds: Kinds | None) -> None:
    release = render(values("one-gpu-node", executor={"enabled": True}), crds=crds)
    config = tmp_path / "run.toml"
    config.write_text(release.one("ConfigMap", "run")["data"]["run.toml"])
    for role in ("coordinator", "rollout", "reward", "executor", "trainer"):
        (container,) = template_of(release.workload(role))["spec"]["containers"]
        plain = {name: source for name, source in environment(container).items() if isinstance(source, str)}
        settings = load(config, environment={**plain, "PENSTOCK__BUS__URL": "redis://bus:6379/0"})
        assert settings.run.steps == 200
        if role == "executor":
            assert settings.reward.executor.address == "0.0.0.0:9500"
            continue
        assert settings.run.id == "demo"
        assert str(settings.snapshot_folder) == "/var/penstock/runs/demo/weights"
        assert settings.trainer.ranks == (4 if role == "trainer" else 1)
        assert settings.trainer.stopped_exit_status == (143 if role == "trainer" and crds else 0)


def test_trainer_and_rollout_share_a_fabric_and_a_queue() -> None:
    release = render(CASES["two-pools"], crds=ALL_CRDS)
    trainer, rollout = release.workload("trainer"), release.workload("rollout")
    for workload, pool, product in ((trainer, "trainer", "NVIDIA-H200"), (rollout, "rollout", "NVIDIA-L40S")):
        spec = template_of(workload)["spec"]
        assert spec["nodeSelector"] == {"pool": pool, "nvidia.com/gpu.product": product}
        (together,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert together["topologyKey"] == "topology.kubernetes.io/zone"
        assert together["labelSelector"]["matchExpressions"][0]["values"] == ["trainer", "rollout"]
        assert labels(workload)["kueue.x-k8s.io/queue-name"] == "research"


# ---------------------------------------------------------------- a StatefulSet or a JobSet trains


@pytest.fixture(scope="module")
def job_sets(_tools: None) -> Mapping[str, Sequence[Release]]:
    """Revisions of releases on a cluster that knows JobSets, by what is special of them."""

    def nodes(count: int, enabled: object = "auto", **more: Any) -> Json:
        return values(trainer={"nodes": count, "jobSet": {"enabled": enabled}}, **more)

    upgrades = [
        values(),
        values(reward={"replicas": 3}),
        values(image={"tag": "0.2.0"}),
        values(trainer={"jobSet": {"maxRestarts": 7}}),
    ]
    cases: Mapping[str, Sequence[Json]] = {
        "auto": [nodes(3)],
        "asked for": [nodes(3, True)],
        "not wanted": [nodes(3, False)],
        "long name": [nodes(64, fullnameOverride="p" * 40)],
        "upgraded": upgrades,
    }
    played = dict(zip(cases, play_all(list(cases.values()), version=NEWEST, crds=ALL_CRDS), strict=True))
    assert not [found.error for release in played.values() for found in release if found.error]
    return played


def test_one_thing_trains_a_stateful_set_or_where_the_cluster_has_them_a_job_set(
    job_sets: Mapping[str, Sequence[Release]], matrix: Mapping[tuple[str, int, bool], Release]
) -> None:
    for name in ("auto", "asked for"):
        (release,) = job_sets[name]
        budget = release.one("PodDisruptionBudget", "trainer")["spec"]
        assert release.workload("trainer")["kind"] == "JobSet"  # `workload` holds that there is one
        assert (budget["minAvailable"], "maxUnavailable" in budget) == (3, False)  # a Job's pods know nothing else
        assert not release.of("Service", "trainer")  # the controller makes it
        assert "wait pod --for=condition=Ready" in release.notes
    for release in (*job_sets["not wanted"], matrix["defaults", NEWEST, False]):
        trainer = release.workload("trainer")
        assert (trainer["kind"], trainer["spec"]["podManagementPolicy"]) == ("StatefulSet", "Parallel")
        assert release.one("PodDisruptionBudget", "trainer")["spec"]["maxUnavailable"] == 0
        assert release.one("Service", "trainer")["spec"]["publishNotReadyAddresses"] is True
        assert "rollout status statefulset/demo-penstock-trainer" in release.notes


def test_the_pods_of_a_job_set_meet_at_its_first_and_are_made_anew_together(
    job_sets: Mapping[str, Sequence[Release]],
) -> None:
    (release,) = job_sets["auto"]
    job_set = release.workload("trainer")
    name, spec = job_set["metadata"]["name"], job_set["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    variables = environment(job["template"]["spec"]["containers"][0])
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    assert spec["network"] == {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True}
    assert spec["failurePolicy"] == {"maxRestarts": 1000}
    assert (job["completionMode"], job["completions"], job["parallelism"], job["backoffLimit"]) == ("Indexed", 3, 3, 0)
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert variables["PENSTOCK__TRAINER__NODES"] == "3"
    assert variables["PENSTOCK__TRAINER__NODE"] == index
    assert variables["PENSTOCK__TRAINER__RENDEZVOUS"] == f"{name}-{replicated['name']}-0-0.{name}:29500"
    (monitor,) = release.of("PodMonitor")  # a pod's name is another one each time, its replica's is not
    (kept,) = [one for one in monitor["spec"]["podMetricsEndpoints"][0]["relabelings"] if "regex" in one]
    assert kept["sourceLabels"] == ["__meta_kubernetes_pod_annotation_batch_kubernetes_io_job_completion_index"]
    assert (kept["replacement"], variables["JOB_INDEX"]) == ("trainer-$1", index)


def test_a_job_set_which_cannot_be_changed_is_followed_by_another(job_sets: Mapping[str, Sequence[Release]]) -> None:
    first, same, other, patient = (found.workload("trainer") for found in job_sets["upgraded"])
    assert first == same
    assert len({one["metadata"]["name"] for one in (first, other, patient)}) == 3


def test_the_longest_name_leaves_room_for_those_of_a_job_set_s_pods(job_sets: Mapping[str, Sequence[Release]]) -> None:
    (release,) = job_sets["long name"]
    assert len(f"{release.workload('trainer')['metadata']['name']}-pod-0-63-x7k2p") <= 63


# ---------------------------------------------------------------- an engine that spans pods


def test_the_pods_of_one_replica_have_the_engine_s_gpus_between_them_and_meet_at_their_first(
    matrix: Mapping[tuple[str, int, bool], Release],
) -> None:
    release = matrix["two-nodes-per-engine", NEWEST, True]
    group = release.workload("rollout")
    spec = group["spec"]
    (container,) = template_of(group)["spec"]["containers"]
    variables = environment(container)
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (2, 2)
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["startupPolicy"] == "LeaderCreated"  # a leader is ready only with the others
    assert container["resources"]["limits"][GPU] == 8  # × 2 pods = tensor_parallel_size
    assert {"name": "rendezvous", "containerPort": 29500} in container["ports"]
    assert variables["PENSTOCK__ROLLOUT__NODES"] == "2"
    assert variables["PENSTOCK__ROLLOUT__NODE"] == "$(LWS_WORKER_INDEX)"
    assert variables["PENSTOCK__ROLLOUT__RENDEZVOUS"] == "$(LWS_LEADER_ADDRESS):29500"
    index = {"fieldRef": {"fieldPath": "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}}
    assert variables["GROUP_INDEX"] == index
    assert container["command"][-2:] == [
        "--replica",
        "demo-penstock-rollout-$(GROUP_INDEX)",
    ]  # one name for all of them
    assert "A replica of rollout is 2 pods" in release.notes
    assert matrix["defaults", NEWEST, True].workload("rollout")["kind"] == "Deployment"


def test_a_pod_of_several_gets_settings_and_a_secret_that_upgrades_keep(tmp_path: Path) -> None:
    found = CASES["two-nodes-per-engine"]
    given = merged(found, {"rollout": {"existingSecret": "ours"}})
    (first, again), (other,) = play_all([[found, found], [given]], version=NEWEST, crds=ALL_CRDS)
    config = tmp_path / "run.toml"
    config.write_text(first.one("ConfigMap", "run")["data"]["run.toml"])
    (container,) = template_of(first.workload("rollout"))["spec"]["containers"]
    plain = {name: source for name, source in environment(container).items() if isinstance(source, str)}
    says = {
        "$(LWS_WORKER_INDEX)": "1",
        "$(LWS_LEADER_ADDRESS):29500": "demo-penstock-rollout-0.demo-penstock-rollout.research:29500",
    }
    settings = load(config, environment={name: says.get(text, text) for name, text in plain.items()})
    assert (settings.rollout.nodes, settings.rollout.node) == (2, 1)
    assert settings.rollout.rendezvous == "demo-penstock-rollout-0.demo-penstock-rollout.research:29500"
    assert settings.rollout.secret_file is not None
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounted[str(settings.rollout.secret_file.parent)] == "engine"
    secrets = [release.one("Secret", "rollout")["stringData"]["secret"] for release in (first, again)]
    assert secrets[0] == secrets[1]
    assert len(secrets[0]) == 40
    assert other.of("Secret", "rollout") == []
    (volume,) = [one for one in template_of(other.workload("rollout"))["spec"]["volumes"] if one["name"] == "engine"]
    assert volume["secret"] == {"secretName": "ours"}


@pytest.mark.parametrize("crds", [KEDA, EXTERNAL_METRICS])
def test_what_scales_replicas_scales_groups_of_pods(crds: Kinds) -> None:
    scaling = {"rollout": {"autoscaling": {"enabled": True, "minReplicas": 1}}}
    release = render(merged(CASES["two-nodes-per-engine"], scaling), crds={**crds, **LEADER_WORKER_SET})
    (scaler,) = [*release.of("ScaledObject", "rollout"), *release.of("HorizontalPodAutoscaler", "rollout")]
    target = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "demo-penstock-rollout"}
    assert scaler["spec"]["scaleTargetRef"] == target
    assert "replicas" not in release.workload("rollout")["spec"]


# ---------------------------------------------------------------- who sets the number of replicas


def test_without_keda_an_autoscaler_reads_what_the_coordinator_exports_and_keeps_one_replica() -> None:
    scaling = {"autoscaling": {"enabled": True, "minReplicas": 1, "cooldownSeconds": 7200}}
    to_zero = values(reward={"autoscaling": {"enabled": True}})
    steps = [[values(rollout=scaling, reward=scaling)], [to_zero]]
    (release,), (refused,) = play_all(steps, version=NEWEST, crds={**OPERATOR, **EXTERNAL_METRICS})
    assert (
        "expected reward.autoscaling.minReplicas of at least 1 in a cluster without KEDA, found 0: a "
        "HorizontalPodAutoscaler does not scale to zero; set it to 1, or install KEDA"
    ) in refused.error
    assert not release.of("ScaledObject")
    (exported,) = STREAM_ENTRIES.collect()
    for role, stream, most, groups in (("rollout", PROMPTS, 4, "16"), ("reward", ROLLOUTS, 8, "32")):
        spec = release.one("HorizontalPodAutoscaler", role)["spec"]
        ((metric,), target) = spec["metrics"], spec["scaleTargetRef"]
        assert stream in SHOWN
        assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"demo-penstock-{role}"}
        assert (spec["minReplicas"], spec["maxReplicas"]) == (1, most)
        assert metric["external"]["metric"]["name"] == exported.name
        assert metric["external"]["metric"]["selector"] == {"matchLabels": {"run": "demo", "stream": stream.name}}
        assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": groups}
        assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 3600  # the most that Kubernetes takes
        assert "replicas" not in release.workload(role)["spec"]


def test_keda_is_preferred_to_an_autoscaler() -> None:
    scaling = {"autoscaling": {"enabled": True}}
    release = render(values(rollout=scaling), crds={**KEDA, **EXTERNAL_METRICS})
    assert release.one("ScaledObject", "rollout")["spec"]["minReplicaCount"] == 0
    assert not release.of("HorizontalPodAutoscaler")


def test_the_rule_for_prometheus_adapter_passes_on_that_series_once_whoever_exports_it() -> None:
    text = (ROOT / "docs/kubernetes.md").read_text()
    (block,) = re.findall(r"```yaml\n(rules:.*?)```", text, re.S)
    (rule,) = yaml.safe_load(block)["rules"]["external"]
    (exported,) = STREAM_ENTRIES.collect()
    assert rule["seriesQuery"].partition("{")[0] == rule["name"]["as"] == exported.name
    assert (
        rule["metricsQuery"] == "max by (run, stream) (<<.Series>>{<<.LabelMatchers>>})"
    )  # two coordinators export it


def test_backlogs_of_the_run_set_the_number_of_replicas() -> None:
    release = render(CASES["two-pools"], crds=ALL_CRDS)
    for role, streams, most in (
        ("rollout", (PROMPTS, EVAL_PROMPTS), 16),
        ("reward", (ROLLOUTS, EVAL_ROLLOUTS), 8),
    ):
        scaled = release.one("ScaledObject", role)["spec"]
        target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"demo-penstock-{role}"}
        assert scaled["scaleTargetRef"] == target
        assert scaled["maxReplicaCount"] == most
        asked = [(one["metadata"]["stream"], one["metadata"]["consumerGroup"]) for one in scaled["triggers"][::2]]
        assert asked == [(Keys("demo").of(stream), stream.group) for stream in streams]
        assert {
            (one["metadata"].keys() - {"stream", "consumerGroup", "enableTLS"}).pop()
            for one in scaled["triggers"][1::2]
        } == {"pendingEntriesCount"}
        assert scaled["triggers"][0]["metadata"]["lagCount"] == "32"
        assert "replicas" not in release.one("Deployment", role)["spec"]  # two would set it


# ---------------------------------------------------------------- upgrades


def test_an_upgrade_keeps_password_and_token_and_restarts_only_for_another_run() -> None:
    first, same, other = play([values(), values(), values(run={"config": values()["run"]["config"] + "\n# new\n"})])
    for role, key in (("bus", "password"), ("api", "token")):
        secrets = [found.one("Secret", role)["stringData"][key] for found in (first, same, other)]
        assert secrets[0] == secrets[1] == secrets[2]
        assert len(secrets[0]) == 40
    pods = [template_of(found.workload("trainer")) for found in (first, same, other)]
    assert pods[0] == pods[1]
    assert pods[0] != pods[2]
    bus = [found.one("StatefulSet", "bus")["spec"]["template"] for found in (first, same, other)]
    assert bus[0] == bus[1] == bus[2]


def test_what_a_run_leaves_outlives_its_release() -> None:
    claim = render(values()).one("PersistentVolumeClaim", "runs")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_with_object_storage_every_pod_has_a_folder_of_its_own_and_the_trainer_alone_holds_the_key() -> None:
    release = render(CASES["object-storage"])
    assert release.of("PersistentVolumeClaim") == []
    for role, pod in release.pods():
        (container,) = pod["spec"]["containers"]
        folders = [one for one in pod["spec"]["volumes"] if one["name"] == "runs"]
        assert folders == ([{"name": "runs", "emptyDir": {}}] if role in ("coordinator", "rollout", "trainer") else [])
        found = environment(container) if role != "bus" else {}
        assert ("AWS_SECRET_ACCESS_KEY" in found) == ("PENSTOCK__TRAINER__STORE__URI" in found) == (role == "trainer")
    (container,) = release.one("StatefulSet", "trainer")["spec"]["template"]["spec"]["containers"]
    plain = {name: value for name, value in environment(container).items() if isinstance(value, str)}
    store = load(None, environment=plain).trainer.store
    assert (store.uri, store.region, store.counts) == ("s3://penstock-runs/research", "eu-central-1", "stored")


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("", 443), ("http://minio.storage.svc:9000", 9000), ("http://minio", 80), ("https://[::1]:8", 8)],
)
def test_the_trainer_alone_may_reach_the_store_at_its_port(endpoint: str, port: int) -> None:
    release = render(values("object-storage", checkpoints={"s3": {"endpoint": endpoint}}))
    anywhere = {
        labels(one)["app.kubernetes.io/component"]: rule
        for one in release.of("NetworkPolicy")
        for rule in one["spec"].get("egress", ())
        if "to" not in rule
    }
    assert anywhere == {"trainer": {"ports": [{"port": port}]}}


def test_the_notes_tell_the_next_three_commands() -> None:
    commands = [line.strip() for line in render(values()).notes.splitlines() if line.startswith("  ")]
    assert [command.split()[0] for command in commands[:3]] == ["kubectl", "helm", "kubectl"]
    assert commands[1] == "helm test demo -n research"


# ---------------------------------------------------------------- refusals


def test_a_schema_error_names_the_value() -> None:
    wrong = values(
        image={"tag": "latest"}, rollout={"replicas": "two", "gpus": 3}, coordinator={"replicas": -1}, run={"confg": ""}
    )
    lines = refusal(wrong).splitlines()
    assert (
        lines[0] == "install failed: values don't meet the specifications of the schema(s) in the following chart(s):"
    )
    assert sorted(lines[2:]) == [
        "  - at '/rollout': additional properties 'gpus' not allowed",
        "  - at '/rollout/replicas': got string, want integer",
        "- at '/coordinator/replicas': minimum: got -1, want 0",
        "- at '/image/tag': 'not' failed",
        "- at '/rollout': validation failed",
        "- at '/run': additional properties 'confg' not allowed",
    ]


MISSING: Sequence[tuple[Json, str]] = (
    (values(image={"registry": ""}), "expected image.registry, found none: set it to the registry"),
    (values(run={"config": ""}), "expected run.config, found none: give the run's TOML by --set-file"),
    (values(run={"id": "a b"}), "expected a run id of 1 to 64 letters, digits, '.', '_' or '-', found \"a b\""),
    (
        values("object-storage", trainer={"nodes": 2}),
        "expected storage.runs.existingClaim with checkpoints.s3.uri and trainer.nodes = 2, found none: pods that train",
    ),
    (
        values(rollout={"autoscaling": {"enabled": True}}),
        "expected KEDA or an external metrics API for rollout.autoscaling.enabled, found neither keda.sh/v1alpha1 nor "
        "external.metrics.k8s.io/v1beta1 in this cluster",
    ),
    (
        values(run={"config": "[rollout.vllm]\n# tensor_parallel_size = 4\ntensor_parallel_size = 16 # all\n"}),
        "expected an engine within the GPUs of its pods, found rollout.vllm.tensor_parallel_size = 16 in run.config, "
        "rollout.nodes = 1 and rollout.gpu.count = 1: raise rollout.gpu.count or rollout.nodes, or lower "
        "tensor_parallel_size",
    ),
    (
        values(rollout={"nodes": 2}),
        "expected rollout.vllm.tensor_parallel_size to be a multiple of rollout.nodes = 2, as many GPUs in each pod, found "
        "1 in run.config: change one of them",
    ),
    (
        CASES["two-nodes-per-engine"],
        "expected the CRD of LeaderWorkerSet for rollout.nodes = 2, found no leaderworkerset.x-k8s.io/v1 in this cluster: "
        "install LeaderWorkerSet, or set rollout.nodes to 1",
    ),
    (
        values(trainer={"jobSet": {"enabled": True}}),
        "expected the CRD of JobSet for trainer.jobSet.enabled, found no jobset.x-k8s.io/v1alpha2 in this cluster",
    ),
)


def test_what_is_missing_or_does_not_fit_is_one_sentence() -> None:
    played = play_all([[wrong] for wrong, _ in MISSING], version=NEWEST, crds=None)
    for (_, said), (release,) in zip(MISSING, played, strict=True):
        assert said in release.error


def test_an_engine_may_take_every_gpu_of_its_pod() -> None:
    config = "[rollout.vllm]\ntensor_parallel_size = 8\n"
    release = render(values(run={"config": config}, rollout={"gpu": {"count": 8}}))
    assert template_of(release.workload("rollout"))["spec"]["containers"][0]["resources"]["limits"][GPU] == 8


def test_an_older_cluster_is_refused() -> None:
    assert "chart requires kubeVersion: >=1.28.0-0 which is incompatible with Kubernetes v1.27.0" in refusal(
        values(), version=27
    )


def test_the_schema_says_every_value_in_a_sentence_and_the_values_file_holds_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    found = dict(described(schema, schema, ""))
    assert len(found) > 100
    assert not [path for path, text in found.items() if not text.endswith(".")]
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(paths(defaults, "", found)) <= found.keys()


def described(schema: Json, root: Json, path: str) -> Iterator[tuple[str, str]]:
    for name, one in schema.get("properties", {}).items():
        here = root["definitions"][one["$ref"].rpartition("/")[2]] if "$ref" in one else one
        yield f"{path}.{name}", here.get("description", "")
        assert here.get("additionalProperties") is not None or "properties" not in here
        yield from described(here, root, f"{path}.{name}")


def paths(found: Json, path: str, known: Mapping[str, str]) -> Iterator[str]:
    for name, one in found.items():
        here = f"{path}.{name}"
        yield here
        if isinstance(one, dict) and any(other.startswith(here + ".") for other in known):
            yield from paths(one, here, known)


def test_the_chart_is_of_this_release() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{chart["appVersion"]}"' in project


# ---------------------------------------------------------------- checkov

ACCEPTED = {
    "CKV_K8S_8": "a check that ends by itself needs no liveness probe",
    "CKV_K8S_9": "… nor a readiness probe",
    "CKV_K8S_11": "a limit of CPU slows a service down while its node idles; memory is limited",
    "CKV_K8S_15": "IfNotPresent: tags are never `latest`, and a GPU node should not fetch 10 GB again",
    "CKV_K8S_21": "Helm sets the namespace; objects do not name it",
    "CKV_K8S_25": "RDMA needs IPC_LOCK, and only where a value asks for it",
    "CKV_K8S_35": "settings come by the environment, so bus.url does; the token and Valkey's users are files",
    "CKV_K8S_43": "an image by digest is a value (<role>.image); which one, only its builder knows",
}


def test_checkov_finds_nothing_but_what_is_accepted_with_a_reason(tmp_path: Path) -> None:
    checkov = need_checkov()
    release = render(CASES["everything"], crds={**KEDA, **OPERATOR})  # a JobSet is nothing that checkov knows
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(yaml.safe_dump_all([*release.objects, *release.hooks]))
    command = [
        *checkov,
        "-f",
        str(manifest),
        "--framework",
        "kubernetes",
        "--skip-download",
        "--output",
        "json",
        "--soft-fail",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["summary"]["passed"] > 500
    assert found["summary"]["parsing_errors"] == 0
    wrong = {(one["check_id"], one["check_name"], one["resource"]) for one in found["results"]["failed_checks"]}
    assert {one for one in wrong if one[0] not in ACCEPTED} == set()
    assert ACCEPTED.keys() == {one[0] for one in wrong}  # what is accepted in vain goes


def need_checkov() -> tuple[str, ...]:
    """Return what starts checkov: beside the checkout, where .ci/run puts it, or wherever the shell finds it."""
    own = ROOT / ".venv-checkov/bin"
    if (own / "checkov").exists():
        return str(own / "python"), str(own / "checkov")  # a script's first line cannot hold a path with a space
    return (need("checkov", "checkov, which `pip install -r .ci/checkov.txt` brings"),)
