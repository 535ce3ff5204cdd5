"""A plan as one self-contained page: memory by phase as bars, and the simulated steps as a timeline."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from penstock.services.plan.hardware import GIB
from penstock.services.plan.layouts import Candidate
from penstock.services.plan.memory import Components, total
from penstock.services.plan.report import Plan, reason, text
from penstock.services.plan.simulation import Span
from penstock.shared.errors import SettingsError
from penstock.shared.files.durable import write_whole

_WIDTH, _LABEL, _ROW = 900, 190, 22
_STEPS, _ACTORS = 5, 10
_COLOURS = (
    "#2563c9",
    "#d9730d",
    "#1a8f5f",
    "#b4479b",
    "#8a7a00",
    "#5b5bd6",
    "#b3423a",
    "#5d6778",
    "#3a9fb0",
    "#7a5230",
)
_KINDS = {"generate": _COLOURS[0], "train": _COLOURS[1], "update": _COLOURS[2]}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>penstock plan</title><style>body {{ font: 15px/1.5 system-ui, sans-serif; margin: 24px auto; max-width: 960px }}
svg {{ width: 100%; font: 12px system-ui, sans-serif }} pre {{ overflow-x: auto; font-size: 12px }}</style></head>
<body><h1>penstock plan</h1>{body}<h2>As text</h2><pre>{text}</pre></body></html>
"""


def write(plan: Plan, file: Path) -> None:
    try:
        write_whole(file, page(plan))
    except OSError as error:
        raise SettingsError(f"expected a file to write to at {file}, found: {error}: change --html") from error


def page(plan: Plan) -> str:
    body = "".join(_section(plan, candidate) for candidate in plan.best)
    return _PAGE.format(body=body, text=escape(text(plan)))


def _section(plan: Plan, candidate: Candidate) -> str:
    played = plan.planner.simulated(candidate, record=True, steps=_STEPS)
    assert played.outcome is not None
    title = f"{candidate.layout.placement}: {candidate.layout.words}"
    return (
        f"<h2>{escape(title)}</h2><p>{escape(reason(plan, candidate))}</p>"
        f"{_bars(candidate, plan.planner.limit_bytes)}{_timeline(played.outcome.spans)}"
    )


def _bars(candidate: Candidate, limit_bytes: float) -> str:
    rows = [(f"{side}, {phase}", parts) for side, table in candidate.memory.items() for phase, parts in table.items()]
    most = max(limit_bytes, *(total(parts) for _, parts in rows)) * 1.05
    drawn = "".join(_bar(place, label, parts, most) for place, (label, parts) in enumerate(rows))
    x, height = _x(limit_bytes / most), len(rows) * _ROW + 20
    limit = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 18}" stroke="#b3423a" stroke-width="2"/>'
    return _svg(
        height,
        f'{drawn}{limit}<text x="{x:.1f}" y="{height - 4}" text-anchor="end">{limit_bytes / GIB:.0f} GiB usable</text>',
    )


def _bar(place: int, label: str, parts: Components, most: float) -> str:
    y, left, drawn = place * _ROW, 0.0, [_words(place * _ROW, label)]
    for part in parts:
        colour = _COLOURS[sum(part.name.encode()) % len(_COLOURS)]
        about = f"{part.name}: {part.nbytes / GIB:.1f} GiB"
        drawn.append(_box(_x(left / most), _x((left + part.nbytes) / most), y, colour, about))
        left += part.nbytes
    return "".join(drawn)


def _timeline(spans: Sequence[Span]) -> str:
    actors = [*dict.fromkeys(("trainer", "weights", *sorted({span.actor for span in spans})))][: _ACTORS + 2]
    most = max((span.end_s for span in spans), default=1.0)
    boxes = "".join(_played(spans, actors, most))
    labels = "".join(_words(place * _ROW, actor) for place, actor in enumerate(actors))
    height = len(actors) * _ROW + 20
    return _svg(
        height, f'{labels}{boxes}<text x="{_WIDTH}" y="{height - 4}" text-anchor="end">{most:,.1f} s simulated</text>'
    )


def _played(spans: Sequence[Span], actors: Sequence[str], most: float) -> Iterator[str]:
    for span in spans:
        if span.actor in actors:
            about = f"{span.kind}: {span.start_s:,.1f} to {span.end_s:,.1f} s"
            place = actors.index(span.actor)
            yield _box(_x(span.start_s / most), _x(span.end_s / most), place * _ROW, _KINDS[span.kind], about)


def _x(share: float) -> float:
    return _LABEL + share * (_WIDTH - _LABEL)


def _words(y: int, label: str) -> str:
    return f'<text x="{_LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>'


def _box(x: float, end: float, y: int, colour: str, about: str) -> str:
    width = max(0.0, end - x)
    return (
        f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 4}" fill="{colour}" stroke="#fff" '
        f'stroke-width="0.5"><title>{escape(about)}</title></rect>'
    )


def _svg(height: int, inner: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{inner}</svg>'
