"""What Kubernetes and JobSet do with rendered Jobs whose pods fail, over weeks of simulated time.

No API server or controller could be had, so these are models. Rules and their sources:

- a failed pod is matched against ``podFailurePolicy`` in order; ``Ignore`` does not count it, ``FailJob`` fails the Job:
  kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
- evictions, preemptions, node pressure, lost nodes and nodes that shut down set ``DisruptionTarget``:
  kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions
- more counted failures than ``backoffLimit`` fail the Job, with OnFailure restarts of containers too:
  …/job/#pod-backoff-failure-policy; ``backoffLimitPerIndex`` and ``maxFailedIndexes``: …/job/#backoff-limit-per-index
- a replacement waits 10 s, doubled by each failure, at most 10 minutes after the last one. That counts ignored failures as
  well, and those of the whole Job unless there is a limit per index: kubernetes/kubernetes pkg/controller/job/backoff_utils.go
- pods of a suspended Job are deleted without being counted: …/job/#suspending-a-job
- an eviction that would leave fewer than ``minAvailable`` healthy pods is refused; a lost node asks nobody:
  kubernetes.io/docs/concepts/scheduling-eviction/api-eviction/
- the first of ``failurePolicy.rules`` that names a failed Job decides, else RestartJobSet within ``maxRestarts``; without a
  policy the JobSet fails: kubernetes-sigs/jobset pkg/controllers/failure_policy.go
- a Job with ``dependsOn`` is created once those that it names have that status: pkg/controllers/depends_on.go
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping

from tests.support.chart import Json

RETRY_S, LONGEST_RETRY_S = 10.0, 600.0
UNLIMITED = 2**31 - 1


@dataclasses.dataclass
class Job:
    """One Job of a JobSet: pods by index, its counters, and why it has failed."""

    name: str
    spec: Json
    counted: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    failures: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """By index, with those that are ignored; they only delay."""
    starts_s: dict[int, float] = dataclasses.field(default_factory=dict)
    """When each index has its pod again."""
    failed: str = ""
    """The reason of the condition Failed."""

    @property
    def pods(self) -> int:
        return int(self.spec["completions"])

    def running(self, now_s: float) -> list[int]:
        return [index for index in range(self.pods) if self.starts_s.get(index, 0.0) <= now_s]

    def fail(self, index: int, now_s: float, *, disrupted: bool, exit_code: int = 143) -> None:
        """A pod ends with ``exit_code``, or a container that its node restarts."""
        action = "Count"
        for rule in self.spec.get("podFailurePolicy", {}).get("rules", ()):
            if self._matches(rule, disrupted, exit_code):
                action = rule["action"]
                break
        self.failures[index] += 1
        self.counted[index] += action != "Ignore"
        self.failed = self.failed or self._verdict(action)
        together = () if "backoffLimitPerIndex" in self.spec else set(range(self.pods)) - set(self.running(now_s))
        for waiting in {index, *together}:
            self.starts_s[waiting] = now_s + self._delay_s(index)

    def _matches(self, rule: Json, disrupted: bool, exit_code: int) -> bool:
        if codes := rule.get("onExitCodes"):
            assert codes["operator"] == "In"
            return exit_code in codes["values"]
        (condition,) = rule["onPodConditions"]
        assert condition == {"type": "DisruptionTarget", "status": "True"}
        return disrupted

    def _verdict(self, action: str) -> str:
        if action == "FailJob":
            return "PodFailurePolicy"
        if self.counted.total() > self.spec["backoffLimit"]:
            return "BackoffLimitExceeded"
        per_index = self.spec.get("backoffLimitPerIndex", UNLIMITED)
        lost = sum(count > per_index for count in self.counted.values())
        return "MaxFailedIndexesExceeded" if lost > self.spec.get("maxFailedIndexes", UNLIMITED) else ""

    def _delay_s(self, index: int) -> float:
        own = "backoffLimitPerIndex" in self.spec
        failures = self.failures[index] if own else self.failures.total()
        return float(min(RETRY_S * 2 ** min(failures - 1, 10), LONGEST_RETRY_S))


class JobSet:
    """A run: the Jobs of a rendered JobSet, until it has failed or its trainer is done."""

    def __init__(self, manifest: Json) -> None:
        self.spec: Json = manifest["spec"]
        self.restarts = 0
        self.jobs: Mapping[str, Job] = {}
        self.failed = ""
        """The Job that ended the run, and the reason."""
        self._create()

    def _create(self) -> None:
        self.jobs = {job["name"]: Job(job["name"], job["template"]["spec"]) for job in self.spec["replicatedJobs"]}

    def look(self) -> None:
        """The controller reconciles: a failed Job meets the failure policy."""
        failed = [job for job in self.jobs.values() if job.failed]
        if not failed:
            return
        policy: Json = self.spec.get("failurePolicy", {"rules": [{"action": "FailJobSet"}]})
        action, job = self._action(policy, failed)
        if action == "RestartJobSet":
            self.restarts += 1
            action = action if self.restarts <= policy.get("maxRestarts", 0) else "FailJobSet"
        if action == "FailJobSet":
            self.failed = f"{job.name}: {job.failed}"
        else:
            self._create()

    @staticmethod
    def _action(policy: Json, failed: list[Job]) -> tuple[str, Job]:
        for rule in policy.get("rules", ()):
            for job in failed:
                if job.name in rule.get("targetReplicatedJobs", [job.name]):
                    return rule["action"], job
        return "RestartJobSet", failed[0]

    def suspend(self, until_s: float) -> None:
        """Kueue takes the quota back, and gives it again at ``until_s``."""
        for job in self.jobs.values():
            job.starts_s = dict.fromkeys(range(job.pods), until_s)

    def evict(self, name: str, index: int, now_s: float, min_available: int) -> bool:
        """A drain asks for an eviction; return whether the PodDisruptionBudget allowed it."""
        job = self.jobs[name]
        if len(job.running(now_s)) <= min_available:
            return False
        job.fail(index, now_s, disrupted=True)
        return True


def created(job_set: Json, complete: Collection[str]) -> list[str]:
    """Return the Jobs that the controller has created when those in ``complete`` are done, in order."""
    names = []
    for job in job_set["spec"]["replicatedJobs"]:
        awaited = job.get("dependsOn", ())
        assert all(other["status"] == "Complete" for other in awaited)
        if all(other["name"] in complete for other in awaited):
            names.append(job["name"])
    return names
