"""Foreign text costs time in proportion to its length, and what is written of it is bounded."""

import json
import logging
import time
from collections.abc import Callable

import pytest

from penstock.shared.errors import SettingsError
from penstock.shared.http.answer import Answer
from penstock.shared.process.log import JsonLines, PlainLines
from penstock.shared.text.redaction import redact, redacted
from penstock.shared.text.terminal import LONGEST, cut, escaped, escaped_line

UNITS = (
    "a",
    " ",
    "?",
    "&",
    "=",
    ":",
    "@",
    "/",
    ".",
    "://",
    "?&",
    "a:",
    "a?",
    "?a",
    "&pass",
    "?pass",
    "pass=",
    "a@",
    "\x1b",
    "\n",
    '"',
    "\\",
)
SHORT, LONG = 2_000, 200_000


def record(text: str) -> logging.LogRecord:
    made = logging.LogRecord("a", logging.INFO, "", 0, "%s", (text,), None)
    made.reason = text
    return made


PATHS: dict[str, Callable[[str], object]] = {
    "redact": redact,
    "redacted": redacted,
    "redacted, within a URL": lambda text: redacted(f"a://{text}"),
    "redacted, before a URL": lambda text: redacted(f"{text}a://b"),
    "escaped": escaped,
    "escaped_line": escaped_line,
    "cut": cut,
    "a JSON log line": lambda text: JsonLines("a").format(record(text)),
    "a log line at a terminal": lambda text: PlainLines("a").format(record(text)),
    "an error": lambda text: str(SettingsError(text)),
    "an answer shown in an error": lambda text: Answer("", 500, text.encode()).text("key"),
}


def cpu_s(call: Callable[[str], object], text: str) -> float:
    started_s = time.process_time()
    call(text)
    return time.process_time() - started_s


@pytest.mark.parametrize("path", PATHS)
def test_the_time_of_a_text_grows_with_its_length(path: str) -> None:
    """A hundred times the length: quadratic growth takes ten thousand times the time, linear a hundred."""
    for unit in UNITS:
        short, long = (unit * (length // len(unit)) for length in (SHORT, LONG))
        least_s = max(0.002, min(cpu_s(PATHS[path], short) for _ in range(3)))
        assert cpu_s(PATHS[path], long) < 1_000 * least_s, unit


def test_what_is_written_of_a_long_text_is_bounded() -> None:
    text = "a" * 100_000
    line = JsonLines("a").format(record(text))
    assert set(json.loads(line)) >= {"event", "reason"}
    assert len(line) < 3 * LONGEST
    assert len(str(SettingsError(f"no file {text}"))) < LONGEST + 100


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://a/?u=redis://user:pw@host", "http://a/?u=***"),
        ("http://a?x=1?password=p&b=2", "http://a?x=***&b=***"),
        ("http://a?password=p?q=1#c", "http://a?password=***"),
        ("http://a?MyToken=p&pass=q", "http://a?MyToken=***&pass=***"),
        ("http://host/path:80?a=b", "http://host/path:80?a=***"),
        ("http://host:80/p", "http://host:80/p"),
    ],
)
def test_every_secret_of_a_url_is_hidden(url: str, shown: str) -> None:
    assert redacted(f"at '{url}'") == f"at '{shown}'"
