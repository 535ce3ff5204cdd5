"""The run's TOML file and the chart's values for a layout."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from penstock.services.plan.hardware import Cluster
from penstock.services.plan.layouts import Candidate, Planner
from penstock.services.plan.report import accepted
from penstock.shared.errors import SettingsError
from penstock.shared.files.durable import write_whole
from penstock.shared.settings import Settings, loads

_OF_TRAINER = ("zero_stage", "optimizer", "offload")


def write(settings: Settings, candidates: Sequence[Candidate], planner: Planner, folder: Path) -> tuple[Path, Path]:
    """Write ``run.toml`` and ``values.json`` for the fastest layout that this version supports. Raises SettingsError:
    no layout is accepted, or the folder cannot be written.
    """
    refused: SettingsError | None = None
    cluster = planner.cluster
    for candidate in (each for each in candidates if accepted(each.layout, cluster, planner.work)):
        run = tomli_w.dumps(run_values(settings, candidate, cluster))
        try:
            loads(run, "run.toml")
            break
        except SettingsError as error:
            refused = refused or error
    else:
        raise refused or SettingsError(
            "expected a layout that fits and that this version supports, found none: change --gpus"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "run.toml", run)
        write_whole(folder / "values.json", json.dumps(chart_values(candidate, cluster), indent=2) + "\n")
    except OSError as error:
        raise SettingsError(f"expected a folder to write to at {folder}, found: {error}: change --write") from error
    return folder / "run.toml", folder / "values.json"


def run_values(settings: Settings, candidate: Candidate, cluster: Cluster) -> dict[str, Any]:
    values = settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    layout, trainer = candidate.layout, candidate.layout.trainer
    table = values.setdefault("trainer", {})
    table |= {name: getattr(trainer, name) for name in _OF_TRAINER}
    table["ranks"] = min(trainer.ranks, cluster.per_node) if cluster.nodes > 1 else trainer.ranks
    rollout = values.setdefault("rollout", {})
    rollout |= {"replicas": max(1, layout.all_replicas), "max_groups": candidate.max_groups}
    rollout["engines_per_gpu"] = layout.engines
    rollout.setdefault("vllm", {})["tensor_parallel_size"] = layout.tensor_parallel
    weights = values.setdefault("weights", {})
    weights["transport"] = "pull" if trainer.snapshots else "file"
    if not trainer.snapshots:
        weights.pop("snapshots", None)
    in_turn = layout.placement == "shared"  # where weights are always replaced while generation is paused
    weights["shadow"] = "auto" if layout.shadow or in_turn else "bucketed"
    values.pop("placement", None)
    if candidate.utilization:
        rollout["vllm"]["gpu_memory_utilization"] = candidate.utilization
    if layout.placement == "shared":
        values["placement"] = {"mode": "shared"}
        table.pop("gpus", None)
        rollout.pop("gpus", None)
    elif layout.placement == "at once":
        table["gpus"] = rollout["gpus"] = list(range(layout.gpus))
    elif cluster.nodes == 1:
        table["gpus"] = list(range(trainer.ranks))
        rollout["gpus"] = list(range(trainer.ranks, layout.gpus - layout.scoring))
    if layout.scoring and cluster.nodes == 1:
        reward = values.setdefault("reward", {})
        reward["gpus"] = list(range(layout.gpus - layout.scoring, layout.gpus))
        reward.get("models", {}).pop("device", None)  # the only one that it sees
    return values


def chart_values(candidate: Candidate, cluster: Cluster) -> dict[str, Any]:
    """Return the chart's values, without those that a cluster's owner knows (image, storage). Layouts that share GPUs are
    one pod, which has each GPU once: pods share none.
    """
    layout, product = candidate.layout, f"NVIDIA-{cluster.gpu.name}"
    if layout.borrowed:
        return {"run": {"kind": "pod"}, "pod": {"gpu": {"count": layout.gpus, "product": product}}}
    nodes = -(-layout.trainer.ranks // cluster.per_node)
    hosts = -(-layout.tensor_parallel // cluster.per_node)
    return {
        "trainer": {"nodes": nodes, "gpu": {"count": layout.trainer.ranks // nodes, "product": product}},
        "rollout": {
            "replicas": max(1, layout.all_replicas),
            "nodes": hosts,
            "gpu": {"count": layout.tensor_parallel // hosts, "product": product},
        },
        **({"reward": {"gpu": {"count": 1, "product": product}}} if layout.scoring else {}),
    }
