"""``penstock report A --against B``: the settings in which two runs differ, their curves, and what they answered to the same prompts."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from penstock.services.coordinator.records.jsonl import read
from penstock.services.coordinator.records.summary import one_line_a_step
from penstock.services.up.display import console
from penstock.services.up.display.view import spark
from penstock.shared.settings import Settings, load_run
from penstock.shared.text.terminal import escaped_line

_PLACES = frozenset(
    ("run.id", "run.folder", "bus.url", "weights.folder", "coordinator.token_file", "reward.executor.address")
)
"""Settings that differ between all runs."""
_CURVES = (
    *("reward_mean", "kl_mean", "entropy", "response_tokens_mean", "truncated_fraction", "grad_norm", "lag_mean"),
    *("samples_per_s", "step_s"),
)
_SUPERVISED = ("loss", "evaluation_loss", "evaluation_accuracy", "preference_accuracy", "preference_margin")
"""First, where a run has no rewards."""
_SCORER = "scorer_mean_"
_ENDS = 5
"""Steps averaged at the end."""
_POINTS = 24
"""Of a drawn curve."""
_GROUPS, _SHOWN_TEXT = 10, 60


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """A recorded group of a problem."""

    problem: str
    """Its place in the dataset."""
    step: int
    reward_mean: float
    best: str
    """The completion with the highest reward."""


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """One metric of both runs, over the steps that both have."""

    metric: str
    a: Sequence[float]
    b: Sequence[float]
    last: int = _ENDS
    """Values averaged at the end."""

    @property
    def ends(self) -> tuple[float, float]:
        first, second = self.a[-self.last :], self.b[-self.last :]
        return sum(first) / len(first), sum(second) / len(second)


def settings_differences(a: Settings, b: Settings) -> dict[str, tuple[Any, Any]]:
    """By key, except for names and places."""
    first, second = _flat(a.model_dump(mode="json")), _flat(b.model_dump(mode="json"))
    keys = dict.fromkeys([*first, *second])
    return {
        key: (first.get(key), second.get(key))
        for key in keys
        if key not in _PLACES and first.get(key) != second.get(key)
    }


def curves(a: Path, b: Path) -> tuple[int, list[Curve]]:
    first, second = (one_line_a_step(read(folder / "metrics.jsonl")) for folder in (a, b))
    steps = min(len(first), len(second))
    scorers = sorted({name for line in (*first[:1], *second[:1]) for name in line if name.startswith(_SCORER)})
    has_rewards = any(_values(lines[:steps], _CURVES[0]) for lines in (first, second))
    drawn = [
        Curve(name, _values(first[:steps], name), _values(second[:steps], name))
        for name in (*(() if has_rewards else _SUPERVISED), _CURVES[0], *scorers, *_CURVES[1:])
    ]
    drawn += [Curve(f"accuracy {name}", *both, last=1) for name, both in _accuracies(a, b).items()]
    return steps, [curve for curve in drawn if curve.a and curve.b]


def same_prompts(a: Path, b: Path) -> dict[str, tuple[Group, Group]]:
    """Return the newest groups of problems that both runs recorded, those that differ most in reward first."""
    lines = [list(read(folder / "rollouts.jsonl")) for folder in (a, b)]
    name = (
        "row_id" if all("row_id" in line for line in itertools.chain(*lines) if "problem" in line) else "problem"
    )  # of an older Penstock
    first, second = (_by_problem(of_run, name) for of_run in lines)
    both = {problem: (first[problem], second[problem]) for problem in first if problem in second}
    return dict(sorted(both.items(), key=lambda item: -abs(item[1][0].reward_mean - item[1][1].reward_mean)))


def compare(a: Path, b: Path, *, as_json: bool) -> None:
    differing = settings_differences(load_run(a), load_run(b))
    (steps, drawn), groups = curves(a, b), same_prompts(a, b)
    if as_json:
        console.say_json(
            {
                "settings": {key: list(both) for key, both in differing.items()},
                "steps": steps,
                "last": {curve.metric: list(curve.ends) for curve in drawn},
                "rollouts": {name: list(map(dataclasses.asdict, both)) for name, both in groups.items()},
            }
        )
        return
    _show("settings", [(key, _shown(first), _shown(second)) for key, (first, second) in differing.items()])
    _show(
        f"the last {min(_ENDS, steps)} of {steps} common steps",
        [(curve.metric, _drawn(curve.ends[0], curve.a), _drawn(curve.ends[1], curve.b)) for curve in drawn],
    )
    if not groups:
        return
    _show(
        f"rollouts of {len(groups)} problems that both recorded",
        [(first.problem, _answered(first), _answered(second)) for first, second in list(groups.values())[:_GROUPS]],
    )


def _answered(group: Group) -> str:
    return (
        f"step {group.step}: reward {group.reward_mean:.3g}, {json.dumps(group.best[:_SHOWN_TEXT], ensure_ascii=False)}"
    )


def _by_problem(lines: Iterable[Mapping[str, Any]], name: str) -> dict[str, Group]:
    groups: dict[str, Group] = {}
    for line in lines:
        try:
            completions: Any = line["completions"]
            rated = [(float(each["reward"] or 0.0), str(each["text"])) for each in completions]
            mean = sum(reward for reward, _ in rated) / len(rated)
            groups[str(line[name])] = Group(str(line["problem"]), int(str(line["step"])), mean, max(rated)[1])
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            continue  # from another version
    return groups


def _drawn(end: float, values: Sequence[float]) -> str:
    return f"{end:.4g}  {spark(values, _POINTS)}"


def _show(title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    if not rows:
        console.say(f"{title}: {'no difference' if title == 'settings' else 'nothing to compare'}")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (title, "A", "B"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(escaped_line(cell)) for cell in row))
    console.show(table)


def _accuracies(a: Path, b: Path) -> dict[str, tuple[list[float], list[float]]]:
    first, second = (_by_set(folder) for folder in (a, b))
    return {name: (first[name], second[name]) for name in first if name in second}


def _by_set(folder: Path) -> dict[str, list[float]]:
    accuracies: dict[str, list[float]] = {}
    for line in read(folder / "evaluations.jsonl"):
        if isinstance(accuracy := line.get("accuracy"), (int, float)):
            accuracies.setdefault(str(line.get("set", "heldout")), []).append(float(accuracy))
    return accuracies


def _values(lines: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(line[name]) for line in lines if isinstance(line.get(name), (int, float))]


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
