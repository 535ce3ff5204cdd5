"""The one door to the terminal: whatever the command line prints goes through it, escaped (``shared.text.terminal``).

A run's text (a model's, a judge's, a stranger's on the bus) must not move the cursor, set a title or forge a line. Lists and screens escape their
cells before they are laid out; what is missed there is escaped here.
"""

import dataclasses
import json
import sys

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from shared.text.redaction import redacted
from shared.text.terminal import escaped


def say(text: str) -> None:
    """Print text, which may have several lines."""
    print(escaped(redacted(text)), flush=True)  # noqa: T201


def warn(text: str) -> None:
    """Print text to standard error."""
    print(escaped(redacted(text)), file=sys.stderr, flush=True)  # noqa: T201


def say_json(value: object, indent: int | None = 2) -> None:
    """Print JSON."""
    say(json.dumps(value, indent=indent))


def show(renderable: RenderableType) -> None:
    """Print something of rich's."""
    Console().print(Escaped(renderable))


@dataclasses.dataclass(frozen=True, slots=True)
class Escaped:
    """A renderable whose text is escaped; rich's own colours and moves stay."""

    inside: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self.inside, options):
            yield Segment(text if control else escaped(text), style, control)
