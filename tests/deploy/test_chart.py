"""Laws of all rendered objects, on several cluster versions, with and without CRDs."""

import functools
import itertools
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from penstock.shared.settings import load
from tests.conftest import need, need_module
from tests.support.chart import (
    ALL_CRDS,
    CASES,
    EVERYTHING,
    GPU,
    MONITORING,
    NEWEST,
    OLDEST,
    ROOT,
    TRACKED,
    Json,
    Kinds,
    Release,
    environment,
    jobs_of,
    labels,
    merged,
    play_all,
    refusal,
    render,
    template_of,
    values,
)
from tests.support.fake_kubernetes import JOB_SET, KEDA, OPERATOR

pytestmark = pytest.mark.usefixtures("helm")
NEEDS_CRDS = ("two-pools", "everything", "two-nodes-per-engine")


@pytest.fixture(scope="module")
def matrix(helm: None) -> Mapping[tuple[str, int, bool], Release]:
    """Every case on the oldest and newest cluster, with and without CRDs."""
    releases_of_cases: dict[tuple[str, int, bool], Release] = {}
    for version, crds in itertools.product((OLDEST, NEWEST), (True, False)):
        names = [name for name in CASES if crds or name not in NEEDS_CRDS]
        played = play_all([[CASES[name]] for name in names], version=version, crds=ALL_CRDS if crds else None)
        releases_of_cases |= {(name, version, crds): release for name, (release,) in zip(names, played, strict=True)}
    assert not [release.error for release in releases_of_cases.values() if release.error]
    return releases_of_cases


@pytest.fixture(scope="module")
def releases(matrix: Mapping[tuple[str, int, bool], Release]) -> list[Release]:
    return list(matrix.values())


def objects_and_hooks(release: Release) -> list[Json]:
    return [*release.objects, *release.hooks]


def test_every_object_is_valid_for_the_cluster_it_was_rendered_for(
    matrix: Mapping[tuple[str, int, bool], Release], monkeypatch: pytest.MonkeyPatch
) -> None:
    import kubernetes_validate
    from kubernetes_validate import utils

    monkeypatch.setattr(
        utils, "schema_contents", functools.cache(utils.schema_contents)
    )  # it would read a file per object
    different = {
        (version, json.dumps(manifest, sort_keys=True))  # most objects are the same in every case
        for (_, version, _), release in matrix.items()
        for manifest in objects_and_hooks(release)
        if manifest["apiVersion"] not in ALL_CRDS and manifest["kind"] != "Secret"
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
    monitoring = render({}, crds=ALL_CRDS, chart=MONITORING)
    seen = set()
    for manifest in itertools.chain.from_iterable(release.objects for release in [*releases, monitoring]):
        if manifest["kind"] in models:
            modelled = (
                models[manifest["kind"]]
                .model_validate(manifest)
                .model_dump(mode="json", by_alias=True, exclude_unset=True)
            )
            assert modelled["spec"] == manifest["spec"]  # an unknown field would be gone
            seen.add(manifest["kind"])
    assert seen == models.keys()


JOB_SET_FIELDS: Json = {
    "network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "successPolicy": {"operator", "targetReplicatedJobs"},
    "failurePolicy": {"maxRestarts", "rules"},
    "replicatedJobs": {"name", "replicas", "template", "groupName", "dependsOn"},
}
"""Used fields of JobSet's CRD (v1alpha2, 0.10); no package has a model."""


def test_every_job_set_has_fields_of_its_crd_and_holds_a_job(
    matrix: Mapping[tuple[str, int, bool], Release],
) -> None:
    import kubernetes_validate

    job_sets = [(version, manifest) for (_, version, _), release in matrix.items() for manifest in release.of("JobSet")]
    assert len(job_sets) == 2 * (len(CASES) - 1)  # a LeaderWorkerSet cannot be part of one
    for version, job_set in job_sets:
        spec = job_set["spec"]
        assert spec.keys() == JOB_SET_FIELDS.keys()
        assert all(spec[field].keys() <= JOB_SET_FIELDS[field] for field in ("network", "failurePolicy"))
        assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["trainer"]}
        assert all(replicated.keys() <= JOB_SET_FIELDS["replicatedJobs"] for replicated in spec["replicatedJobs"])
        for job in jobs_of(job_set):
            kubernetes_validate.validate(job, f"1.{version}", strict=True)


LEADER_WORKER_SET_FIELDS: Json = {
    "": {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig"},
    "leaderWorkerTemplate": {"leaderTemplate", "workerTemplate", "size", "restartPolicy", "subGroupPolicy"},
    "rolloutStrategy": {"type", "rollingUpdateConfiguration"},
}
"""Used fields of LeaderWorkerSet (v1); no package has a model."""


def test_every_leader_worker_set_has_fields_of_its_crd_and_holds_a_pod(
    matrix: Mapping[tuple[str, int, bool], Release],
) -> None:
    import kubernetes_validate

    worker_sets = [
        (version, manifest) for (_, version, _), release in matrix.items() for manifest in release.of("LeaderWorkerSet")
    ]
    assert len(worker_sets) == 2
    for version, worker_set in worker_sets:
        spec = worker_set["spec"]
        for name, fields in LEADER_WORKER_SET_FIELDS.items():
            assert (spec[name] if name else spec).keys() <= fields
        rolling = spec["rolloutStrategy"]["rollingUpdateConfiguration"]
        assert (spec["rolloutStrategy"]["type"], rolling) == ("RollingUpdate", {"maxSurge": 0, "maxUnavailable": 1})
        pods = {"selector": {"matchLabels": labels(template_of(worker_set))}, "template": template_of(worker_set)}
        as_one_that_kubernetes_knows = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": worker_set["metadata"],
        }
        kubernetes_validate.validate({**as_one_that_kubernetes_knows, "spec": pods}, f"1.{version}", strict=True)


def test_custom_resources_are_made_only_where_their_crds_are(
    matrix: Mapping[tuple[str, int, bool], Release],
) -> None:
    bare, full = matrix["defaults", NEWEST, False], matrix["defaults", NEWEST, True]
    assert not [manifest for manifest in bare.objects if manifest["apiVersion"] in ALL_CRDS]
    assert len(full.of("PodMonitor")) == 1
    assert "This cluster has no Prometheus operator" in bare.notes
    assert "This cluster has no Prometheus operator" not in full.notes


def test_one_release_has_the_alerts_and_dashboards_of_all_runs(matrix: Mapping[tuple[str, int, bool], Release]) -> None:
    labelled = {"rules": {"labels": {"release": "prometheus"}}}
    release = render(labelled, crds=ALL_CRDS, chart=MONITORING)
    shown = {
        name: json.loads(text) for config_map in release.of("ConfigMap") for name, text in config_map["data"].items()
    }
    files = (MONITORING / "dashboards").iterdir()
    assert shown == {f"penstock-{file.name}": json.loads(file.read_text()) for file in files}
    (rules,) = release.of("PrometheusRule")
    assert rules["spec"] == yaml.safe_load((MONITORING / "rules" / "penstock.yaml").read_text())
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    assert "expected the Prometheus operator" in refusal({}, chart=MONITORING)
    run = matrix["defaults", NEWEST, True]
    assert not run.of("PrometheusRule")
    (monitor,) = run.of("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    keep, *labelled = endpoint["relabelings"]
    assert keep == {"sourceLabels": ["__meta_kubernetes_pod_phase"], "regex": "Running", "action": "keep"}
    assert {label["targetLabel"] for label in labelled} == {"service", "instance", "run"}


def test_an_alerts_runbook_is_a_section_of_the_documentation_wherever_it_is_published() -> None:
    folder = "https://docs.example.org/penstock"
    release = render({"rules": {"runbookFolder": folder}}, crds=ALL_CRDS, chart=MONITORING)
    (rules,) = release.of("PrometheusRule")
    alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    titles = re.findall("(?m)^### (.+)$", (ROOT / "docs/operations.md").read_text())
    assert len(alerts) > 30
    for rule in alerts:
        assert rule["annotations"]["runbook_url"] == f"{folder}/operations.md#{rule['alert'].lower()}"
        assert rule["alert"] in titles


def test_every_rule_keeps_runs_of_several_namespaces_apart() -> None:
    text = (MONITORING / "rules" / "penstock.yaml").read_text()
    kept = re.findall(r"\b(?:by|on) \(([^)]*)\)", text)
    assert len(kept) > 20
    assert all(names.startswith("namespace, run") for names in kept)


def test_every_selector_selects_the_pods_that_it_means_and_no_others(releases: list[Release]) -> None:
    for release in releases:
        pods = dict(release.pods())
        for manifest in release.objects:
            if manifest["kind"] in ("Service", "Deployment", "StatefulSet", "PodDisruptionBudget"):
                selector = manifest["spec"]["selector"]
                selected_labels = selector.get("matchLabels", selector)
                selected_roles = [role for role, pod in pods.items() if selected_labels.items() <= labels(pod).items()]
                assert selected_roles == [labels(manifest)["app.kubernetes.io/component"]]


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
        maps = {config_map["metadata"]["name"]: set(config_map["data"]) for config_map in release.of("ConfigMap")}
        secrets = given | {
            secret["metadata"]["name"]: set(secret.get("stringData") or secret["data"])
            for secret in release.of("Secret")
        }
        claims = {claim["metadata"]["name"] for claim in release.of("PersistentVolumeClaim")}
        claims |= {"models", "models-and-data"}
        accounts = {account["metadata"]["name"] for account in release.of("ServiceAccount")}
        for _, pod in release.pods():
            assert pod["spec"]["serviceAccountName"] in accounts
            volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
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
    owners = [stateful_set for stateful_set in release.of("StatefulSet") if template_of(stateful_set) is pod]
    return [claim for stateful_set in owners for claim in stateful_set["spec"].get("volumeClaimTemplates", ())]


def test_network_policies_deny_everything_and_open_only_ports_that_exist(releases: list[Release]) -> None:
    for release in releases:
        pods = list(release.pods())
        ports = {port["containerPort"] for _, pod in pods for port in ports_of(pod)} | {53, 5353, 6379, 443, 6443}
        deny, *rest = sorted(
            release.of("NetworkPolicy"), key=lambda policy: "default-deny" not in policy["metadata"]["name"]
        )
        assert deny["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert "ingress" not in deny["spec"]
        assert "egress" not in deny["spec"]
        denied_labels = deny["spec"]["podSelector"]["matchLabels"]
        assert all(denied_labels.items() <= labels(pod).items() for _, pod in pods)
        for policy in rest:
            for rule in [*(policy["spec"]["ingress"] or ()), *policy["spec"]["egress"]]:
                assert {port["port"] for port in rule.get("ports", ())} <= ports
        assert {labels(policy)["app.kubernetes.io/component"] for policy in rest} == {role for role, _ in pods}


@pytest.mark.parametrize("role", ["rollout", "trainer"])
def test_only_trainer_and_rollout_pods_of_the_release_reach_the_ports_that_authenticate_no_peer(role: str) -> None:
    release = render(CASES["everything"], crds=ALL_CRDS)
    rules = release.one("NetworkPolicy", role)["spec"]["ingress"]
    (peers,) = [rule["from"] for rule in rules if "ports" not in rule]
    assert [set(peer) for peer in peers] == [{"podSelector"}, {"podSelector"}]
    chosen = [peer["podSelector"]["matchLabels"] for peer in peers]
    assert [peer["app.kubernetes.io/component"] for peer in chosen] == ["rollout", "trainer"]
    assert {peer["app.kubernetes.io/instance"] for peer in chosen} == {"demo"}
    assert {port["port"] for rule in rules for port in rule.get("ports", ())} <= {9400}


def test_the_executor_has_no_way_out_and_holds_no_secret_but_the_one_of_its_clients() -> None:
    release = render(CASES["everything"], crds=ALL_CRDS)
    pod = release.one("Deployment", "executor")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert release.one("NetworkPolicy", "executor")["spec"]["egress"] == []
    assert pod["runtimeClassName"] == "gvisor"
    assert not [source for source in environment(container).values() if "secretKeyRef" in str(source)]
    assert not [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    own = {"secretName": "demo-penstock-executor", "defaultMode": 0o440}
    assert [volume["secret"] for volume in pod["volumes"] if "secret" in volume] == [own]
    assert set(release.one("Secret", "executor")["stringData"]) == {"secret"}
    assert "PENSTOCK__BUS__URL" not in environment(container)
    client = release.one("Deployment", "reward")["spec"]["template"]["spec"]
    reward = environment(client["containers"][0])
    assert reward["PENSTOCK__REWARD__EXECUTOR__ADDRESS"] == "demo-penstock-executor:9500"
    assert [volume["secret"] for volume in client["volumes"] if volume["name"] == "executor"] == [own]
    for settings in (reward, environment(container)):
        assert settings["PENSTOCK__REWARD__EXECUTOR__SECRET_FILE"] == "/etc/penstock/executor/secret"


def test_the_executor_reads_nothing_of_the_run_s_toml_but_its_own_settings_and_scorers(tmp_path: Path) -> None:
    config = (
        '[bus]\nurl = "redis://:secret@bus"\n[reward]\nexpression = "tests + judge"\nexecutor = {slots = 3}\n'
        '[[reward.scorers]]\nkind = "code"\nname = "tests"\nprofile = "numpy"\n'
        '[[reward.scorers]]\nkind = "judge"\nname = "judge"\nurl = "https://judge.test?key=secret"\nmodel = "large"\n'
    )
    release = render(values(run={"config": config}, executor={"enabled": True}))
    text = release.one("ConfigMap", "executor")["data"]["run.toml"]
    assert "secret" not in text
    (tmp_path / "run.toml").write_text(text)
    settings = load(tmp_path / "run.toml", environment={})
    assert (settings.executor_profiles, settings.reward.executor.slots) == (("numpy",), 3)


def test_episodes_reach_the_executor_where_the_policy_has_its_tool_and_nowhere_else(tmp_path: Path) -> None:
    for episodes, reaches in (('executor = "numpy"', True), ('tools = ["my:add"]', False)):
        release = render(values(run={"config": f"[episodes]\n{episodes}\n"}, executor={"enabled": True}))
        pod = template_of(release.one("Deployment", "episodes"))["spec"]
        assert ("executor" in {volume["name"] for volume in pod["volumes"]}) is reaches
        assert ("PENSTOCK__REWARD__EXECUTOR__ADDRESS" in environment(pod["containers"][0])) is reaches
        rules = release.one("NetworkPolicy", "executor")["spec"]["ingress"]
        (clients,) = [rule["from"] for rule in rules if rule["ports"] == [{"port": 9500}]]
        assert len(clients) == 1 + reaches, "the reward service's pods, and these"
        ports = [
            port["port"]
            for rule in release.one("NetworkPolicy", "episodes")["spec"]["egress"]
            for port in rule.get("ports", ())
        ]
        assert (9500 in ports) is reaches
        (tmp_path / "run.toml").write_text(release.one("ConfigMap", "executor")["data"]["run.toml"])
        profiles = load(tmp_path / "run.toml", environment={}).executor_profiles
        assert profiles == (("numpy",) if reaches else ("stdlib", "numpy"))


OPENSHIFT: Kinds = {"security.openshift.io/v1": {"SecurityContextConstraints": "securitycontextconstraints"}}
EVERY_POD: Sequence[Json] = (
    merged(values("two-pools", **EVERYTHING), {"models": ["hf://team/model"]}),
    values(run={"config": TRACKED, "kind": "pod"}, models=["hf://team/model"]),
    CASES["object-storage"],
)
"""Between them every template that has a pod."""


@pytest.mark.parametrize("crds", [ALL_CRDS, {**ALL_CRDS, **OPENSHIFT}], ids=["kubernetes", "openshift"])
def test_every_pod_has_user_10001_and_on_openshift_none(crds: Kinds) -> None:
    roles = set()
    for case in EVERY_POD:
        for role, pod in render(case, crds=crds).pods():
            roles.add(role)
            users = {key: pod["spec"]["securityContext"].get(key) for key in ("runAsUser", "runAsGroup", "fsGroup")}
            assert set(users.values()) == ({None} if "security.openshift.io/v1" in crds else {10001}), role
            assert not [box for box in pod["spec"]["containers"] if "runAsUser" in box["securityContext"]]
            assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert roles == {*SERVICES_OF_PODS, "bus", "check", "models", "pod"}


SERVICES_OF_PODS = ("coordinator", "executor", "reward", "rollout", "tracking", "trainer")


def test_no_pod_has_a_mesh_s_sidecar_another_architecture_or_storage_without_bounds() -> None:
    other = {"defaults": {"podLabels": {"sidecar.istio.io/inject": "true"}}, "image": {"arch": "arm64"}}
    for case in EVERY_POD:
        for role, pod in render(case, crds=ALL_CRDS).pods():
            assert pod["metadata"]["labels"]["sidecar.istio.io/inject"] == "false", role
            assert pod["spec"]["nodeSelector"]["kubernetes.io/arch"] == "amd64", role
            for box in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]:
                assert "ephemeral-storage" in box["resources"]["requests"], role
            volumes = [volume for volume in pod["spec"]["volumes"] if "emptyDir" in volume]
            unbounded = {volume["name"] for volume in volumes if "sizeLimit" not in volume["emptyDir"]}
            assert unbounded <= {"scratch"}, "which the values bring"
        for role, pod in render(merged(case, other), crds=ALL_CRDS).pods():
            assert pod["spec"]["nodeSelector"]["kubernetes.io/arch"] == "arm64"
            if role in SERVICES_OF_PODS:
                assert pod["metadata"]["labels"]["sidecar.istio.io/inject"] == "true", role


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


def test_every_pod_passes_the_restricted_pod_security_standard(releases: list[Release]) -> None:
    pods = list(itertools.chain.from_iterable(release.pods() for release in releases))
    assert len(pods) > 100
    assert not [(role, wrong) for role, pod in pods for wrong in breaches(pod["spec"])]


def test_values_change_the_security_context_and_the_network_of_one_role_alone() -> None:
    own = {
        "podSecurityContext": {"runAsUser": 0, "runAsNonRoot": False},
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "hostNetwork": True,
    }
    release = render(values(trainer=own, networkPolicy={"nodes": ["10.0.0.0/16"]}))
    breaches_of_roles = {role: set(breaches(pod["spec"])) for role, pod in release.pods()}
    assert breaches_of_roles.pop("trainer") == {
        "hostNetwork",
        "may run as root",
        "runs as root",
        "capabilities added: ['IPC_LOCK']",
    }
    assert not any(breaches_of_roles.values())
    spec = template_of(release.workload("trainer"))["spec"]
    assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"]


def test_a_pod_in_its_node_s_network_is_known_to_its_peers_by_the_addresses_of_nodes() -> None:
    nodes = {"ipBlock": {"cidr": "10.0.0.0/16"}}
    own: Json = {"trainer": {"hostNetwork": True}, "executor": {"enabled": True}}
    release = render(values(**own, networkPolicy={"nodes": ["10.0.0.0/16"]}))
    peered: dict[str, list[str]] = {"ingress": [], "egress": []}
    for policy in release.of("NetworkPolicy"):
        for direction, key in (("ingress", "from"), ("egress", "to")):
            for rule in policy["spec"].get(direction) or ():
                if nodes in rule.get(key, ()):
                    peered[direction].append(labels(policy)["app.kubernetes.io/component"])
    assert {direction: sorted(roles) for direction, roles in peered.items()} == {
        "ingress": ["bus", "rollout", "trainer"],
        "egress": ["rollout", "trainer"],
    }
    assert "expected networkPolicy.nodes with trainer.hostNetwork, found none" in refusal(values(**own))
    assert not render(values(**own, networkPolicy={"enabled": False})).of("NetworkPolicy")


def test_a_role_has_an_account_of_the_users_or_its_own_with_annotations() -> None:
    identity = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/checkpoints"}
    release = render(
        values(trainer={"serviceAccount": {"annotations": identity}}, reward={"serviceAccount": {"name": "scorer"}})
    )
    accounts = {account["metadata"]["name"]: account for account in release.of("ServiceAccount")}
    assert accounts["demo-penstock-trainer"]["metadata"]["annotations"] == identity
    assert "demo-penstock-reward" not in accounts
    assert template_of(release.workload("reward"))["spec"]["serviceAccountName"] == "scorer"
    assert template_of(release.workload("trainer"))["spec"]["serviceAccountName"] == "demo-penstock-trainer"


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


def test_the_files_of_a_pod_are_read_only_and_only_a_coordinator_that_may_scale_has_a_token(
    releases: list[Release],
) -> None:
    for release in releases:
        assert all(account["automountServiceAccountToken"] is False for account in release.of("ServiceAccount"))
        for role, pod in release.pods():
            may_scale = role == "coordinator" and bool(release.of("Role"))
            assert pod["spec"]["automountServiceAccountToken"] is may_scale
            assert all(
                container["securityContext"]["readOnlyRootFilesystem"] for container in pod["spec"]["containers"]
            )


def test_a_pod_may_take_longer_to_end_than_its_service_to_drain() -> None:
    release = render(values(bus={"drainSeconds": 45}))
    leave_s = 10  # as penstock.shared.process.service, after bus.drain_s
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
    config.write_text(release.config)
    for role in ("coordinator", "rollout", "reward", "executor", "trainer"):
        (container,) = template_of(release.workload(role))["spec"]["containers"]
        plain = {name: source for name, source in environment(container).items() if isinstance(source, str)}
        plain = {name: value.replace("$(POD_IP)", "10.1.2.3") for name, value in plain.items()}
        settings = load(config, environment={**plain, "PENSTOCK__BUS__URL": "redis://bus:6379/0"})
        assert settings.run.steps == 200
        if role == "executor":
            assert settings.reward.executor.address == "10.1.2.3:9500"
            continue
        assert settings.run.id == "demo"
        assert str(settings.snapshot_folder) == "/var/penstock/runs/demo/weights"
        assert settings.trainer.ranks == (4 if role == "trainer" else 1)
        in_job_set = crds is not None and role in ("trainer", "rollout", "reward")
        assert settings.internal.stopped_exit_status == (143 if in_job_set else 0)
        assert settings.internal.leave_when_over == (in_job_set and role == "trainer")
        if role == "coordinator":
            released = ["executor"] if crds else ["rollout", "reward", "trainer", "executor"]
            released += ["after=2", "coordinator"]  # those of a volume of one node
            assert [target.rpartition("-")[2] for target in settings.internal.release] == released


def test_trainer_and_rollout_share_a_fabric_and_a_queue() -> None:
    release = render(CASES["two-pools"], crds=ALL_CRDS)
    trainer, rollout = release.workload("trainer"), release.workload("rollout")
    for workload, pool, product in ((trainer, "trainer", "NVIDIA-H200"), (rollout, "rollout", "NVIDIA-L40S")):
        spec = template_of(workload)["spec"]
        assert spec["nodeSelector"] == {"pool": pool, "nvidia.com/gpu.product": product, "kubernetes.io/arch": "amd64"}
        (together,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert together["topologyKey"] == "topology.kubernetes.io/zone"
        assert together["labelSelector"]["matchExpressions"][0]["values"] == ["trainer", "rollout"]
    (job_set,) = release.of("JobSet")
    assert labels(job_set)["kueue.x-k8s.io/queue-name"] == "research"


ACCEPTED = {
    "CKV_K8S_8": "a check that ends by itself needs no liveness probe",
    "CKV_K8S_9": "… nor a readiness probe",
    "CKV_K8S_11": "a limit of CPU slows a service down while its node idles; memory is limited",
    "CKV_K8S_15": "IfNotPresent: tags are never `latest`, and a GPU node should not fetch 10 GB again",
    "CKV_K8S_21": "Helm sets the namespace; objects do not name it",
    "CKV_K8S_35": "settings come by the environment, so bus.url does; the token and Valkey's users are files",
    "CKV_K8S_38": "the coordinator alone: its token may scale this release's own workloads, and delete its ScaledObjects",
    "CKV_K8S_43": "an image by digest is a value (<role>.image); which one, only its builder knows",
}


def test_checkov_finds_nothing_but_what_is_accepted_with_a_reason(tmp_path: Path) -> None:
    checkov = need_checkov()
    separate = merged(CASES["everything"], {"kueue": {"queue": ""}})
    release = render(separate, crds={**KEDA, **OPERATOR})  # checkov does not know JobSets
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
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 500
    assert report["summary"]["parsing_errors"] == 0
    failed_checks = {
        (check["check_id"], check["check_name"], check["resource"]) for check in report["results"]["failed_checks"]
    }
    assert {check for check in failed_checks if check[0] not in ACCEPTED} == set()
    assert ACCEPTED.keys() == {check[0] for check in failed_checks}  # unused exceptions must go
    assert [check[2] for check in failed_checks if check[0] == "CKV_K8S_38"] == [
        "Deployment.default.demo-penstock-coordinator"
    ]


def need_checkov() -> tuple[str, ...]:
    own = ROOT / ".venv-checkov/bin"
    if (own / "checkov").exists():
        return str(own / "python"), str(own / "checkov")  # a script's first line cannot hold a path with a space
    return (need("checkov", "checkov, which `pip install -r .ci/checkov.txt` brings"),)
