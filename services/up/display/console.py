"""The only module that prints to the terminal; it escapes all text (``penstock.shared.text.terminal``), so that no model, judge
or bus text can move the cursor or forge a line.
"""

import dataclasses
import json
import sys

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from penstock.shared.text.redaction import redacted
from penstock.shared.text.terminal import escaped


def say(text: str) -> None:
    print(escaped(redacted(text)), flush=True)  # noqa: T201


def say_link(link: str) -> None:
    """Print a link whose secret is for the reader."""
    print(escaped(link), flush=True)  # noqa: T201


def warn(text: str) -> None:
    print(escaped(redacted(text)), file=sys.stderr, flush=True)  # noqa: T201


def say_json(value: object, indent: int | None = 2) -> None:
    say(json.dumps(value, indent=indent))


def show(renderable: RenderableType) -> None:
    Console().print(Escaped(renderable))


@dataclasses.dataclass(frozen=True, slots=True)
class Escaped:
    inside: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self.inside, options):
            yield Segment(text if control else escaped(text), style, control)
