"""Curves as inline SVG, drawn here: no script, no library, colours by the page's style sheet.

A chart is 440 units wide and scales with the page. A value that is missing or not finite leaves a gap. Long series are averaged
down to ``_MOST_POINTS``; what a point was is told when the pointer rests on it.
"""

import dataclasses
import html
import math
from collections.abc import Sequence

Values = Sequence[float | None]
"""One value a point; None leaves a gap."""

_WIDTH, _HEIGHT = 440.0, 200.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 48.0, 10.0, 8.0, 24.0
_MOST_POINTS = 240
_TICKS = 4
_PEAK = 2.0
"""A stack is shown up to so many times what 95 % of its points stay below."""


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """One curve of a chart."""

    name: str
    values: Values
    points: bool = False
    """Draw a dot at each value, for few of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """An area between two curves."""

    name: str
    low: Values
    high: Values


@dataclasses.dataclass(frozen=True, slots=True)
class _Scale:
    """From values to places."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / ((self.x_high - self.x_low) or 1.0) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / ((self.y_high - self.y_low) or 1.0)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def curves(
    steps: Sequence[float],
    series: Sequence[Series],
    bands: Sequence[Band] = (),
    low: float | None = None,
    high: float | None = None,
) -> str:
    """Return a chart of ``series`` over ``steps``; empty when there is no value at all. ``low`` and ``high`` widen its range."""
    steps, series, bands = _thinned(steps, series, bands)
    known = _finite([*(one.values for one in series), *(side for band in bands for side in (band.low, band.high))])
    if not known or not steps:
        return ""
    wanted = [bound for bound in (low, high) if bound is not None]
    y_ticks = ticks(min([*known, *wanted]), max([*known, *wanted]))
    scale = _Scale(min(steps), max(steps), y_ticks[0], y_ticks[-1])
    marks = [_grid(scale, y_ticks)]
    marks += [_area(scale, steps, band.low, band.high, f"band b{index}") for index, band in enumerate(bands)]
    marks += [_line(scale, steps, one, index) for index, one in enumerate(series)]
    marks.append(_tips(scale, steps, series, bands))
    return _svg(marks, [one.name for one in series])


def stack(steps: Sequence[float], series: Sequence[Series]) -> str:
    """Return a chart in which each series stands on those before it; rare peaks are cut off at the top, not in what is told."""
    steps, series, _ = _thinned(steps, [one for one in series if any(_finite([one.values]))], ())
    if not steps or not series:
        return ""
    tops: list[list[float]] = [[0.0] * len(steps)]
    for one in series:
        tops.append([base + (value or 0.0) for base, value in zip(tops[-1], _known(one.values), strict=True)])
    y_ticks = ticks(0.0, min(max(tops[-1]), _PEAK * sorted(tops[-1])[int(0.95 * (len(steps) - 1))] or 1.0))
    scale = _Scale(min(steps), max(steps), y_ticks[0], y_ticks[-1])
    tops = [[min(value, y_ticks[-1]) for value in top] for top in tops]
    marks = [_grid(scale, y_ticks)]
    marks += [_area(scale, steps, tops[index], tops[index + 1], f"stack s{index}") for index in range(len(series))]
    marks.append(_tips(scale, steps, series, ()))
    return _svg(marks, [one.name for one in series])


def ticks(low: float, high: float) -> list[float]:
    """Return round values from at or below ``low`` to at or above ``high``.

    >>> ticks(0.1, 0.93)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5
    rough = (high - low) / _TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    width = next(size * factor for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if size * factor >= rough * 0.999)
    first, last = math.floor(low / width + 1e-9), math.ceil(high / width - 1e-9)
    return [round(index * width, 12) for index in range(first, last + 1)]


def figure(value: float | None) -> str:
    """Return a number for people: thousands' commas, three significant digits below.

    >>> figure(12345.6), figure(0.01234), figure(2.0)
    ('12,346', '0.0123', '2')
    """
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# ---------------------------------------------------------------- marks


def _svg(marks: Sequence[str], names: Sequence[str]) -> str:
    keys = "".join(f'<span class="key s{index}">{html.escape(name)}</span>' for index, name in enumerate(names))
    legend = f'<div class="legend">{keys}</div>' if len(names) > 1 else ""
    label = html.escape(", ".join(names), quote=True)
    return (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{label}">{"".join(marks)}</svg>{legend}'
    )


def _grid(scale: _Scale, y_ticks: Sequence[float]) -> str:
    marks = []
    for value in y_ticks:
        y = scale.y(value)
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick(value, y_ticks)}</text>')
    span = scale.x_high - scale.x_low
    for value in ticks(scale.x_low, scale.x_high) if span else [scale.x_low]:
        if scale.x_low <= value <= scale.x_high and (value == int(value)):
            marks.append(f'<text x="{scale.x(value):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{value:,.0f}</text>')
    return "".join(marks)


def _tick(value: float, y_ticks: Sequence[float]) -> str:
    largest = max(abs(tick) for tick in y_ticks)
    if largest >= 10_000:
        return f"{value / 1000:,.4g}k"
    if value and largest < 0.01:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    return f"{value:,.6g}"


def _line(scale: _Scale, steps: Sequence[float], series: Series, index: int) -> str:
    parts = []
    for run in _runs(steps, series.values):
        places = " ".join(f"{scale.x(step):.1f},{scale.y(value):.1f}" for step, value in run)
        parts.append(f'<polyline class="line s{index}" points="{places}"/>')
        if series.points or len(run) == 1:
            parts += [
                f'<circle class="dot s{index}" cx="{scale.x(step):.1f}" cy="{scale.y(value):.1f}" r="3"/>'
                for step, value in run
            ]
    return "".join(parts)


def _area(scale: _Scale, steps: Sequence[float], low: Values, high: Values, name: str) -> str:
    both: list[float | None] = [
        None if bottom is None or top is None else top - bottom
        for bottom, top in zip(_known(low), _known(high), strict=True)
    ]
    bottoms = dict(zip(steps, _known(low), strict=True))
    parts = []
    for run in _runs(steps, both):
        there = [(step, (bottoms[step] or 0.0) + height) for step, height in run]
        back = [(step, bottoms[step] or 0.0) for step, _ in reversed(run)]
        places = " ".join(f"{scale.x(step):.1f},{scale.y(value):.1f}" for step, value in (*there, *back))
        parts.append(f'<polygon class="{name}" points="{places}"/>')
    return "".join(parts)


def _tips(scale: _Scale, steps: Sequence[float], series: Sequence[Series], bands: Sequence[Band]) -> str:
    width = (_WIDTH - _LEFT - _RIGHT) / max(1, len(steps))
    marks = []
    for index, step in enumerate(steps):
        told = [f"step {step:,.0f}"]
        told += [f"{one.name} {figure(one.values[index])}" for one in series if one.values[index] is not None]
        told += [f"{band.name} {figure(band.low[index])} to {figure(band.high[index])}" for band in bands]
        x = scale.x(step) - width / 2
        text = html.escape("\n".join(told))
        marks.append(
            f'<rect class="tip" x="{x:.1f}" y="{_TOP}" width="{width:.1f}" height="{_HEIGHT - _TOP - _BOTTOM}">'
            f"<title>{text}</title></rect>"
        )
    return "".join(marks)


# ---------------------------------------------------------------- values


def _known(values: Values) -> list[float | None]:
    return [value if value is not None and math.isfinite(value) else None for value in values]


def _finite(many: Sequence[Values]) -> list[float]:
    return [value for values in many for value in _known(values) if value is not None]


def _runs(steps: Sequence[float], values: Values) -> list[list[tuple[float, float]]]:
    """Part a curve at its gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(steps, _known(values), strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((step, value))
    return [run for run in runs if run]


def _thinned(
    steps: Sequence[float], series: Sequence[Series], bands: Sequence[Band]
) -> tuple[Sequence[float], Sequence[Series], Sequence[Band]]:
    """Average neighbours until a chart has at most ``_MOST_POINTS``."""
    width = math.ceil(len(steps) / _MOST_POINTS)
    if width <= 1:
        return steps, series, bands
    cuts = range(0, len(steps), width)

    def means(values: Values) -> list[float | None]:
        parts = [_finite([values[cut : cut + width]]) for cut in cuts]
        return [sum(part) / len(part) if part else None for part in parts]

    return (
        [step for step in means(steps) if step is not None],
        [dataclasses.replace(one, values=means(one.values)) for one in series],
        [dataclasses.replace(band, low=means(band.low), high=means(band.high)) for band in bands],
    )
