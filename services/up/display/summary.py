"""Closing message of a run."""

import json
import shlex
from pathlib import Path

from penstock.services.client.coordinator import last_step
from penstock.services.plan.measured import mean_metrics
from penstock.services.up.display import view
from penstock.shared.advice import advice
from penstock.shared.errors import SettingsError
from penstock.shared.files.checkpoint_folder import CHECKPOINTS
from penstock.shared.files.durable import read_object
from penstock.shared.settings import SETTINGS_FILE, load


def text(run_folder: Path, resumable: bool) -> str:
    """Return the closing message; ``resumable`` if the run was interrupted."""
    folder = _short(run_folder)
    if resumable:
        parts = [f"interrupted after step {last_step(run_folder)}"]
    else:
        summary = read_object(run_folder / "summary.json")
        parts = [_figures(summary), _bound(run_folder, bool(summary.get("gpu_hours")))]
    parts.append(_places(run_folder, folder, resumable))
    parts.append(_next(run_folder, folder, resumable))
    return "\n\n".join(part for part in parts if part)


def _figures(summary: dict[str, object]) -> str:
    if not summary:
        return ""
    before, after = _number(summary, "accuracy_before"), _number(summary, "accuracy_after")
    steps = summary.get("steps", 0)
    lines = [f"{summary.get('state', 'ended')}: {steps} {'step' if steps == 1 else 'steps'}"]
    if before is not None and after is not None:
        lines.append(f"held-out accuracy   {before:.3f} → {after:.3f}")
    lines.append(f"training time       {view.duration(_number(summary, 'training_s'))}")
    lines.append(f"samples/s           {view.rate(_number(summary, 'samples_per_s'))}")
    if gpu_hours := _number(summary, "gpu_hours"):
        lines.append(f"GPU-hours           {view.number(gpu_hours, 1)}")
    counts = summary.get("counts")
    ended = counts.items() if isinstance(counts, dict) else ()
    if dead := {name: count for name, count in ended if name.startswith("dead:") and count}:
        where = ", ".join(name.removeprefix("dead:") for name in dead)
        admitted = summary.get("groups_admitted")
        lines.append(f"groups given up     {sum(dead.values())} of {admitted} (dead letters of {where})")
    return "\n".join(lines)


def _bound(run_folder: Path, on_gpus: bool) -> str:
    try:
        settings = load(run_folder / SETTINGS_FILE, environment={})
    except SettingsError:
        return ""
    replicas = settings.rollout.replicas if settings.kind.generates else 0
    return advice(mean_metrics(run_folder), replicas, on_gpus, settings.gpu_sharing)


def _places(run_folder: Path, folder: str, resumable: bool) -> str:
    policy = (
        "of an earlier end of this run, which went on since" if resumable else "the trained policy in Hugging Face form"
    )
    known = (
        ("report.html", "curves and rollouts; open it in a browser"),
        ("policy", policy),
        ("summary.json", "the figures above, and more"),
        ("logs", "logs of all processes"),
    )
    present = [(f"{folder}/{name}", purpose) for name, purpose in known if (run_folder / name).exists()]
    width = max((len(place) for place, _ in present), default=0)
    return "\n".join(f"{place:<{width}}  {purpose}" for place, purpose in present)


def _next(run_folder: Path, folder: str, resumable: bool) -> str:
    if resumable:
        return f"continue the run:\n  penstock up --resume {shlex.quote(folder)}"
    if not (run_folder / "policy").is_dir():
        stored = any((run_folder / CHECKPOINTS).glob("step-*"))
        return f"write the policy:\n  penstock export {shlex.quote(folder)}" if stored else ""
    load = f"from transformers import AutoModelForCausalLM as M; print(M.from_pretrained({json.dumps(f'{folder}/policy')}))"
    return f"load the policy:\n  python -c {shlex.quote(load)}"


def _number(summary: dict[str, object], name: str) -> float | None:
    value = summary.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _short(folder: Path) -> str:
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)
