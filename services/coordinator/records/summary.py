"""The run's summary, from the bus and metrics.jsonl only.

``training_s`` runs from the first admission to the last commit, without pauses and without stops of all processes.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from penstock.services.coordinator.evaluation.results import Evaluation
from penstock.services.coordinator.records.jsonl import finite
from penstock.shared.bus.messages import Json
from penstock.shared.bus.stores.policy.ledger import ENDED, POLICY, RunState, RunStatus
from penstock.shared.bus.stores.run.functions import History, Source
from penstock.shared.files.durable import write_whole
from penstock.shared.settings import Settings

_ENDS = 5
"""Steps averaged at each end, which do not overlap (``mean_ends``)."""
_UNTRAINED = {
    "stale": "stale_samples", "too_long": "too_long_samples", "unscored": "unscored_samples",
    "out_of_memory": "dropped_out_of_memory",
}  # fmt: skip
_PACKAGES = (
    *("penstock", "numpy", "msgpack", "redis", "pydantic", "fastapi", "uvicorn", "pyarrow"),
    *("torch", "transformers", "deepspeed", "math-verify", "vllm"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    run_id: str
    state: str
    reason: str
    accuracy_before: float | None
    """Initial policy, first set."""
    accuracy_after: float | None
    """Last evaluated version."""
    training_s: float
    steps: int
    samples: int
    samples_per_s: float
    tokens_per_s: float
    """Trained response tokens."""
    reward_first: float | None
    """Mean over the first steps (``mean_ends``)."""
    reward_last: float | None
    lag_mean: float | None
    lag_max: int | None
    gpu_hours: float
    """Held by the run's processes, from their start to the end of the run."""
    switches: int
    """Of shared devices to training."""
    switch_s_mean: float | None
    """To training and back."""
    switch_rung_max: int | None
    score_turns: int
    """Of reward models on a shared device."""
    score_turn_s_mean: float | None
    rewound_steps: int
    """Acknowledged steps that the bus lost and no checkpoint held; their lines in metrics.jsonl are superseded."""
    rewound_groups: int
    groups_admitted: int
    counts: dict[str, int]
    """trained, dropped:<reason>, dead:<stream>."""
    samples_untrained: dict[str, int]
    """Of trained groups: stale, too_long, unscored, out_of_memory."""
    head: int | None
    evaluations: int
    started_at_s: float
    finished_at_s: float
    settings_sha256: str
    functions: dict[str, list[dict[str, Json]]]
    """Of the user's own: SHA-256 of the source file, and the version after which it was used (null: from the start)."""
    bus: str
    versions: dict[str, str]
    changed_inputs: list[str]
    """Files that changed, and with which the run was continued."""
    missing: dict[str, str]
    """By what the run was to leave and did not (policy, checkpoint, trackers): why."""


def missing(status: RunStatus) -> dict[str, str]:
    """Return what an ended run lacks: what could not be written, and a finished run's policy unless it is known to be written."""
    lacks = dict(status.missing)
    if status.state is not RunState.FINISHED or status.policy_step == status.step:
        lacks.pop(POLICY, None)
    else:
        lacks.setdefault(POLICY, "the trainer had not written it when the run ended")
    return lacks


def training_seconds(status: RunStatus, steps: int, now_s: float) -> float:
    """From the first admission to the last commit, or now."""
    if status.first_admission_s is None:
        return 0.0
    end_s = status.changed_at_s if status.state is RunState.PAUSED else now_s
    if status.state in ENDED or status.step >= steps:
        end_s = (status.last_commit_s or status.first_admission_s) + status.paused_since_commit_s
    return max(0.0, end_s - status.first_admission_s - status.paused_s)


def summarize(
    settings: Settings,
    status: RunStatus,
    counts: Mapping[str, int],
    evaluations: Sequence[Evaluation],
    lines: Iterable[dict[str, Json]],
    bus: str,
    functions: History | None = None,
    changed_inputs: Sequence[str] = (),
) -> Summary:
    """``lines`` are metrics.jsonl."""
    steps = [line for line in one_line_a_step(lines) if _figure(line, "step") <= status.step]  # later ones are lost
    samples = int(sum(_figures(steps, "samples")))
    tokens = sum(_figure(step, "samples") * _figure(step, "response_tokens_mean") for step in steps)
    training_s = training_seconds(status, settings.run.steps, time.time())
    reward_first, reward_last = mean_ends(_figures(steps, "reward_mean"))
    lag_mean, lag_max = _lag(steps)
    of_first = [evaluation for evaluation in evaluations if evaluation.set == evaluations[0].set]
    return Summary(
        run_id=settings.run.id,
        state=status.state.value,
        reason=status.reason,
        accuracy_before=next((evaluation.accuracy for evaluation in of_first if evaluation.initial), None),
        accuracy_after=next((evaluation.accuracy for evaluation in reversed(of_first) if not evaluation.initial), None),
        training_s=training_s,
        steps=status.step,
        samples=samples,
        samples_per_s=samples / training_s if training_s else 0.0,
        tokens_per_s=tokens / training_s if training_s else 0.0,
        reward_first=reward_first,
        reward_last=reward_last,
        lag_mean=lag_mean,
        lag_max=lag_max,
        gpu_hours=status.gpu_s / 3600.0,
        switches=(switches := int(sum(_figures(steps, "switches")))),
        switch_s_mean=_switch_seconds(steps) / switches if switches else None,
        switch_rung_max=int(max(_figures(steps, "switch_rung"))) if switches else None,
        score_turns=(score_turns := int(sum(_figures(steps, "score_turns")))),
        score_turn_s_mean=sum(_figures(steps, "score_turn_s")) / score_turns if score_turns else None,
        rewound_steps=status.rewound.steps,
        rewound_groups=status.rewound.groups,
        groups_admitted=status.cursor,
        counts=dict(counts),
        samples_untrained={reason: int(sum(_figures(steps, name))) for reason, name in _UNTRAINED.items()},
        head=status.head,
        evaluations=len({evaluation.version for evaluation in evaluations}),
        started_at_s=status.created_at_s,
        finished_at_s=time.time(),
        settings_sha256=digest(settings),
        functions={name: [_source(each) for each in sources] for name, sources in (functions or {}).items()},
        bus=bus,
        versions=versions(),
        changed_inputs=list(changed_inputs),
        missing=missing(status),
    )


def _source(source: Source) -> dict[str, Json]:
    return {"sha256": source.sha256, "after_version": None if source.of_checkpoint else source.version}


def write(summary: Summary, folder: Path) -> Path:
    path = folder / "summary.json"
    write_whole(path, json.dumps(finite(dataclasses.asdict(summary)), indent=2, ensure_ascii=False) + "\n")
    return path


def one_line_a_step(lines: Iterable[dict[str, Json]]) -> list[dict[str, Json]]:
    steps: list[dict[str, Json]] = []
    for line in lines:
        if not isinstance(line.get("step"), int):
            continue
        while steps and _figure(steps[-1], "step") >= _figure(line, "step"):
            steps.pop()
        steps.append(line)
    return steps


def digest(settings: Settings) -> str:
    """Return the SHA-256 of the settings without name and place."""
    values = settings.model_dump(mode="json", exclude={"run": {"id", "folder"}, "bus": {"url"}, "weights": {"folder"}})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _figures(steps: Sequence[dict[str, Json]], name: str) -> list[float]:
    values = (step.get(name) for step in steps)
    return [float(value) for value in values if isinstance(value, (int, float))]


def _figure(step: dict[str, Json], name: str) -> float:
    return sum(_figures([step], name))


def mean_ends(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return a metric's means over the first and over the last steps.

    >>> mean_ends([4.0, 2.0, 3.0, 1.0])
    (3.0, 2.0)
    """
    count = max(1, min(_ENDS, len(values) // 2))
    first, last = values[:count], values[-count:]
    return (sum(first) / count, sum(last) / count) if values else (None, None)


def _switch_seconds(steps: Sequence[dict[str, Json]]) -> float:
    parts = ("switch_train_s", "switch_generate_s", "phase_offload_s", "phase_reload_s")
    return sum(sum(_figures(steps, part)) for part in parts)


def _lag(steps: Sequence[dict[str, Json]]) -> tuple[float | None, int | None]:
    counts: dict[int, int] = {}
    for step in steps:
        lag_counts = step.get("lag_counts")
        for lag, samples in (lag_counts if isinstance(lag_counts, dict) else {}).items():
            counts[int(lag)] = counts.get(int(lag), 0) + (samples if isinstance(samples, int) else 0)
    total = sum(counts.values())
    if not total:
        return None, None
    return sum(lag * samples for lag, samples in counts.items()) / total, max(counts)
