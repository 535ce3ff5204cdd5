"""The frame of report.html: its style sheet, and small pieces of HTML. Everything that comes from a run is escaped here."""

import html
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1c2330; --soft: #5d6778; --edge: #e0e4ea;
  --good: #1a7f4b; --bad: #b3423a;
  --c0: #2563c9; --c1: #d9730d; --c2: #1a8f5f; --c3: #b4479b; --c4: #8a7a00; --c5: #5b5bd6; }
@media (prefers-color-scheme: dark) { :root { --page: #12161d; --card: #1a2029; --ink: #e4e8ef; --soft: #98a3b5;
  --edge: #2b3442; --good: #58c48d; --bad: #e88078;
  --c0: #6ea3f5; --c1: #f0a050; --c2: #58c48d; --c3: #dc84c6; --c4: #cbbb4a; --c5: #9b9bf5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 20px 64px; max-width: 1240px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 12px; }
h3 { font-size: 14px; margin: 0 0 6px; font-weight: 600; }
h3 small, .soft { color: var(--soft); font-weight: 400; font-size: 13px; }
h3 small { display: block; font-size: 12px; }
p { margin: 4px 0; }
code, pre, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px; }
.grid-of { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); }
.tiles { display: grid; gap: 14px; margin-top: 18px; grid-template-columns: repeat(auto-fill, minmax(min(46%, 185px), 1fr)); }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 14px 16px; min-width: 0; }
.tile b { display: block; font-size: 18px; white-space: nowrap; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
td, th { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--edge); vertical-align: top;
  overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; }
tr:last-child td { border-bottom: 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; width: 1%; }
td:first-child { min-width: 5ch; }
td.text { white-space: pre-wrap; font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px; }
details { margin: 8px 0; } summary { cursor: pointer; padding: 2px 0; overflow-wrap: anywhere; }
pre { overflow-x: auto; margin: 8px 0 0; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
.grid { stroke: var(--edge); stroke-width: 1; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.band { fill: var(--c0); opacity: .1; } .band.b1 { opacity: .16; } .stack { opacity: .85; }
.tip { fill: transparent; } .tip:hover { fill: var(--soft); opacity: .18; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; margin-top: 4px; font-size: 12px; color: var(--soft); }
.key::before { content: ""; display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 5px;
  background: var(--mine); }
.good { color: var(--good); } .bad { color: var(--bad); }
.state { font-size: 13px; border: 1px solid var(--edge); border-radius: 99px; padding: 1px 10px; background: var(--card); }
.head { display: flex; flex-wrap: wrap; gap: 8px 12px; align-items: center; }
""" + "".join(
    f".s{index} {{ --mine: var(--c{index}); }} .line.s{index} {{ stroke: var(--c{index}); }} "
    f".dot.s{index}, .stack.s{index} {{ fill: var(--c{index}); }}\n"
    for index in range(6)
)


def document(title: str, parts: Iterable[str]) -> str:
    """Return the whole page."""
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def text(value: object) -> str:
    """Return a value as text that cannot be taken for HTML."""
    return html.escape(str(value))


def section(title: str, parts: Iterable[str], shape: str = "") -> str:
    """Return a titled part of the page; nothing when it would be empty."""
    inner = "".join(part for part in parts if part)
    return f'<h2>{text(title)}</h2><div class="{shape}">{inner}</div>' if inner else ""


def card(title: str, inner: str, note: str = "") -> str:
    """Return a framed piece; nothing when it would be empty."""
    small = f" <small>{text(note)}</small>" if note else ""
    return f'<div class="card"><h3>{text(title)}{small}</h3>{inner}</div>' if inner else ""


def tile(name: str, value: str) -> str:
    """Return one headline figure."""
    return f'<div class="card tile"><b>{text(value)}</b><span>{text(name)}</span></div>'


def table(rows: Sequence[Sequence[object]], head: Sequence[str] = (), numbers: Sequence[int] = ()) -> str:
    """Return a table; columns in ``numbers`` are set to the right. Nothing when there is no row."""
    if not rows:
        return ""
    top = "".join(f'<th class="{_class(index, numbers)}">{text(name)}</th>' for index, name in enumerate(head))
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{_class(index, numbers)}">{text(cell)}</td>' for index, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{f"<tr>{top}</tr>" if top else ""}{body}</table></div>'


def fold(title: str, inner: str, is_open: bool = False) -> str:
    """Return something that opens on a click; ``title`` is text, ``inner`` is HTML."""
    return (
        f'<details class="card"{" open" if is_open else ""}><summary>{text(title)}</summary>{inner}</details>'
        if inner
        else ""
    )


def preformatted(value: str) -> str:
    """Return text as it stands."""
    return f"<pre>{text(value)}</pre>" if value.strip() else ""


def _class(index: int, numbers: Sequence[int]) -> str:
    return "number" if index in numbers else ""
