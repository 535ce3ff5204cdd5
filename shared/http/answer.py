"""A bounded answer of an HTTP endpoint, and the sentences for what is no answer."""

import dataclasses
import datetime
import email.utils
import json
from typing import Any

from penstock.shared.errors import PenstockError

MOST_VALUES = 100_000
"""Values in an answer's JSON: parsing this many takes milliseconds and a few megabytes."""
LONGEST_RETRY_S = 86_400.0
"""``Retry-After`` is cut to a day."""
_LONGEST_HEADER = 100
_SHOWN_OF = 4_096


class NoHttpAnswer(PenstockError):
    """There was no answer that may be read; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    url: str
    status: int
    content: bytes | bytearray
    """Not encoded."""
    retry_after: str = ""
    """The header, as it came."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def text(self, hidden: str = "") -> str:
        """Return the beginning of the content on one line, with ``hidden`` taken out."""
        text = self.content.decode("utf-8", "replace")
        return " ".join((text.replace(hidden, "…") if hidden else text)[:_SHOWN_OF].split())

    def json(self, most_values: int | None = MOST_VALUES) -> Any:
        """Return the value of UTF-8 JSON.

        Raises:
            ValueError: not JSON, nested deeper than Python's stack, or, at a guess that counts separators in texts too,
                of more than ``most_values`` values.
        """
        values = 1 + sum(map(self.content.count, (b",", b"[", b"{")))
        if most_values is not None and values > most_values:
            raise ValueError(f"expected JSON of at most {most_values} values, found {values}")
        try:
            return json.loads(self.content.decode())
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error

    @property
    def retry_after_s(self) -> float | None:
        """``Retry-After``, seconds or a date, as seconds from 0 to :data:`LONGEST_RETRY_S`; None if absent or unreadable."""
        text = self.retry_after.strip()
        if text.isascii() and text.isdigit():
            return min(float(text), LONGEST_RETRY_S)
        if not text or len(text) > _LONGEST_HEADER:
            return None
        try:
            until = email.utils.parsedate_to_datetime(text)
            wait_s = (until - datetime.datetime.now(until.tzinfo)).total_seconds()
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError):
            return None
        return min(max(0.0, wait_s), LONGEST_RETRY_S)
