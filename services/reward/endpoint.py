"""A client of an HTTP endpoint that answers with JSON, with retries: of a judge or a teacher.

::

    ask ──▶ a place (concurrency) ──▶ POST, within timeout_s
             ▲                           ├── 200 that ``parse`` accepts ──▶ its value
             │  wait: BACKOFF_S, doubled ├── 408, 409, 425, 429, 5xx, no connection, late,
             │  each time, or as         │   too large, or not as ``parse`` and ``read`` expect
             └─ Retry-After says; at ────┤
                most MAX_WAIT_S          └── anything else              ──▶ NoAnswer at once

``Retry-After`` delays every request of this client. The key is removed from error messages.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

from prometheus_client import Counter, Histogram

from penstock.shared.backoff import Backoff
from penstock.shared.errors import SettingsError, TemporaryError
from penstock.shared.files.secret_file import read_private
from penstock.shared.http.answer import Answer, NoHttpAnswer
from penstock.shared.http.client import LARGEST_BYTES, HttpClient, below

REQUESTS = Counter(
    "penstock_reward_judge_requests_total",
    "Requests to a judge or a teacher, by outcome: ok, retried (a failure that may pass), refused, or unparsable (answered without a verdict).",
    ["scorer", "outcome"],
)
SECONDS = Histogram(
    "penstock_reward_judge_request_seconds", "Time of one answered request to a judge or a teacher.", ["scorer"]
)

_PASSING = frozenset({408, 409, 425, 429})
_REFUSALS = frozenset({400, 422})
_LONGEST_ERROR = 120
_PARSED_HERE_BYTES = 64 * 1024
"""Larger answers are parsed in a thread."""
ATTEMPTS = 4
"""Requests per sample before its group is retried through the bus."""
BACKOFF_S = 0.5
"""First wait; doubles with jitter."""
MAX_WAIT_S = 30.0
"""The group goes back to the bus if the endpoint asks for more."""
_BACKOFF = Backoff(BACKOFF_S, longest_s=MAX_WAIT_S)


Value = TypeVar("Value")
T = TypeVar("T")


class NoAnswer(TemporaryError):
    """The endpoint gave no answer within all attempts."""


class Refused(NoAnswer):
    """The endpoint understood the request and refused it (HTTP 400 or 422)."""


class Passing(Exception):
    """A retryable failure; ``wait_s`` is the wait that the endpoint requested."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Endpoint:
    """Ask one model.

    Args:
        of: its name in metrics.
        setting: its table, in messages.
        expected: what an answer has.

    Raises:
        SettingsError: an invalid URL or key.
    """

    def __init__(
        self,
        of: str,
        setting: str,
        url: str,
        key_source: str,
        expected: str,
        *,
        timeout_s: float,
        concurrency: int = 16,
    ) -> None:
        self._of, self._expected, self._url = of, expected, url
        try:
            below(url, "")
        except ValueError as error:
            raise SettingsError(f"expected a URL for {setting}, found {url!r} ({error}): change url") from error
        self._key = read_key(key_source, setting)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._http = HttpClient(timeout_s=timeout_s, headers=headers, concurrency=concurrency)
        self._places = asyncio.Semaphore(concurrency)
        self._held_until_s = 0.0

    async def close(self) -> None:
        await self._http.close()

    async def ask(
        self,
        path: str,
        body: Mapping[str, object],
        parse: Callable[[Answer], Value],
        read: Callable[[Value], Awaitable[T]],
        largest_bytes: int = LARGEST_BYTES,
    ) -> T:
        """POST ``body`` to ``path`` below the URL; return ``read(parse(answer))``. Both may raise Passing, to ask again.

        A response of more than ``largest_bytes`` is no answer. ``parse`` may raise LookupError, TypeError and ValueError for
        an answer that is not as expected; it runs in a thread for a large one, so it yields to others now and then.

        Raises:
            NoAnswer: no answer, or none that could be read.
            TemporaryError: ``read`` cannot work now.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = await self._ask_once(path, body, parse, largest_bytes)
                try:
                    value = await read(answer)
                except Passing:
                    REQUESTS.labels(self._of, "unparsable").inc()
                    raise
                REQUESTS.labels(self._of, "ok").inc()
                return value
            except Passing as error:
                if attempt == ATTEMPTS:
                    raise NoAnswer(f"{self.hidden(str(error))}, as the last of {attempt} requests") from error
                if (error.wait_s or 0.0) > MAX_WAIT_S:
                    raise NoAnswer(f"{error}, and to wait {error.wait_s:g} s, more than {MAX_WAIT_S:g} s") from error
                if error.wait_s is not None:
                    self._held_until_s = max(self._held_until_s, time.monotonic() + error.wait_s)
                else:
                    await asyncio.sleep(_BACKOFF.jittered_s(attempt))
        raise AssertionError("expected at least one attempt")

    async def _ask_once(
        self, path: str, body: Mapping[str, object], parse: Callable[[Answer], Value], largest_bytes: int
    ) -> Value:
        async with self._places:
            while (wait_s := self._held_until_s - time.monotonic()) > 0:  # noqa: ASYNC110 (held anew)
                await asyncio.sleep(wait_s)
            started_s = time.monotonic()
            try:
                answer = await self._http.ask("POST", below(self._url, path), json=body, largest_bytes=largest_bytes)
                value = await self._read(answer, parse)
            except NoHttpAnswer as error:
                REQUESTS.labels(self._of, "retried").inc()
                raise Passing(self._shown(str(error))) from error
            except Passing:
                REQUESTS.labels(self._of, "retried").inc()
                raise
        SECONDS.labels(self._of).observe(time.monotonic() - started_s)
        return value

    async def _read(self, answer: Answer, parse: Callable[[Answer], Value]) -> Value:
        status, shown = answer.status, repr(answer.text(self._key)[:_LONGEST_ERROR])
        if status in _PASSING or status >= 500:
            raise Passing(f"found HTTP {status}: {shown}", answer.retry_after_s)
        if status != 200:
            REQUESTS.labels(self._of, "refused").inc()
            ending = Refused if status in _REFUSALS else NoAnswer
            raise ending(f"expected HTTP 200 from {answer.url}, found {status}: {shown}")
        try:
            if len(answer.content) > _PARSED_HERE_BYTES:
                return await asyncio.to_thread(parse, answer)
            return parse(answer)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise Passing(f"the response (HTTP 200) has no {self._expected}: {shown}") from error

    def _shown(self, text: str) -> str:
        return " ".join(self.hidden(text).split())[: 2 * _LONGEST_ERROR]

    def hidden(self, text: str) -> str:
        """Return ``text`` without the key."""
        return text.replace(self._key, "…") if self._key else text


def read_key(key_source: str, setting: str) -> str:
    """Return the key of ``env:VARIABLE`` or ``file:PATH``. Raises SettingsError."""
    source, _, place = key_source.partition(":")
    if not source:
        return ""
    if source == "env":
        key = os.environ.get(place, "").strip()
    else:
        secret = read_private(Path(place), f"key_source of {setting}", "key")
        key = secret.decode(errors="replace").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise SettingsError(
            f"expected a key in {place} for {setting}, but it is empty or has characters that a header cannot carry: set "
            "it, or change key_source"
        )
    return key
