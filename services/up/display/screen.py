"""Display of a run: live at a terminal, plain lines elsewhere. A closed output never stops a run."""

import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TypeAlias

from rich.console import Console
from rich.constrain import Constrain
from rich.live import Live

from penstock.services.client.views import Notice, RunView
from penstock.services.up.display import view
from penstock.services.up.display.console import Escaped, say
from penstock.shared.text.terminal import escaped_line

_LINE_EVERY_S = 5.0
_AGAIN_S = 60.0
"""Seconds before a changed notice is repeated, and longest time between lines without a step."""
_MESSAGES = 4
_ECHO_WIDTH = 3
"""Columns left free: the terminal's `^C` at the end of a full last line would move the screen down."""


Screen: TypeAlias = "LiveScreen | PlainDisplay"


def open_screen(title: str) -> Screen:
    return LiveScreen(title, Console()) if shows_screen() else PlainDisplay()


def shows_screen() -> bool:
    """Whether a person looks at a terminal that can be drawn on."""
    console = Console()
    return console.is_terminal and not console.is_dumb_terminal


class LiveScreen:
    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._messages: deque[str] = deque(maxlen=_MESSAGES)
        self._run: RunView | None = None
        self._rows: Sequence[view.ViewRow] = ()
        self._live = Live(console=console, auto_refresh=False, transient=False, redirect_stdout=False)

    def __enter__(self) -> "LiveScreen":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _reader_may_be_gone():
            self._live.stop()

    def show(self, run: RunView | None, rows: Sequence[view.ViewRow]) -> None:
        self._run, self._rows = run, rows
        self._draw()

    def tell(self, text: str) -> None:
        self._messages.append(f"{_now()}  {escaped_line(text)}")
        self._draw()

    def _draw(self) -> None:
        with _reader_may_be_gone():
            shown = view.screen(self._title, self._run, self._rows, tuple(self._messages))
            width = self._live.console.width - _ECHO_WIDTH
            self._live.update(Escaped(Constrain(shown, width)), refresh=True)


class PlainDisplay:
    """Print a line on each new state, evaluation or notice, and in between: less and less often while no step is trained.

    Nothing is printed without news of the run. Persistent notices are repeated.
    """

    def __init__(self, every_s: float = _LINE_EVERY_S) -> None:
        self._every_s = self._wait_s = every_s
        self._line_s = 0.0
        self._run: RunView | None = None
        self._known = (("", 0), 0)
        """State, evaluations and step of the last line."""
        self._said: dict[str, tuple[str, float]] = {}
        """Text and time (monotonic) of each printed notice, by subject and level."""

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, run: RunView | None, rows: Sequence[view.ViewRow]) -> None:
        if run is None or run is self._run:
            return
        self._run = run
        self._say_notices(run.notices)
        now_s, known = time.monotonic(), ((run.state, len(run.evaluations)), run.step)
        wait_s = self._wait_s if known == self._known else self._every_s
        if known[0] == self._known[0] and now_s < self._line_s + wait_s:
            return
        self._known, self._line_s, self._wait_s = known, now_s, min(2 * wait_s, _AGAIN_S)
        self.tell(view.line(run, rows))

    def _say_notices(self, notices: Sequence[Notice]) -> None:
        now_s = time.monotonic()
        keys = {f"{notice.level} {notice.about}": notice for notice in notices}
        self._said = {key: said for key, said in self._said.items() if key in keys}
        for key, notice in keys.items():
            text, said_s = self._said.get(key, ("", -math.inf))
            if text == notice.text or now_s - said_s < _AGAIN_S:
                continue
            self._said[key] = (notice.text, now_s)
            self.tell(view.notice_line(notice))

    def tell(self, text: str) -> None:
        with _reader_may_be_gone():
            say(f"{_now()} {escaped_line(text)}")


def _now() -> str:
    return time.strftime("%H:%M:%S")


@contextlib.contextmanager
def _reader_may_be_gone() -> Iterator[None]:
    try:
        yield
    except (OSError, SystemExit):  # rich turns a broken pipe into SystemExit
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
