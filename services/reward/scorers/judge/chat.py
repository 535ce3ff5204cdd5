"""A client of OpenAI-compatible chat completions, with rate limit and retries.

::

    ask ──▶ a place (concurrency) ──▶ a turn (requests_per_s) ──▶ POST {url}/chat/completions, within timeout_s
             ▲                                                       ├── 200 with a message      ──▶ its text
             │  wait: BACKOFF_S, doubled each time, or as            ├── 408, 409, 425, 429, 5xx, no connection,
             └─ Retry-After says; at most MAX_WAIT_S ────────────────┤   late, 200 without a message or without a verdict
                                                                     └── anything else           ──▶ NoAnswer at once

``Retry-After`` delays every request of this client. The key is removed from error messages.
"""

import asyncio
import contextlib
import datetime
import email.utils
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import httpx
from prometheus_client import Counter, Histogram

from shared.backoff import Backoff
from shared.errors import SettingsError, TemporaryError
from shared.files.secret_file import read_private
from shared.settings.rewards.scorers import JudgeScorer

REQUESTS = Counter(
    "penstock_reward_judge_requests_total",
    "Requests to a judge, by outcome: ok, retried (a failure that may pass), refused, or unparsable (answered without a verdict).",
    ["scorer", "outcome"],
)
SECONDS = Histogram("penstock_reward_judge_request_seconds", "Time of one answered request to a judge.", ["scorer"])
TOKENS = Counter(
    "penstock_reward_judge_tokens_total",
    "Tokens as a judge's endpoint counts them: prompt or completion.",
    ["scorer", "of"],
)

_PASSING = frozenset({408, 409, 425, 429})
_LONGEST_ERROR = 120
_LARGEST_RESPONSE_BYTES = 4 * 1024**2
_MOST_TOKENS = 10**9
_REQUEST = {"max_tokens": 512, "temperature": 0.0}
"""Defaults of `request`."""
ATTEMPTS = 4
"""Requests per sample before its group is retried through the bus."""
BACKOFF_S = 0.5
"""First wait; doubles with jitter."""
MAX_WAIT_S = 30.0
"""The group goes back to the bus if the endpoint asks for more."""
_BACKOFF = Backoff(BACKOFF_S, longest_s=MAX_WAIT_S)


T = TypeVar("T")


class NoAnswer(TemporaryError):
    """The endpoint gave no answer within all attempts."""


class NoVerdict(NoAnswer):
    """The endpoint answered, but unreadably."""


class _Passing(Exception):
    """A retryable failure; ``wait_s`` is the wait that the endpoint requested."""

    def __init__(self, reason: str, wait_s: float | None = None, ending: type[NoAnswer] = NoAnswer) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.ending = ending


class ChatClient:
    """Query one model at one endpoint. Raises SettingsError for an invalid URL or key."""

    def __init__(self, scorer: JudgeScorer) -> None:
        self._scorer = scorer
        try:
            self._url = httpx.URL(scorer.url.rstrip("/") + "/chat/completions")
        except httpx.InvalidURL as error:
            raise SettingsError(
                f"expected a URL for scorer {scorer.name!r}, found {scorer.url!r} ({error}): change url in [[reward.scorers]]"
            ) from error
        self._key = read_key(scorer)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=scorer.concurrency, max_keepalive_connections=scorer.concurrency)
        self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=scorer.timeout_s)
        self._places = asyncio.Semaphore(scorer.concurrency)
        self._pace = Pace(scorer.requests_per_s)

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, question: str, read: Callable[[str], Awaitable[T | None]]) -> T:
        """Return ``read(answer)``; asks again while that is None.

        Raises:
            NoVerdict: the last answer was unreadable.
            NoAnswer: no answer.
            TemporaryError: ``read`` cannot work now.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._ask_once(question, read)
            except _Passing as error:
                if attempt == ATTEMPTS:
                    raise error.ending(f"{error}, as the last of {attempt} requests") from error
                if (error.wait_s or 0.0) > MAX_WAIT_S:
                    raise NoAnswer(f"{error}, and to wait {error.wait_s:g} s, more than {MAX_WAIT_S:g} s") from error
                if error.wait_s is not None:
                    self._pace.hold(error.wait_s)
                else:
                    await asyncio.sleep(_BACKOFF.jittered_s(attempt))
        raise AssertionError("expected at least one attempt")

    async def _ask_once(self, question: str, read: Callable[[str], Awaitable[T | None]]) -> T:
        async with self._places:
            await self._pace.turn()
            started_s = time.monotonic()
            try:
                response = await self._post(question)
                answer = self._read(response)
            except _Passing:
                REQUESTS.labels(self._scorer.name, "retried").inc()
                raise
        SECONDS.labels(self._scorer.name).observe(time.monotonic() - started_s)
        verdict = await read(answer)
        REQUESTS.labels(self._scorer.name, "ok" if verdict is not None else "unparsable").inc()
        if verdict is None:
            raise _Passing(f"there is no verdict in {self._hidden(answer)[-_LONGEST_ERROR:]!r}", ending=NoVerdict)
        return verdict

    async def _post(self, question: str) -> httpx.Response:
        try:
            async with asyncio.timeout(self._scorer.timeout_s):
                return await self._bounded(question)
        except TimeoutError as error:
            raise _Passing(f"there was no answer within {self._scorer.timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise _Passing(f"found {type(error).__name__}: {self._shown(str(error))}") from error

    async def _bounded(self, question: str) -> httpx.Response:
        content = bytearray()
        async with self._http.stream("POST", self._url, json=self._body(question)) as response:
            async for part in response.aiter_bytes():
                content += part
                if len(content) > _LARGEST_RESPONSE_BYTES:
                    raise _Passing(f"the response has more than {_LARGEST_RESPONSE_BYTES} bytes")
        headers = {name: value for name, value in response.headers.items() if name == "retry-after"}
        return httpx.Response(response.status_code, headers=headers, content=bytes(content))

    def _body(self, question: str) -> dict[str, object]:
        messages = [{"role": "system", "content": self._scorer.system}] if self._scorer.system else []
        return {
            "model": self._scorer.model,
            "messages": [*messages, {"role": "user", "content": question}],
            **_REQUEST,
            **self._scorer.request,
        }

    def _read(self, response: httpx.Response) -> str:
        status = response.status_code
        if status in _PASSING or status >= 500:
            raise _Passing(f"found HTTP {status}: {self._shown(response.text)}", retry_after_s(response))
        if status != 200:
            REQUESTS.labels(self._scorer.name, "refused").inc()
            raise NoAnswer(f"expected HTTP 200 from {self._url}, found {status}: {self._shown(response.text)}")
        try:
            answer = response.json()
            content = answer["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise _Passing(f"the response (HTTP 200) has no chat message: {self._shown(response.text)}") from error
        if not isinstance(content, str):
            raise _Passing("the response (HTTP 200) has a chat message that is not text")
        self._count(answer.get("usage"))
        return content

    def _count(self, usage: object) -> None:
        for of in ("prompt", "completion"):
            count = usage.get(f"{of}_tokens") if isinstance(usage, dict) else None
            if isinstance(count, int) and 0 < count <= _MOST_TOKENS:
                TOKENS.labels(self._scorer.name, of).inc(count)

    def _shown(self, text: str) -> str:
        return repr(" ".join(self._hidden(text).split())[:_LONGEST_ERROR])

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, "…") if self._key else text


class Pace:
    """Limit turns to ``per_s`` per second, evenly spaced; 0: no limit."""

    def __init__(self, per_s: float) -> None:
        self._gap_s = 1 / per_s if per_s else 0.0
        self._next_s = 0.0
        self._held_until_s = 0.0

    async def turn(self) -> None:
        at_s = max(time.monotonic(), self._next_s)
        self._next_s = at_s + self._gap_s
        while (wait_s := max(at_s, self._held_until_s) - time.monotonic()) > 0:  # noqa: ASYNC110 (held anew)
            await asyncio.sleep(wait_s)

    def hold(self, wait_s: float) -> None:
        self._held_until_s = max(self._held_until_s, time.monotonic() + wait_s)


def retry_after_s(response: httpx.Response) -> float | None:
    """Parse ``Retry-After``: seconds or a date; None if absent or unreadable."""
    text = response.headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    with contextlib.suppress(ValueError, TypeError):
        until = email.utils.parsedate_to_datetime(text)
        return max(0.0, (until - datetime.datetime.now(until.tzinfo)).total_seconds())
    return None


def read_key(scorer: JudgeScorer) -> str:
    source, _, place = scorer.key_source.partition(":")
    if not source:
        return ""
    if source == "env":
        key = os.environ.get(place, "").strip()
    else:
        secret = read_private(Path(place), f"key_source of scorer {scorer.name!r}", "key")
        key = secret.decode(errors="replace").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise SettingsError(
            f"expected a key in {place} for scorer {scorer.name!r}, but it is empty or has characters "
            "that a header cannot carry: set it, or change key_source in [[reward.scorers]]"
        )
    return key
