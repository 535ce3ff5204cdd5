"""``penstock report A --against B``: the settings in which runs differ, their curves, and what they answered to the same prompts."""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from penstock.services.coordinator.records.jsonl import read
from penstock.services.coordinator.records.overlay import write_overlay
from penstock.services.coordinator.records.summary import one_line_a_step
from penstock.services.up.display import console
from penstock.services.up.display.view import spark
from penstock.shared.errors import PenstockError
from penstock.shared.settings import Settings, flat, load_run
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
_SCORER, _ACCURACY = "scorer_mean_", "accuracy "
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
    """One metric of all runs, over the steps that all have."""

    metric: str
    of_runs: Sequence[Sequence[float]]
    last: int = _ENDS
    """Values averaged at the end."""

    @property
    def ends(self) -> list[float]:
        return [statistics.fmean(values[-self.last :]) for values in self.of_runs]


def settings_differences(runs: Sequence[Settings]) -> dict[str, list[Any]]:
    """Return each run's values of those that are not the same in all, by key, except for names and places."""
    all_values = [flat(of.model_dump(mode="json")) for of in runs]
    keys = dict.fromkeys(itertools.chain(*all_values))
    rows = {key: [values.get(key) for values in all_values] for key in keys if key not in _PLACES}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def curves(folders: Sequence[Path]) -> tuple[int, list[Curve]]:
    """Return how many steps all runs have, and the curves that all have."""
    lines = [one_line_a_step(read(folder / "metrics.jsonl")) for folder in folders]
    steps = min(map(len, lines))
    common = [of_run[:steps] for of_run in lines]
    scorers = sorted({name for of_run in common for line in of_run[:1] for name in line if name.startswith(_SCORER)})
    has_rewards = any(_values(of_run, _CURVES[0]) for of_run in common)
    drawn = [
        Curve(name, [_values(of_run, name) for of_run in common])
        for name in (*(() if has_rewards else _SUPERVISED), _CURVES[0], *scorers, *_CURVES[1:])
    ]
    accuracies = [_by_set(folder) for folder in folders]
    sets = [name for name in accuracies[0] if all(name in of_run for of_run in accuracies)]
    drawn += [Curve(f"{_ACCURACY}{name}", [of_run[name] for of_run in accuracies], last=1) for name in sets]
    return steps, [curve for curve in drawn if all(curve.of_runs)]


def same_prompts(folders: Sequence[Path]) -> dict[str, list[Group]]:
    """Return the newest groups of problems that all runs recorded, those that differ most in reward first."""
    groups = [_by_problem(read(folder / "rollouts.jsonl")) for folder in folders]
    shared = {
        problem: [of_run[problem] for of_run in groups]
        for problem in groups[0]
        if all(problem in of_run for of_run in groups)
    }
    return dict(sorted(shared.items(), key=lambda item: -_spread(item[1])))


def _spread(groups: Sequence[Group]) -> float:
    rewards = [group.reward_mean for group in groups]
    return max(rewards) - min(rewards)


def compare(folders: Sequence[Path], *, as_json: bool) -> None:
    """Print the comparison of two runs or more; write their curves over one another into the first one's folder."""
    differing = settings_differences([load_run(folder) for folder in folders])
    (steps, drawn), groups = curves(folders), same_prompts(folders)
    if as_json:
        console.say_json(
            {
                "settings": differing,
                "steps": steps,
                "last": {curve.metric: curve.ends for curve in drawn},
                "rollouts": {name: list(map(dataclasses.asdict, of_runs)) for name, of_runs in groups.items()},
            }
        )
        return
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = list(map(str, folders))
    _show("settings", names, [(key, *map(_shown, values)) for key, values in differing.items()])
    _show(
        f"the last {min(_ENDS, steps)} of {steps} common steps",
        names,
        [(curve.metric, *map(_drawn, curve.ends, curve.of_runs)) for curve in drawn],
    )
    if groups:
        title = f"rollouts of {len(groups)} problems that all recorded"
        shown = list(groups.values())[:_GROUPS]
        _show(title, names, [(of_runs[0].problem, *map(_answered, of_runs)) for of_runs in shown])
    metrics = [curve.metric for curve in drawn if not curve.metric.startswith(_ACCURACY)]
    try:
        console.say(str(write_overlay(list(zip(names, folders, strict=True)), metrics)))
    except OSError as error:
        raise PenstockError(f"could not write the curves over one another in {folders[0]}: {error}") from error


def _answered(group: Group) -> str:
    return (
        f"step {group.step}: reward {group.reward_mean:.3g}, {json.dumps(group.best[:_SHOWN_TEXT], ensure_ascii=False)}"
    )


def _by_problem(lines: Iterable[Mapping[str, Any]]) -> dict[str, Group]:
    groups: dict[str, Group] = {}
    for line in lines:
        try:
            completions: Any = line["completions"]
            rated = [(float(each["reward"] or 0.0), str(each["text"])) for each in completions]
            mean = sum(reward for reward, _ in rated) / len(rated)
            groups[str(line["row_id"])] = Group(str(line["problem"]), int(str(line["step"])), mean, max(rated)[1])
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            continue  # from another version
    return groups


def _drawn(end: float, values: Sequence[float]) -> str:
    return f"{end:.4g}  {spark(values, _POINTS)}"


def _show(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        console.say(f"{title}: {'no difference' if title == 'settings' else 'nothing to compare'}")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (title, *names):
        table.add_column(escaped_line(name), overflow="fold")
    for row in rows:
        table.add_row(*(Text(escaped_line(cell)) for cell in row))
    console.show(table)


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
