"""Laws of a run on a cluster whose nodes come and go; ``tests/support/job_controllers.py`` models the controllers."""

import copy
import dataclasses
import random
from collections.abc import Callable

import pytest

from penstock.shared.process.service import INVALID_SETTINGS
from tests.support.chart import ALL_CRDS, GPU, Json, Release, jobs_of, render, template_of, values
from tests.support.job_controllers import JobSet, created

pytestmark = pytest.mark.usefixtures("helm")
HOUR_S, DAY_S = 3600.0, 86400.0
SPOT, NODES, DAYS = 16, 2, 30
RECLAIMED_S, STEP_S = 12 * HOUR_S, 60.0


@pytest.fixture(scope="module")
def release(helm: None) -> Release:
    spot = {"name": "spot", "replicas": SPOT, "tolerations": [{"key": "spot", "operator": "Exists"}]}
    pools = {"pools": [{"name": "reserved", "replicas": 2}, spot]}
    return render(values(trainer={"nodes": NODES}, rollout=pools), crds=ALL_CRDS)


@dataclasses.dataclass
class Month:
    """What 30 days did to a run."""

    failed: str
    day: float
    served: float
    """Share of the spot replicas' time in which they ran."""
    refused: int
    """Evictions of the trainer that its budget did not allow."""


def month(release: Release, job_set: Json, seed: int = 0) -> Month:
    """Spot nodes are reclaimed every 12 hours each, two nodes a day are drained, a trainer's node is lost every week, a
    container of a replica crashes every day, and Kueue preempts the run twice."""
    run, chance = JobSet(job_set), random.Random(seed)
    reclaims_s = [chance.uniform(0, RECLAIMED_S) for _ in range(SPOT)]
    budgets = {"trainer": release.one("PodDisruptionBudget", "trainer")["spec"]["minAvailable"]}
    served, refused, now_s = 0, 0, 0.0

    def at(every_s: float, phase_s: float = 0.0) -> bool:
        return (now_s - phase_s) % every_s < STEP_S and now_s >= phase_s

    while now_s < DAYS * DAY_S and not run.failed:
        spot = run.jobs["rollout-spot"]
        for index in spot.running(now_s):
            if at(RECLAIMED_S, reclaims_s[index]):
                spot.fail(index, now_s, disrupted=True)
        if at(12 * HOUR_S, 6 * HOUR_S):
            role = chance.choice(["trainer", "rollout-reserved", "reward"])
            refused += not run.evict(role, 0, now_s, budgets.get(role, 1))
        if at(7 * DAY_S, 3 * DAY_S):
            lost, *others = run.jobs["trainer"].running(now_s)
            run.jobs["trainer"].fail(lost, now_s, disrupted=True)
            for index in others:  # its peer is gone
                run.jobs["trainer"].fail(index, now_s, disrupted=False, exit_code=1)
        if at(DAY_S, 9 * HOUR_S):
            spot.fail(chance.randrange(SPOT), now_s, disrupted=False, exit_code=137)
        if at(13 * DAY_S, 11 * DAY_S):
            run.suspend(now_s + 2 * HOUR_S)
        run.look()
        served += len(run.jobs["rollout-spot"].running(now_s))
        now_s += STEP_S
    return Month(run.failed, now_s / DAY_S, served * STEP_S / (SPOT * now_s), refused)


def without(*fields: str) -> Callable[[Json], None]:
    def strip(job: Json) -> None:
        for field in fields:
            job.pop(field, None)

    return strip


def as_before(job: Json) -> None:
    """Every Job of the JobSet as charts usually have it: a limit for all failures, and no policy."""
    without("podFailurePolicy", "backoffLimitPerIndex", "maxFailedIndexes")(job)
    job["backoffLimit"] = 100
    job["template"]["spec"]["restartPolicy"] = "OnFailure"


def changed(release: Release, change: Callable[[Json], None]) -> Json:
    job_set = copy.deepcopy(release.one("JobSet", "jobset"))
    for job in job_set["spec"]["replicatedJobs"]:
        change(job["template"]["spec"])
    return job_set


@pytest.mark.parametrize("seed", range(5))
def test_no_disruption_of_thirty_days_ends_a_run_and_replicas_are_back_within_minutes(
    release: Release, seed: int
) -> None:
    survived = month(release, release.one("JobSet", "jobset"), seed)
    assert (survived.failed, round(survived.day)) == ("", DAYS)
    assert survived.served > 0.97  # ten minutes of twelve hours, and four hours without quota
    assert survived.refused > 0  # drains of the trainer's nodes


def test_the_simulation_sees_a_run_that_reclaimed_nodes_end(release: Release) -> None:
    job_set = changed(release, as_before)
    del job_set["spec"]["failurePolicy"]
    ended = month(release, job_set)
    assert ended.failed == "rollout-spot: BackoffLimitExceeded"
    assert 2.5 < ended.day < 4


def test_the_simulation_sees_replicas_wait_for_those_of_other_nodes(release: Release) -> None:
    shared_delay = month(release, changed(release, without("backoffLimitPerIndex")))
    assert shared_delay.failed == ""
    assert shared_delay.served < month(release, release.one("JobSet", "jobset")).served


def test_a_trainer_that_crashes_again_and_again_fails_the_run_and_wrong_settings_do_at_once(release: Release) -> None:
    for exit_code, starts, reason in ((1, 101, "BackoffLimitExceeded"), (INVALID_SETTINGS, 1, "PodFailurePolicy")):
        run = JobSet(release.one("JobSet", "jobset"))
        for crash in range(starts):
            assert not run.failed
            for index in range(NODES):  # all of its pods end together
                run.jobs["trainer"].fail(index, crash * HOUR_S, disrupted=False, exit_code=exit_code)
            run.look()
        assert run.failed == f"trainer: {reason}"


@pytest.mark.parametrize("role", ["rollout-spot", "rollout-reserved", "reward"])
def test_no_replica_ends_the_run_however_it_fails(release: Release, role: str) -> None:
    run = JobSet(release.one("JobSet", "jobset"))
    for crash in range(100_000):
        run.jobs[role].fail(0, crash * HOUR_S, disrupted=False, exit_code=(1, 2, 137, INVALID_SETTINGS)[crash % 4])
    run.look()
    assert not run.failed
    run.jobs[role].failed = "DeadlineExceeded"  # whatever else may fail a Job
    run.look()
    assert not run.failed


def test_no_pod_holds_a_gpu_while_models_are_downloaded() -> None:
    release = render(values(models=["hf://Qwen/Qwen3-8B@main"], kueue={"queue": "research"}), crds=ALL_CRDS)
    (job_set,) = release.of("JobSet")
    assert not release.of("Job")
    assert created(job_set, ()) == ["models", "reward"]
    assert created(job_set, {"models"}) == ["models", "trainer", "rollout", "reward"]
    with_gpus = {
        labels_of["app.kubernetes.io/component"]
        for job in jobs_of(job_set)
        for labels_of in [job["metadata"]["labels"]]
        if any(GPU in box["resources"]["requests"] for box in template_of(job)["spec"]["containers"])
    }
    assert with_gpus == {"trainer", "rollout"}
    assert not any(
        box["name"] == "models"
        for job in jobs_of(job_set)
        for box in template_of(job)["spec"].get("initContainers", ())
    )


def test_a_download_beside_the_run_is_queued_as_the_run_is() -> None:
    chosen = values()["run"]["config"]
    queued = values(
        models=["hf://Qwen/Qwen3-8B@main"], kueue={"queue": "research"}, run={"config": chosen, "kind": "pod"}
    )
    jobs = render(queued, crds=ALL_CRDS).of("Job")
    assert [job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] for job in jobs] == ["research"] * 2


def test_the_bus_is_the_last_pod_that_a_full_node_ends_and_is_placed_as_every_role() -> None:
    placed = {"nodeSelector": {"pool": "cpu"}, "podLabels": {"team": "a"}, "podAnnotations": {"backup": "yes"}}
    own = {**placed, "podSecurityContext": {"runAsUser": 2000}, "exporter": "registry.test/redis_exporter:1"}
    more: Json = {"trainer": {"priorityClassName": "high"}, "defaults": {"priorityClassName": "low"}}
    release = render(values(valkey=own, **more), crds=ALL_CRDS)
    template = template_of(release.workload("bus"))
    for container in template["spec"]["containers"]:  # Guaranteed: kubernetes.io/docs/concepts/workloads/pods/pod-qos/
        requests = dict(container["resources"]["requests"])
        assert requests.pop("ephemeral-storage", "1Gi") == "1Gi"
        assert requests == container["resources"]["limits"]
        assert container["resources"]["limits"].keys() == {"cpu", "memory"}
    assert template["spec"]["priorityClassName"] == "high"
    assert template["spec"]["nodeSelector"] == {**placed["nodeSelector"], "kubernetes.io/arch": "amd64"}
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["metadata"]["annotations"] == placed["podAnnotations"]
    assert template["spec"]["securityContext"]["runAsUser"] == 2000
    (monitor,) = release.of("PodMonitor")
    (chosen,) = monitor["spec"]["selector"]["matchExpressions"]
    assert "bus" in chosen["values"]
    ingress = release.one("NetworkPolicy", "bus")["spec"]["ingress"]
    assert sorted(port["port"] for rule in ingress for port in rule["ports"]) == [6379, 9400]
