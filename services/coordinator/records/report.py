"""report.html: what came of a run, as one file that opens anywhere, offline and without scripts.

Read from the run's records, any of which may be missing or cut short (a run that goes on, a run that was killed); it can be
written at any time and again. It knows no bus and no settings object: only files.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from services.coordinator.records import html
from services.coordinator.records.charts import Band, Series, curves, figure, stack
from services.coordinator.records.columns import (
    Line,
    by_set,
    column,
    known,
    last,
    number,
    one_line_a_step,
    steps_of,
    word,
)
from services.coordinator.records.jsonl import read
from shared.bus.messages import Json
from shared.files.durable import write_whole

_PHASES = {
    "phase_wait_s": "wait for experience",
    "phase_proximal_s": "proximal logprobs",
    "phase_reference_s": "reference logprobs",
    "phase_critic_s": "critic",
    "phase_forward_backward_s": "forward and backward",
    "phase_optimizer_s": "optimizer",
    "phase_snapshot_s": "snapshot",
    "phase_commit_s": "commit",
    "phase_checkpoint_s": "checkpoint",
}
DATA = "data"
"""The source of events that say what is doubtful about the data."""
_SCORER = "scorer_mean_"
"""How the mean value of a scorer is named in a step's report."""
_ROLLOUTS = 8
_COMPLETIONS = 16
_EVENTS = 40


def write_report(run_folder: Path) -> Path:
    """Write ``<run_folder>/report.html``, whole, at once; return its path.

    Raises:
        OSError: the folder cannot be written.
    """
    path = run_folder / "report.html"
    write_whole(path, render(run_folder))
    return path


def render(run_folder: Path) -> str:
    """Return the page on the run in ``run_folder``."""
    summary = _object(run_folder / "summary.json")
    steps = one_line_a_step(list(read(run_folder / "metrics.jsonl")))
    evaluations = list(read(run_folder / "evaluations.jsonl"))
    run_id = word(summary, "run_id") or run_folder.resolve().name
    return html.document(
        f"Penstock: {run_id}",
        [
            _header(run_id, summary, steps),
            _doubts(list(read(run_folder / "events.jsonl"))),
            _headline(summary, steps, evaluations),
            html.section("What it learned", _learning(steps, evaluations), "grid-of"),
            html.section("How it learned", _training(steps), "grid-of"),
            html.section("Where the time went", _times(steps), "grid-of"),
            html.section("How the groups ended", _endings(summary, steps), "grid-of"),
            html.section("To read", _rollouts(list(read(run_folder / "rollouts.jsonl")))),
            html.section("Records", _records(run_folder, summary)),
        ],
    )


# ---------------------------------------------------------------- parts


def _header(run_id: str, summary: Line, steps: Sequence[Line]) -> str:
    state = word(summary, "state") or ("no step yet" if not steps else "no summary yet")
    reason = word(summary, "reason")
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(number(summary, "finished_at_s") or time.time()))
    note = f'<p class="soft">{html.text(reason)}</p>' if reason else ""
    return (
        f'<div class="head"><h1>{html.text(run_id)}</h1><span class="state">{html.text(state)}</span></div>'
        f'<p class="soft">a Penstock run, {at}</p>{note}'
    )


def _doubts(events: Sequence[Line]) -> str:
    """What the coordinator found doubtful about the data when it started last."""
    found = {word(line, "name"): word(line, "detail") for line in events if word(line, "source") == DATA}
    return "".join(f'<p class="bad">{html.text(detail)}</p>' for detail in found.values())


def _headline(summary: Line, steps: Sequence[Line], evaluations: Sequence[Line]) -> str:
    of_first = next(iter(by_set(evaluations).values()), [])
    accuracies = [number(line, "accuracy") for line in of_first]
    before = number(summary, "accuracy_before") if summary else next(iter(accuracies), None)
    after = number(summary, "accuracy_after") if summary else next(reversed(accuracies), None)
    rewards = column(steps, "reward_mean")
    tiles = [
        ("held-out accuracy, before → after", _change(before, after)),
        ("mean reward, first → last step", _change(rewards[0], rewards[-1]) if rewards else ""),
        ("optimizer steps", figure(number(summary, "steps") or last(steps, "step"))),
        ("training time", _duration(number(summary, "training_s"))),
        ("samples per second", figure(number(summary, "samples_per_s"))),
        ("largest lag, in steps", figure(max(known(steps, "lag_max"), default=None))),
    ]
    shown = [html.tile(name, value) for name, value in tiles if value not in ("", "–")]
    return f'<div class="tiles">{"".join(shown)}</div>' if shown else ""


def _learning(steps: Sequence[Line], evaluations: Sequence[Line]) -> list[str]:
    x = steps_of(steps)
    mean, deviation = column(steps, "reward_mean"), column(steps, "reward_std")
    low, high = column(steps, "reward_min"), column(steps, "reward_max")
    near = [_within(m, d, lo, hi) for m, d, lo, hi in zip(mean, deviation, low, high, strict=True)]
    bands = [Band("min to max", low, high), Band("one deviation", [n[0] for n in near], [n[1] for n in near])]
    reward = curves(x, [Series("mean reward", mean)], bands)
    return [
        html.card("Reward", reward, "of training samples: mean, one deviation, min to max"),
        html.card("Reward by scorer", curves(x, _scorers(steps)), "mean value of each scorer"),
        *_held_out(evaluations),
        _chart(steps, "Zero-variance groups", ["zero_std_groups"], "a step's groups that teach nothing", low=0.0),
    ]


def _scorers(steps: Sequence[Line]) -> list[Series]:
    """One series for each scorer that any step names."""
    names = sorted({name for line in steps for name in line if name.startswith(_SCORER)})
    return [Series(name.removeprefix(_SCORER), column(steps, name)) for name in names]


def _held_out(evaluations: Sequence[Line]) -> list[str]:
    cards, sets = [], by_set(evaluations)
    for name, lines in sets.items():
        interval = Band("95 % interval", column(lines, "accuracy_low"), column(lines, "accuracy_high"))
        series = [Series("accuracy", column(lines, "accuracy"), points=True)]
        title = "Held-out accuracy" if len(sets) == 1 else f"Held-out accuracy: {name}"
        drawn = curves(steps_of(lines), series, [interval], low=0.0, high=1.0)
        cards.append(html.card(title, drawn or '<p class="soft">nothing was answered</p>', "with its 95 % interval"))
    return cards or [html.card("Held-out accuracy", '<p class="soft">none was made</p>', "")]


def _training(steps: Sequence[Line]) -> list[str]:
    return [
        _chart(steps, "Lag", ["lag_mean", "lag_max"], "steps between the oldest token's version and its use", low=0.0),
        _chart(steps, "KL", ["kl_mean"], "nats a token, behavior against policy", low=0.0),
        _chart(steps, "Entropy", ["entropy"], "nats a token", low=0.0),
        _chart(steps, "Clipped tokens", ["clip_fraction", "masked_fraction"], "share of trained tokens", low=0.0),
        _chart(steps, "Effective sample size", ["ess"], "share of trained tokens; 1 is on policy", low=0.0),
        *_of_some_algorithms(steps),
        _chart(steps, "Learning rate", ["learning_rate"], "mean over the step's updates", low=0.0),
        _chart(steps, "Gradient norm", ["grad_norm"], "before clipping", low=0.0),
        _chart(steps, "Response length", ["response_tokens_mean"], "tokens, mean", low=0.0),
    ]


def _of_some_algorithms(steps: Sequence[Line]) -> list[str]:
    """Charts of figures that only some algorithms have."""
    charts = {
        "kl_coefficient": ("KL to the reference", "reference_kl", "nats a token"),
        "explained_variance": ("Critic", "explained_variance", "share of the returns that it foresaw"),
        "preference_accuracy": ("Preferences", "preference_accuracy", "share of pairs that the policy orders right"),
    }
    return [_chart(steps, title, [name], note) for sign, (title, name, note) in charts.items() if known(steps, sign)]


def _times(steps: Sequence[Line]) -> list[str]:
    shown = {name: label for name, label in _PHASES.items() if known(steps, name)}
    phases = stack(steps_of(steps), [Series(label, column(steps, name)) for name, label in shown.items()])
    return [
        _chart(steps, "Throughput", ["tokens_per_s"], "trained tokens per second", low=0.0),
        html.card("A step's phases", phases, "seconds in the trainer"),
        html.card("Mean seconds a step", _phase_table(steps)),
    ]


def _phase_table(steps: Sequence[Line]) -> str:
    """A phase that most steps do not have (a checkpoint) is shared out over all of them."""
    names = {"step_s": "whole step", **_PHASES}
    rows = [(label, sum(found) / len(steps)) for name, label in names.items() if (found := known(steps, name))]
    others = {"generate_s_mean": "generate one group", "score_s_mean": "score one group"}
    rows += [(label, sum(found) / len(found)) for name, label in others.items() if (found := known(steps, name))]
    return html.table([(label, f"{mean:.3f}") for label, mean in rows], numbers=[1])


def _endings(summary: Line, steps: Sequence[Line]) -> list[str]:
    counts = summary.get("counts")
    found = counts if isinstance(counts, dict) else {}
    rows = [(name, figure(number(found, name))) for name in sorted(found, key=lambda name: name != "trained")]
    admitted = number(summary, "groups_admitted")
    if admitted is not None:
        rows.insert(0, ("admitted", figure(admitted)))
    lags: dict[str, float] = {}
    for line in steps:
        by_lag = line.get("lag_counts")
        for lag, samples in (by_lag if isinstance(by_lag, dict) else {}).items():
            lags[lag] = lags.get(lag, 0.0) + (samples if isinstance(samples, (int, float)) else 0.0)
    total = sum(lags.values())
    shares = [(lag, figure(lags[lag]), f"{lags[lag] / total:.1%}") for lag in sorted(lags, key=_by_number) if total]
    return [
        html.card("Groups", html.table(rows, numbers=[1])),
        html.card("Samples by lag", html.table(shares, ["lag, in steps", "samples", "share"], numbers=[1, 2])),
    ]


def _rollouts(lines: Sequence[Line]) -> list[str]:
    """A few groups, spread over the run, the last one open."""
    count = min(_ROLLOUTS, len(lines))
    chosen = [lines[round(index * (len(lines) - 1) / max(1, count - 1))] for index in range(count)]
    return [_rollout(line, index == count - 1) for index, line in enumerate(chosen)]


def _rollout(line: Line, is_open: bool) -> str:
    completions = line.get("completions")
    rows = []
    for one in completions[:_COMPLETIONS] if isinstance(completions, list) else []:
        if isinstance(one, dict):
            reward = number(one, "reward")
            sign = "good" if (reward or 0.0) > 0 else "bad"
            rows.append(
                f'<tr><td class="number {sign}">{figure(reward)}</td><td class="text">{html.text(one.get("text", ""))}</td></tr>'
            )
    body = f'<div class="scroll"><table><tr><th class="number">reward</th><th>completion</th></tr>{"".join(rows)}</table></div>'
    asked = f'<p class="soft">asked</p>{html.preformatted(_asked(line.get("prompt")))}'
    answer = (
        f'<p class="soft">answer</p>{html.preformatted(str(line.get("answer")))}'
        if line.get("answer") is not None
        else ""
    )
    title = f"step {figure(number(line, 'step'))}: {_asked(line.get('prompt'))[:80]}"
    return html.fold(title, asked + answer + body, is_open)


def _asked(prompt: Json) -> str:
    if not isinstance(prompt, list):
        return str(prompt)
    return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt if isinstance(turn, dict))


def _records(run_folder: Path, summary: Line) -> list[str]:
    plain = [(name, _plain(value)) for name, value in summary.items() if not isinstance(value, (dict, list))]
    versions = summary.get("versions")
    packages = sorted(versions.items()) if isinstance(versions, dict) else []
    events = [
        (_clock(number(line, "at_s")), word(line, "source"), word(line, "name"), word(line, "detail"))
        for line in list(read(run_folder / "events.jsonl"))[-_EVENTS:]
    ]
    return [
        html.fold("summary", html.table(plain)),
        html.fold("versions", html.table(packages)),
        html.fold("events", html.table(events, ["time", "from", "event", "what"])),
        html.fold("settings", html.preformatted(_text(run_folder / "settings.toml"))),
    ]


def _chart(steps: Sequence[Line], title: str, names: Sequence[str], note: str, low: float | None = None) -> str:
    series = [Series(name.replace("_", " "), column(steps, name)) for name in names]
    return html.card(title, curves(steps_of(steps), series, low=low), note)


# ---------------------------------------------------------------- reading


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _object(file: Path) -> Line:
    """Return the object in a file; nothing where there is none."""
    try:
        found = json.loads(_text(file))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------- figures


def _within(
    mean: float | None, deviation: float | None, low: float | None, high: float | None
) -> tuple[float | None, float | None]:
    if mean is None or deviation is None:
        return None, None
    bottom, top = mean - deviation, mean + deviation
    return (bottom if low is None else max(low, bottom)), (top if high is None else min(high, top))


def _change(before: float | None, after: float | None) -> str:
    return f"{figure(before)} → {figure(after)}" if before is not None or after is not None else ""


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _clock(at_s: float | None) -> str:
    return "" if at_s is None else time.strftime("%H:%M:%S", time.gmtime(at_s))


def _plain(value: Json) -> str:
    return f"{value:.6g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)


def _by_number(text: str) -> tuple[int, str]:
    return (int(text), text) if text.isdigit() else (1 << 30, text)
