"""The frame of report.html: small pieces of HTML, and the style sheet that it shares with the live page (``page/look.css``).

Everything that comes from a run is escaped here.
"""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

_STYLE = (Path(__file__).parents[1] / "api" / "page" / "look.css").read_text(encoding="utf-8")


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
