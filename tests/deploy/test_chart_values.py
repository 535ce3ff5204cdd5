"""Laws of the chart's values: upgrades, dependencies, refusals."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from penstock.services.cli.__main__ import main
from penstock.services.up import plan
from penstock.shared.settings import load
from tests.support.chart import (
    CASES,
    CHART,
    EPISODES,
    GPU,
    NEWEST,
    ROOT,
    TRACKED,
    Json,
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
from tests.support.fake_kubernetes import JOB_SET, OPERATOR

pytestmark = pytest.mark.usefixtures("helm")


def test_an_upgrade_keeps_password_and_token_and_restarts_only_for_another_run() -> None:
    first, same, other = play([values(), values(), values(run={"config": values()["run"]["config"] + "\n# new\n"})])
    for role, key in (("bus", "password"), ("api", "token")):
        secrets = [release.one("Secret", role)["stringData"][key] for release in (first, same, other)]
        assert secrets[0] == secrets[1] == secrets[2]
        assert len(secrets[0]) == 40
    pods = [template_of(release.workload("trainer")) for release in (first, same, other)]
    assert pods[0] == pods[1]
    assert pods[0] != pods[2]
    bus = [release.one("StatefulSet", "bus")["spec"]["template"] for release in (first, same, other)]
    assert bus[0] == bus[1] == bus[2]


@pytest.mark.parametrize(("kind", "role"), [("jobset", "jobset"), ("pod", "pod")])
def test_a_changed_toml_keeps_the_workload_that_holds_the_gpus_until_it_has_ended(kind: str, role: str) -> None:
    def of(config: str, **more: object) -> Json:
        return values(run={"config": config, "kind": kind}, image={"registry": "registry.test/team", **more})

    steps = [
        of("[run]\nsteps = 1\n"),
        of("[run]\nsteps = 2\n"),  # the same pods
        of("[run]\nsteps = 2\n", tag="2"),  # another image
        of("[run]\nsteps = 3\n", tag="2") | {"kueue": {"queue": "gpus", "priorityClass": "ended"}},
        of("[run]\nsteps = 4\n", tag="2"),  # a longer run, after the end
    ]
    played = play(steps, crds=JOB_SET)
    assert not [release.error for release in played if release.error]
    names = [release.one({"jobset": "JobSet", "pod": "Job"}[kind], role)["metadata"]["name"] for release in played]
    assert [names.index(name) for name in names] == [0, 0, 2, 2, 4]
    notes = [release.notes.count("kubectl -n research delete pod --wait=false") for release in played]
    assert notes == [0, 1, 0, 1, 1]
    assert [release.config for release in played] == [step["run"]["config"] for step in steps]


def test_what_a_run_leaves_outlives_its_release() -> None:
    claim = render(values()).one("PersistentVolumeClaim", "runs")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_with_object_storage_every_pod_has_a_folder_of_its_own_and_the_trainer_alone_holds_the_key() -> None:
    release = render(CASES["object-storage"])
    assert release.of("PersistentVolumeClaim") == []
    for role, pod in release.pods():
        (container,) = pod["spec"]["containers"]
        folders = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "runs"]
        assert folders == (
            [{"name": "runs", "emptyDir": {"sizeLimit": "200Gi"}}]
            if role in ("coordinator", "rollout", "trainer")
            else []
        )
        variables = environment(container) if role != "bus" else {}
        assert (
            ("AWS_SECRET_ACCESS_KEY" in variables)
            == ("PENSTOCK__TRAINER__STORE__URI" in variables)
            == (role == "trainer")
        )
    (container,) = release.one("StatefulSet", "trainer")["spec"]["template"]["spec"]["containers"]
    plain = {name: value for name, value in environment(container).items() if isinstance(value, str)}
    store = load(None, environment=plain).trainer.store
    assert (store.uri, store.counts) == ("s3://penstock-runs/research", "stored")


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("", 443), ("http://minio.storage.svc:9000", 9000), ("http://minio", 80), ("https://[::1]:8", 8)],
)
def test_the_trainer_alone_may_reach_the_store_at_its_port(endpoint: str, port: int) -> None:
    release = render(values("object-storage", checkpoints={"s3": {"endpoint": endpoint}}))
    anywhere = {
        labels(policy)["app.kubernetes.io/component"]: rule
        for policy in release.of("NetworkPolicy")
        for rule in policy["spec"].get("egress", ())
        if "to" not in rule
    }
    assert anywhere == {"trainer": {"ports": [{"port": port}]}}


def test_the_notes_tell_the_next_three_commands() -> None:
    commands = [line.strip() for line in render(values()).notes.splitlines() if line.startswith("  ")]
    assert [command.split()[0] for command in commands[:3]] == ["kubectl", "helm", "kubectl"]
    assert commands[1] == "helm test demo -n research"


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


def in_one_pod(config: str, gpus: int) -> Json:
    return values(run={"config": config, "kind": "pod"}, pod={"gpu": {"count": gpus}})


SHARING: Sequence[tuple[str, int]] = (
    ('[placement]\nmode = "shared" # in turn\n', 1),
    ('[trainer]\nranks = 4\ngpus = [3, 2, 1, 0]\n[rollout]\nreplicas = 4\n[placement]\nmode = "shared"\n', 4),
    ("[trainer]\ngpus = [\n    0,\n]\n[rollout]\ngpus = [\n    0,\n]\n", 1),
    ('# mode = "shared"\n[trainer]\ngpus = [0]\n[rollout]\ngpus = [1]\n', 8),
    ('[placement]\nmode = "shared"\n[run]\ndevice = "cpu"\n', 0),
    ('["placement"]\n"mode" = "shared"\n', 1),
    ('[data]\nprompt = """\n[placement]\nmode = "shared"\n"""\n', 8),
    ("trainer = {ranks = 2, gpus = [0, 1]}\nrollout.replicas = 2\nplacement = {'mode' = 'shared'}\n", 2),
    ('[placement]\nmode = "shared"\n[reward.models]\ndevice = "cuda:1"\n', 2),
)


def test_one_pod_has_each_gpu_that_trainer_and_replicas_share_once() -> None:
    played = play_all([[in_one_pod(config, gpus)] for config, gpus in SHARING], version=NEWEST, crds=None)
    for (config, gpus), (release,) in zip(SHARING, played, strict=True):
        assert not release.error, release.error
        assert [labels(workload)["app.kubernetes.io/component"] for workload in release.workloads()] == ["pod"]
        (container,) = template_of(release.workload("pod"))["spec"]["containers"]
        assert container["resources"]["limits"].get(GPU, 0) == gpus
        assert release.config == config


@pytest.mark.parametrize(("model", "mode"), [("0.5b", "separate"), ("7b", "shared")])
def test_the_chart_takes_a_layout_that_shares_gpus_as_the_plan_writes_it(model: str, mode: str, tmp_path: Path) -> None:
    (tmp_path / "in.toml").write_text("[sampling]\nmax_new_tokens = 512\n[rollout]\nmax_groups = 64\n")
    run = tmp_path / "run.toml"
    assert main(["plan", str(tmp_path / "in.toml"), "--model", model, "--gpus", "1xH200", "--write", str(run)]) == 0
    written = load(run, environment={})
    assert (written.placement.mode, written.gpu_sharing != "") == (mode, True)
    (release,) = play_all([[in_one_pod(run.read_text(), 1)]], version=NEWEST, crds=None)[0]
    (container,) = template_of(release.workload("pod"))["spec"]["containers"]
    assert container["resources"]["limits"][GPU] == 1


MISSING: Sequence[tuple[Json, str]] = (
    (values(image={"registry": ""}), "expected image.registry, found none: set it to the registry"),
    (
        values(image={"registry": "registry.test/team", "tag": "1@sha256:ab"}),
        'expected a tag without a digest in image.tag, found "1@sha256:ab": each role\'s image has a digest of its own',
    ),
    (values(run={"config": ""}), "expected run.config, found none: give the run's TOML by --set-file"),
    (values(run={"id": "a b"}), "expected a run id of 1 to 64 letters, digits, '.', '_' or '-', found \"a b\""),
    (
        values("object-storage", trainer={"nodes": 2}),
        "expected storage.runs.existingClaim with checkpoints.s3.uri and trainer.nodes = 2, found none: pods that train",
    ),
    (
        values("object-storage", run={"config": TRACKED}),
        "expected storage.runs.existingClaim with [tracking] in run.config and checkpoints.s3.uri, found none: what each",
    ),
    (
        values(rollout={"autoscaling": {"enabled": True}}),
        "expected KEDA or an external metrics API for rollout.autoscaling.enabled, found neither keda.sh/v1alpha1 nor "
        "external.metrics.k8s.io/v1beta1 in this cluster",
    ),
    (values(run={"config": "[run\n"}), "expected TOML in run.config, but toml: line"),
    (values(run={"config": "trainer = 2\n"}), "expected a table trainer in run.config, found 2: change it"),
    (
        values(run={"config": "[rollout.vllm]\n# tensor_parallel_size = 4\ntensor_parallel_size = 16 # all\n"}),
        "expected an engine within the GPUs of its pods, found rollout.vllm.tensor_parallel_size = 16 in run.config, "
        "rollout.nodes = 1 and rollout.gpu.count = 1: raise rollout.gpu.count or rollout.nodes, or lower "
        "tensor_parallel_size",
    ),
    (
        values(run={"config": '[placement]\nmode = "shared"\n'}),
        'expected placement.mode = "separate" in run.config: pods do not share GPUs; remove placement.mode, or set run.kind to '
        "pod, which runs `penstock up`",
    ),
    (
        values(run={"config": "['trainer']\n\"gpus\" = [\n    0,\n]\n[rollout]\ngpus = [1, 0] # both\n"}),
        "expected no GPU both in trainer.gpus and rollout.gpus of run.config: pods do not share GPUs; remove both, or set "
        "run.kind to pod",
    ),
    (
        in_one_pod('[placement]\nmode = "shared"\n[trainer]\nranks = 4\n', 2),
        "expected pod.gpu.count of at least 4, for the GPUs of trainer, rollout and reward in run.config, found 2: change "
        "pod.gpu.count or these numbers",
    ),
    (
        in_one_pod("trainer.gpus = [0]\nrollout.gpus = [0]\n", 8),
        "expected pod.gpu.count = 1, for the GPUs that run.config uses, each once where trainer and replicas share it, found 8: "
        "change pod.gpu.count",
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
        values(run={"config": values()["run"]["config"], "kind": "jobset"}),
        "run.kind = jobset needs JobSet, whose jobset.x-k8s.io/v1alpha2 this cluster does not know: install it, or set "
        "run.kind to workloads",
    ),
    (
        values(run={"config": values()["run"]["config"], "kind": "pod", "onFinish": "keep"}),
        "run.onFinish = keep needs run.kind = jobset or workloads, because `penstock up` ends with its run",
    ),
    (
        values(kueue={"queue": "research"}),
        "kueue.queue needs run.kind = jobset, or Kueue admits a trainer that no rollout replica feeds; a JobSet needs "
        "JobSet, whose jobset.x-k8s.io/v1alpha2 this cluster does not know: install it, or remove kueue.queue",
    ),
)


def test_what_is_missing_or_does_not_fit_is_one_sentence() -> None:
    played = play_all([[wrong] for wrong, _ in MISSING], version=NEWEST, crds=None)
    for (_, said), (release,) in zip(MISSING, played, strict=True):
        assert said in release.error


SHELVED = values()["run"]["config"].replace("[bus]", "[bus]\nshelve_above_bytes = 65536\nshelf_bytes = 1048576000")


@pytest.mark.parametrize("kind", ["workloads", "jobset"])
@pytest.mark.parametrize(
    ("storage_class", "volume"),
    [
        ("", {"emptyDir": {"sizeLimit": "2125Mi"}}),
        (
            "local-nvme",
            {
                "ephemeral": {
                    "volumeClaimTemplate": {
                        "spec": {
                            "accessModes": ["ReadWriteOnce"],
                            "storageClassName": "local-nvme",
                            "resources": {"requests": {"storage": "2125Mi"}},
                        }
                    }
                }
            },
        ),
    ],
)
def test_a_pod_that_keeps_payloads_has_a_volume_with_room_for_them_and_knows_its_node(
    kind: str, storage_class: str, volume: Json
) -> None:
    """1,000 MiB of bus.shelf_bytes, a tenth for the file system (rounded up), and 1 GiB that the service leaves free."""
    config = SHELVED + EPISODES[EPISODES.index("\n[episodes]") :]
    shelves = {"shelves": {"storageClass": storage_class}}
    release = render(values(run={"config": config, "kind": kind}, storage=shelves), crds=JOB_SET)
    for role in ("rollout", "reward", "episodes", "trainer", "coordinator"):
        spec = template_of(release.workload(role))["spec"]
        (container,) = spec["containers"]
        has = role in ("rollout", "reward", "episodes")
        assert [each for each in spec["volumes"] if each["name"] == "shelf"] == [{"name": "shelf", **volume}] * has
        mounted = [mount for mount in container["volumeMounts"] if mount["name"] == "shelf"]
        assert mounted == [{"name": "shelf", "mountPath": "/var/penstock/shelf"}] * has
        variables = environment(container)
        assert variables.get("PENSTOCK__INTERNAL__SHELF_FOLDER") == ("/var/penstock/shelf" if has else None)
        assert ("NODE_NAME" in variables) == has
        disk = container["resources"]["requests"]["ephemeral-storage"]
        assert disk == ("3149Mi" if has and not storage_class else "1Gi")


def test_a_run_without_shelves_has_no_volume_for_them() -> None:
    config = values()["run"]["config"]
    for more, has in (("", False), ("\nrouter_replay = true", True)):
        release = render(values(run={"config": config.replace("[trainer]", f"[trainer]{more}")}))
        spec = template_of(release.workload("rollout"))["spec"]
        assert any(volume["name"] == "shelf" for volume in spec["volumes"]) == has
    alone = render(values(run={"config": SHELVED, "kind": "pod"}))
    ((_, pod),) = [(role, pod) for role, pod in alone.pods() if role == "pod"]
    assert not any(volume["name"] == "shelf" for volume in pod["spec"]["volumes"]), "`penstock up` has the run's folder"


def test_a_run_with_trackers_has_one_pod_that_keeps_its_place_on_the_claim_and_outlasts_the_run() -> None:
    config = {"config": TRACKED, "kind": "workloads"}
    release = render(values(run=config, tracking={"existingSecret": "trackers"}))
    workload = release.one("StatefulSet", "tracking")
    (container,) = template_of(workload)["spec"]["containers"]
    assert workload["spec"]["replicas"] == 1
    assert container["envFrom"] == [{"secretRef": {"name": "trackers"}}]
    assert {"name": "runs", "mountPath": "/var/penstock/runs"} in container["volumeMounts"]
    released = [rule["resourceNames"] for rule in release.one("Role", "coordinator")["rules"]]
    assert released == [["demo-penstock-rollout"], ["demo-penstock-reward"], ["demo-penstock-trainer"]]
    in_one_pod = render(values(run={**config, "kind": "pod"}, tracking={"existingSecret": "trackers"}))
    assert not in_one_pod.of("StatefulSet", "tracking")
    (container,) = template_of(in_one_pod.workload("pod"))["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "trackers"}}]
    assert not render(values()).of("StatefulSet", "tracking")


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
    descriptions = dict(described(schema, schema, ""))
    assert len(descriptions) > 100
    assert not [path for path, text in descriptions.items() if not text.endswith(".")]
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(paths(defaults, "", descriptions)) <= descriptions.keys()


def described(schema: Json, root: Json, path: str) -> Iterator[tuple[str, str]]:
    for name, property_schema in schema.get("properties", {}).items():
        here = (
            root["definitions"][property_schema["$ref"].rpartition("/")[2]]
            if "$ref" in property_schema
            else property_schema
        )
        yield f"{path}.{name}", here.get("description", "")
        assert here.get("additionalProperties") is not None or "properties" not in here
        yield from described(here, root, f"{path}.{name}")


def paths(branch: Json, path: str, known: Mapping[str, str]) -> Iterator[str]:
    for name, value in branch.items():
        here = f"{path}.{name}"
        yield here
        if isinstance(value, dict) and any(other.startswith(here + ".") for other in known):
            yield from paths(value, here, known)


def test_the_chart_is_of_this_release() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{chart["appVersion"]}"' in project


def test_the_bus_stops_taking_entries_before_the_kernel_ends_it() -> None:
    limited = {"resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "8Gi"}}}
    conf = render(values(valkey=limited)).one("ConfigMap", "bus")["data"]["valkey.conf"]
    assert "\nmaxmemory 5153960755\n" in conf  # 60 % of 8 GiB
    assert "\nmaxmemory-policy noeviction\n" in conf
    error = refusal(
        values(valkey={"resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": None}}})
    )
    assert "expected valkey.resources.limits.memory, found none" in error


def test_the_bus_takes_its_password_from_a_secret_that_tools_without_a_cluster_can_name() -> None:
    release = render(values(valkey={"existingSecret": "bus-login"}))
    assert not [
        secret
        for secret in release.of("Secret")
        if secret["metadata"]["labels"]["app.kubernetes.io/component"] == "bus"
    ]
    bus = template_of(release.workload("bus"))["spec"]
    assert {volume["secret"]["secretName"] for volume in bus["volumes"] if "secret" in volume} == {"bus-login"}
    (container,) = bus["containers"]
    assert environment(container)["REDISCLI_AUTH"] == {"secretKeyRef": {"name": "bus-login", "key": "password"}}
    (trainer,) = template_of(release.workload("trainer"))["spec"]["containers"]
    assert environment(trainer)["PENSTOCK__BUS__URL"] == {"secretKeyRef": {"name": "bus-login", "key": "url"}}


def test_name_servers_are_reached_where_they_are_no_pods_and_on_openshift() -> None:
    (rule,) = [
        rule
        for rule in render(values()).one("NetworkPolicy", "rollout")["spec"]["egress"]
        if {"port": 53, "protocol": "UDP"} in rule.get("ports", ())
    ]
    assert rule["to"] == [{"namespaceSelector": {}}, {"ipBlock": {"cidr": "169.254.0.0/16"}}]
    assert {port["port"] for port in rule["ports"]} == {53, 5353}


def test_one_pod_resumes_its_run_with_the_toml_of_the_release(tmp_path: Path) -> None:
    (container,) = template_of(render(in_one_pod("[run]\n", 8)).workload("pod"))["spec"]["containers"]
    shell, option, script = container["command"]
    folder = tmp_path / "demo"
    echoed = script.replace("exec python", "echo").replace("/var/penstock/runs/demo", str(folder))
    assert (
        subprocess.check_output([shell, option, echoed], text=True)
        == "-m penstock.services.cli up /etc/penstock/run.toml\n"
    )
    folder.mkdir()
    (folder / "settings.toml").touch()
    resumed = subprocess.check_output([shell, option, echoed], text=True)
    assert resumed == f"-m penstock.services.cli up /etc/penstock/run.toml --resume {folder}\n"


CODE = '[reward]\nreplicas = 3\n[[reward.scorers]]\nkind = "code"\n'
IN_ONE_POD: Sequence[str] = (
    values()["run"]["config"],
    TRACKED,
    CODE + "[rollout]\nreplicas = 2\n",
    CODE + '[reward.executor]\naddress = "executor:9500"\n',
    '[episodes]\nexecutor = "numpy"\n',
    '[data]\nrejected_field = "rejected"\n[algorithm]\npreset = "dpo"\n[rollout]\nreplicas = 2\n',
    'algorithm.loss = "cross_entropy"\n["tracking"]\nsinks = ["mlflow"]\n',
)


def test_every_process_of_the_one_pod_is_scraped_at_the_port_that_penstock_up_gives_it(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    played = play_all([[in_one_pod(text, 0)] for text in IN_ONE_POD], version=NEWEST, crds=OPERATOR)
    for text, (release,) in zip(IN_ONE_POD, played, strict=True):
        assert not release.error, release.error
        config.write_text(text)
        settings = load(config, [], {"PENSTOCK__RUN__METRICS_PORT": "9400", "PENSTOCK__RUN__ID": "demo"})
        plans = [*plan.services(settings, config, "", {}), *plan.executor(settings, config, {})]
        expected = {
            (process.service, process.name): int(process.command[process.command.index("--run.metrics_port") + 1])
            for process in plans
        }
        (container,) = template_of(release.workload("pod"))["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"] if port["name"] != "http"}
        assert all(len(name) <= 15 for name in ports)
        scraped = {}
        for endpoint in release.of("PodMonitor")[0]["spec"]["podMetricsEndpoints"]:
            named = {label["targetLabel"]: label["replacement"] for label in endpoint["relabelings"][1:]}
            scraped[named["service"], named["instance"]] = ports[endpoint["port"]]
        assert scraped == expected
        (_, rule) = release.one("NetworkPolicy", "pod")["spec"]["ingress"]
        assert [port["port"] for port in rule["ports"]] == list(ports.values()) == sorted(expected.values())


def test_the_one_pod_has_time_for_every_stage_of_a_stop_and_the_run_s_deadline(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CODE)
    release = render(merged(in_one_pod(CODE, 8), {"bus": {"drainSeconds": 45}, "run": {"activeDeadlineSeconds": 3600}}))
    job = release.workload("pod")
    (container,) = template_of(job)["spec"]["containers"]
    plain = {name: value for name, value in environment(container).items() if isinstance(value, str)}
    settings = load(config, environment={**plain, "POD_IP": "127.0.0.1"})
    assert (settings.bus.drain_s, settings.internal.deadline_s) == (45, 3600)
    assert job["spec"]["activeDeadlineSeconds"] == 3720  # if the coordinator does not stop it
    plans = [
        *plan.services(settings, config, "", {}),
        *plan.executor(settings, config, {}),
        plan.valkey(tmp_path / "socket", tmp_path, {}),
    ]
    longest_s = sum(
        max((process.stop_s for process in plans if process.service in stage), default=0)
        for stage in plan.STOP_ORDER_AT_ONCE
    )
    assert longest_s == 55 + 15 + 10
    assert template_of(job)["spec"]["terminationGracePeriodSeconds"] >= longest_s + 10
