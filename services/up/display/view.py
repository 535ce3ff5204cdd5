"""Render a run as a screen or as log lines. Pure functions."""

import dataclasses
import itertools
import math
import textwrap
import time
from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.services.client.views import READY_STATES, Evaluation, EventView, Notice, ReplicaView, RunView
from penstock.shared.text.terminal import escaped

_BARS = "▁▂▃▄▅▆▇█"
_SPARKS = 24
_STATE_STYLES = {
    "running": "bold green",
    "finished": "bold green",
    "paused": "bold yellow",
    "stopped": "bold yellow",
    "created": "bold cyan",
}
_NOTICE_STYLES = {"error": "bold red", "warning": "yellow", "info": ""}
_EXTENDS = "resuming"
_MARK = "▲"
_MISSING = "–"
_GAP = 2
_WIDE = 72
_GOOD = frozenset({*READY_STATES, "ready"} - {"degraded"})


@dataclasses.dataclass(frozen=True, slots=True)
class ViewRow:
    name: str
    state: str
    version: int | None = None
    memory_bytes: int = 0
    restarts: int = 0
    pid: int | None = None
    note: str = ""


def row_of(replica: ReplicaView) -> ViewRow:
    return ViewRow(
        replica.replica,
        replica.state,
        replica.version,
        replica.memory_bytes,
        restarts=max(0, replica.starts - 1),
        pid=replica.pid,
        note=replica.last_error or activity(replica),
    )


def activity(replica: ReplicaView) -> str:
    """Return what a replica does until it is ready, and for how long; after that how many samples, or groups, it generates."""
    if not replica.activity:
        held = replica.values.get("held") if replica.service == "rollout" else None
        return f"{number(held, 0)} in flight" if held else ""
    return f"{replica.activity} {duration(max(0.0, time.time() - replica.activity_since_s))}"


# ---------------------------------------------------------------- the screen


def screen(title: str, run: RunView | None, rows: Sequence[ViewRow], messages: Sequence[str] = ()) -> RenderableType:
    """Return the whole screen, at least 60 columns wide."""
    parts: list[RenderableType] = [_facts(run) if run is not None else Text("starting …", style="cyan")]
    if run is not None and run.notices:
        parts += [Text(), *(_notice(notice) for notice in run.notices)]
    if rows:
        parts += [Text(), _Processes(rows)]
    if messages:
        parts += [Text(), *(Text(message, style="dim") for message in messages)]
    return Panel(Group(*parts), title=Text(title, style="bold"), box=box.ROUNDED, border_style="dim", padding=(0, 1))


def _notice(notice: Notice) -> Text:
    return Text(f"{_MARK} {notice.text}", style=_NOTICE_STYLES.get(notice.level, "yellow"))


def notice_line(notice: Notice) -> str:
    return notice.text if notice.level == "info" else f"{notice.level}: {notice.text}"


def _facts(run: RunView) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True, min_width=9)
    facts.add_column(overflow="fold")
    facts.add_row("run", _state(run))
    facts.add_row("step", _progress(run))
    objective, value = _objective(run)
    facts.add_row(objective, _curve(value, run.history.reward_mean))
    if (share := last(run, "preference_accuracy")) is not None:
        facts.add_row("ordered", f"{share:.0%} of preference pairs")
    if (share := last(run, "signal_fraction")) is not None:
        facts.add_row("signal", f"{share:.0%} of groups")
    facts.add_row("held-out", _accuracies(run.evaluations))
    facts.add_row("in flight", _flight(run))
    facts.add_row("speed", _speed(run))
    facts.add_row("streams", _streams(run))
    if run.bound:
        facts.add_row("bound", run.bound)
    for part, outcome in run.self_tests.items():
        facts.add_row("self-test", f"{part}: {outcome}")
    return facts


def _state(run: RunView) -> Text:
    line = Text(_EXTENDS if run.extends else run.state, style=_STATE_STYLES.get(run.state, "bold"))
    told = any(run.reason and run.reason in notice.text for notice in run.notices)
    for extra in ("" if told else run.reason, run.activity):
        if extra and extra != run.state:
            line.append(f"  {' '.join(extra.split())}", style="dim")
    return line


def _progress(run: RunView) -> RenderableType:
    done = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(1, run.steps), completed=run.step, width=20)
    eta = f"eta {duration(run.eta_s)}" if run.eta_s is not None and not run.ended else ""
    done.add_row(f"{run.step:,}/{run.steps:,}", bar, f"{run.step / max(1, run.steps):.0%}", eta)
    return done


def _curve(value: float | None, values: Sequence[float | None]) -> Text:
    line = Text(number(value), style="bold")
    return line.append("  ").append(spark(values, _SPARKS), style="cyan")


def _accuracies(evaluations: Sequence[Evaluation]) -> Text:
    if not evaluations:
        return Text(_MISSING)
    of_first = [evaluation for evaluation in evaluations if evaluation.set == evaluations[0].set]
    values, last_one = [evaluation.accuracy for evaluation in of_first], of_first[-1]
    line = Text(number(values[-1]), style="bold").append("  ").append(spark(values, _SPARKS), style="green")
    if last_one.accuracy_low is not None:
        line.append(f"  {number(last_one.accuracy_low)} to {number(last_one.accuracy_high)}", style="dim")
    line.append(f"  from {number(values[0])}, at step {last_one.step}", style="dim")
    others = {evaluation.set: evaluation.accuracy for evaluation in evaluations if evaluation.set != last_one.set}
    return line.append("".join(f"  {name} {number(value)}" for name, value in others.items()))


def _newest_accuracy(evaluations: Sequence[Evaluation]) -> float | None:
    return next(
        (evaluation.accuracy for evaluation in reversed(evaluations) if evaluation.set == evaluations[0].set), None
    )


def _flight(run: RunView) -> Text:
    lag = f"lag {number(last(run, 'lag_mean'), 2)}, at most {number(last(run, 'lag_max'), 0)}"
    return Text(f"{run.groups_in_flight} of {run.slots} groups  {lag}  head {_version(run.head)}")


def _speed(run: RunView) -> Text:
    line = f"{_tokens(run)}  {rate(None if run.state == 'paused' else last(run, 'samples_per_s'))} samples/s"
    gpu_hours = f"  {number(run.gpu_hours, 1)} GPU-hours" if run.gpu_hours else ""
    return Text(f"{line}  for {duration(run.training_s)}{gpu_hours}")


def _tokens(run: RunView) -> str:
    drawn = f", {number(run.drawn_tokens_per_s, 0)} drawn" if run.drawn_tokens_per_s else ""
    return f"{number(run.tokens_per_s or None, 0)} tokens/s{drawn}"


def _streams(run: RunView) -> Text:
    names = ("prompts", "episodes", "rollouts", "experience", "journal")
    entries = {name: run.streams[name].entries for name in names if name in run.streams}
    shown = [f"{name} {count}" for name, count in entries.items() if count or name != "episodes"]
    return Text(" · ".join(shown) or _MISSING)


@dataclasses.dataclass(frozen=True, slots=True)
class _Processes:
    rows: Sequence[ViewRow]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < _WIDE:
            yield self._table(wide=False)
            return
        taken = console.measure(self._table(wide=True), options=options).maximum
        yield self._table(wide=True, note_width=max(0, options.max_width - taken - _GAP))

    def _table(self, *, wide: bool, note_width: int = 0) -> Table:
        table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim", expand=False)
        for name in ("process", "state"):
            table.add_column(name, no_wrap=True)
        for name in ("version", "memory", "starts", "pid") if wide else ("version", "memory"):
            table.add_column(name, justify="right", no_wrap=True)
        if note_width:
            table.add_column("", no_wrap=True, style="dim", max_width=note_width)
        for row in self.rows:
            cells: list[Text | str] = [row.name, _health(row), _version(row.version), memory(row.memory_bytes)]
            if wide:
                cells += [
                    Text(str(row.restarts + 1), style="yellow" if row.restarts else "dim"),
                    str(row.pid or _MISSING),
                ]
            note = textwrap.shorten(escaped(row.note.partition("\n")[0]), max(1, note_width), placeholder="…")
            table.add_row(*cells, *([Text(note)] if note_width else []))
        return table


def _health(row: ViewRow) -> Text:
    good = row.state in _GOOD
    return Text("● ", style="green" if good else "yellow").append(row.state, style="none")


def event_line(event: EventView) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(event.at_s))}  {event.name}: {event.detail}"


# ---------------------------------------------------------------- one line


def line(run: RunView, rows: Sequence[ViewRow] = ()) -> str:
    """Return the run as one log line; before it begins, with the notes of ``rows``."""
    if run.state == "created":
        notes = "; ".join(f"{row.name}: {row.note}" for row in rows if row.note)
        return f"{run.state:<8} {run.activity}{'  ' if notes else ''}{notes}".rstrip()
    parts = [f"{_EXTENDS if run.extends else run.state:<8} step {run.step}/{run.steps}", f"head {_version(run.head)}"]
    objective, value = _objective(run)
    parts.append(f"{objective} {number(value)}")
    if (share := last(run, "preference_accuracy")) is not None:
        parts.append(f"pairs ordered {share:.0%}")
    parts.append(f"held-out {number(_newest_accuracy(run.evaluations))}")
    parts += [f"in flight {run.groups_in_flight}/{run.slots}", f"lag {number(last(run, 'lag_mean'), 2)}"]
    parts.append(" ".join(run.reason.split()) if run.state == "paused" else _tokens(run))
    parts += [f"eta {duration(run.eta_s)}"] if run.eta_s is not None and not run.ended else []
    return "  ".join(parts)


# ---------------------------------------------------------------- figures


def spark(values: Sequence[float | None], width: int) -> str:
    """Return a sparkline of at most ``width`` averaged values.

    >>> spark([0.0, 0.5, 1.0], 8)
    '▁▅█'
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [round(index * len(finite) / count) for index in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high - low < 1e-12:
        return _BARS[3] * count
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)


def _objective(run: RunView) -> tuple[str, float | None]:
    """Return the name and value of what training changes: the mean reward or, in a supervised run, the loss."""
    reward, loss = last(run, "reward_mean"), last(run, "loss")
    return ("loss", loss) if reward is None and loss is not None else ("reward", reward)


def last(run: RunView, name: str) -> float | None:
    """Return a metric of the newest step."""
    return run.last.get(name)


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with thousands' commas; a dash for None."""
    return _MISSING if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def rate(value: float | None) -> str:
    """Return a number of events per second.

    >>> rate(0.374), rate(1234.5), rate(None)
    ('0.37', '1,234', '–')
    """
    return number(value, 2 if value is not None and value < 10 else 0)


def duration(seconds: float | None) -> str:
    """Return a time span.

    >>> duration(5), duration(95), duration(7300)
    ('5s', '1m35s', '2h01m')
    """
    if seconds is None or not math.isfinite(seconds):
        return _MISSING
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def memory(count: int) -> str:
    """Return bytes in MiB or GiB."""
    if count <= 0:
        return _MISSING
    mebibytes = count / 2**20
    return f"{mebibytes:,.0f} MiB" if mebibytes < 1024 else f"{mebibytes / 1024:.1f} GiB"


def _version(version: int | None) -> str:
    return _MISSING if version is None else str(version)
