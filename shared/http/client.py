"""Ask HTTP endpoints, asynchronously or not, and read bounded answers.

An answer with a content encoding is refused although ``identity`` is asked for: a kilobyte can decode to gigabytes.
"""

import asyncio
import concurrent.futures
import http.cookiejar
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import httpx

from penstock.shared.http.answer import Answer, NoHttpAnswer

LARGEST_BYTES = 1024**2
"""Of an answer, if its reader does not expect more."""
_LEAST_PART_BYTES = 64
"""What a part counts at least, so that an answer of tiny chunks is not millions of them."""
_PARTS_PER_PASS = 32
"""Parts read before other tasks of the event loop have their turn."""
_LONGEST_LINE_BYTES = 1024**2
_ASKED = {"Accept-Encoding": "identity"}


class HttpClient:
    """Client of one endpoint, or of several; lives in one event loop.

    Args:
        timeout_s: of a whole request, from connecting to the answer's last byte.
        headers: of every request.
        concurrency: maximum connections; default: httpx's.
        trust_env: whether proxies of the environment are used.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        concurrency: int | None = None,
        verify: ssl.SSLContext | bool = True,
        trust_env: bool = True,
    ) -> None:
        self._timeout_s = timeout_s
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._http = httpx.AsyncClient(
            headers={**(headers or {}), **_ASKED},
            limits=limits if concurrency else httpx.Limits(),
            timeout=timeout_s,
            verify=verify,
            trust_env=trust_env,
            cookies=_no_cookies(),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def ask(self, method: str, url: str, *, largest_bytes: int = LARGEST_BYTES, **request: Any) -> Answer:
        """Return the answer to one request, whatever its status; ``request``: json, params, headers, as httpx takes them.

        Raises:
            NoHttpAnswer: none in time, an invalid URL, one that is too large or encoded, or HTTP that cannot be read.
        """
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._http.stream(method, url, follow_redirects=False, **request) as response,
            ):
                _check_encoding(response)
                content = await _bounded(response.aiter_raw(), largest_bytes)
        except TimeoutError as error:
            raise NoHttpAnswer(f"there was no answer within {self._timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise NoHttpAnswer(f"found {type(error).__name__}" + (f": {error}" if str(error) else "")) from error
        return Answer(url, response.status_code, content, response.headers.get("Retry-After", ""))


async def _bounded(parts: AsyncIterator[bytes], largest_bytes: int) -> bytearray:
    content, counted, number = bytearray(), 0, 0
    async for part in parts:
        content += part
        number += 1
        counted += max(len(part), _LEAST_PART_BYTES)
        if counted > largest_bytes:
            tiny = ", counting its tiny parts in full" if len(content) <= largest_bytes else ""
            raise NoHttpAnswer(f"the response has more than {largest_bytes} bytes{tiny}")
        if number % _PARTS_PER_PASS == 0:
            await asyncio.sleep(0)
    return content


def ask(method: str, url: str, *, timeout_s: float, trust_env: bool = True, **request: Any) -> Answer:
    """Ask once, from synchronous code; see :meth:`HttpClient.ask`."""

    async def once() -> Answer:
        async with HttpClient(timeout_s=timeout_s, trust_env=trust_env) as client:
            return await client.ask(method, url, **request)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(once())
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # in a notebook's cell, for one
        return thread.submit(lambda: asyncio.run(once())).result()


def stream_lines(
    url: str, headers: Mapping[str, str], silence_s: float, check: Callable[[Answer], object]
) -> Iterator[str]:
    """Yield the lines of an endless answer, such as server-sent events, until the endpoint hangs up.

    Args:
        silence_s: how long the endpoint may be silent.
        check: raises for an answer that is no stream.

    Raises:
        NoHttpAnswer: no connection, silence, or a line that is too long.
    """
    try:
        with httpx.stream("GET", url, headers={**headers, **_ASKED}, timeout=silence_s, trust_env=False) as answer:
            _check_encoding(answer)
            if not answer.is_success:
                check(Answer(url, answer.status_code, next(answer.iter_raw(), b"")))
            yield from _lines(answer.iter_raw(), silence_s)
    except httpx.RemoteProtocolError:
        return
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoHttpAnswer(str(error) or type(error).__name__) from error


def _lines(parts: Iterator[bytes], silence_s: float) -> Iterator[str]:
    line = bytearray()
    since_s = time.monotonic()
    for part in parts:
        *whole, rest = part.split(b"\n")
        for end in whole:
            yield (bytes(line) + end).decode(errors="replace").rstrip("\r")
            line.clear()
            since_s = time.monotonic()
        line += rest
        if len(line) > _LONGEST_LINE_BYTES or time.monotonic() - since_s > silence_s:
            raise NoHttpAnswer(f"expected lines of at most {_LONGEST_LINE_BYTES} bytes, each within {silence_s:g} s")


def _check_encoding(response: httpx.Response) -> None:
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise NoHttpAnswer(
            f"expected an answer without content encoding, found {encoding[:40]!r}: turn compression off at the endpoint"
        )


def _no_cookies() -> http.cookiejar.CookieJar:
    return http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(netscape=False, rfc2965=False))


def below(url: str, path: str) -> str:
    """Return the URL of ``path`` below ``url``. Raises ValueError: an invalid ``url``.

    >>> below("http://judge/v1/", "../detokenize")
    'http://judge/detokenize'
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(str(error)) from error
    return str(parsed.copy_with(path=f"{parsed.path.rstrip('/')}/{path}"))
