"""The model card of a pushed policy: settings, curves, evaluations and ledger, from the run's files."""

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from penstock.services.coordinator.records.jsonl import read
from penstock.services.coordinator.records.summary import one_line_a_step
from penstock.shared.bus.keys import NO_ENDINGS
from penstock.shared.files.durable import read_object
from penstock.shared.settings import RunKind, Settings
from penstock.shared.settings.reading.published import public_text, published

_CURVES = ("reward_mean", "kl_mean", "entropy", "response_tokens_mean", "lag_mean")
_SUPERVISED = ("loss", "evaluation_loss", "preference_accuracy", "evaluation_accuracy", "entropy", "learning_rate")
_ROWS = 20
_SECTIONS = frozenset({"policy", "data", "sampling", "reward", "algorithm", "trainer"})
_OF_GENERATION = frozenset({"sampling", "reward"})
_SENTENCES = frozenset({"reason", "changed_inputs", "missing"})
"""Fields of summary.json that hold texts of people and paths."""


def card(settings: Settings, version: int, step: int) -> str:
    """Return README.md for a version of the run's policy."""
    folder = settings.run_folder
    parts = [
        _front(settings),
        f"# {settings.run.id}, version {version}\n\nTrained from `{_model(settings)}` for {step} steps with Penstock "
        f"({_method(settings)[1]}).",
        _table("Curves", _curves(settings, step)),
        _table("Held-out accuracy", _evaluations(folder, step)),
        _table("Ledger: how every group ended", _ledger(folder)),
        f"## Settings\n\n```toml\n{_settings(settings)}```",
        "`penstock/metrics.jsonl`, `penstock/evaluations.jsonl` and `penstock/summary.json` are the run's records.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def copy_records(run_folder: Path, to: Path) -> None:
    """Write the records that accompany a policy: figures, no sentences."""
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        if (run_folder / name).is_file():
            shutil.copy(run_folder / name, to / name)
    if summary := read_object(run_folder / "summary.json"):
        figures = {name: value for name, value in summary.items() if name not in _SENTENCES}
        (to / "summary.json").write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _front(settings: Settings) -> str:
    lines = ["---", "library_name: transformers", f"tags: [penstock, {_method(settings)[0]}]"]
    model = settings.policy.model
    if not Path(model).exists() and public_text("policy.model", model) == model:
        lines.append(f"base_model: {json.dumps(model)}")
    return "\n".join([*lines, "---"])


def _method(settings: Settings) -> tuple[str, str]:
    """Return the tag of what trained the policy, and what it is."""
    algorithm = settings.algorithm
    if settings.kind is RunKind.DEMONSTRATIONS:
        return "sft", "supervised fine-tuning on demonstrations (SFT)"
    if settings.kind is RunKind.PAIRS:
        return "dpo", "direct preference optimization on given pairs (DPO)"
    parts = [algorithm.preset, *["distillation from a teacher"] * (algorithm.distillation > 0)]
    parts += ["beside demonstrations"] * (settings.kind is RunKind.MIXTURE)
    return "reinforcement-learning", ", ".join(parts)


def _model(settings: Settings) -> str:
    """Return the model's name, without this machine's folders."""
    model = settings.policy.model
    return public_text("policy.model", os.path.abspath(model) if Path(model).exists() else model) or "a local model"  # noqa: PTH100


def _settings(settings: Settings) -> str:
    return tomli_w.dumps(published(settings, _SECTIONS if settings.kind.generates else _SECTIONS - _OF_GENERATION))


def _curves(settings: Settings, step: int) -> list[dict[str, Any]]:
    lines = [
        line
        for line in one_line_a_step(read(settings.run_folder / "metrics.jsonl"))
        if isinstance(at := line.get("step"), int) and at <= step
    ]
    every = max(1, math.ceil(len(lines) / _ROWS))
    chosen = [line for place, line in enumerate(lines) if place % every == 0 or place == len(lines) - 1]
    known = _CURVES if settings.kind.generates else _SUPERVISED
    names = [name for name in known if any(line.get(name) is not None for line in chosen)]
    return [{name: line.get(name) for name in ("step", *names)} for line in chosen]


def _evaluations(folder: Path, step: int) -> list[dict[str, Any]]:
    names = ("step", "version", "set", "accuracy", "accuracy_low", "accuracy_high", "problems")
    lines = [
        line for line in read(folder / "evaluations.jsonl") if isinstance(at := line.get("step"), int) and at <= step
    ]
    return [{name: line.get(name) for name in names} for line in lines]


def _ledger(folder: Path) -> list[dict[str, Any]]:
    try:
        summary = read_object(folder / "summary.json")
        counts = {"admitted": summary["groups_admitted"], **summary["counts"]}
    except (KeyError, TypeError):
        return []
    return [{"ending": name, "groups": count} for name, count in counts.items() if name not in NO_ENDINGS]


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    names = list(rows[0])
    lines = [_line(names), _line(["---"] * len(names)), *(_line(map(_cell, row.values())) for row in rows)]
    return "\n".join([f"## {title}", "", *lines])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
