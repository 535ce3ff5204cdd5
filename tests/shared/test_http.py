"""The HTTP client against a hostile server on a real socket, and what an answer may cost."""

import asyncio
import contextlib
import gzip
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from email.utils import formatdate

import pytest

from penstock.shared.http.answer import LONGEST_RETRY_S, Answer, NoHttpAnswer
from penstock.shared.http.client import HttpClient, ask
from penstock.shared.http.hub import bound_hub
from tests.conftest import PATIENCE_S

OK = b"HTTP/1.1 200 OK\r\n"


def layers(count: int, nbytes: int) -> bytes:
    content = b"\0" * nbytes
    for _ in range(count):
        content = gzip.compress(content)
    return content


async def answer_once(reader: asyncio.StreamReader, parts: Iterator[bytes], pause_s: float) -> AsyncIterator[bytes]:
    await reader.readuntil(b"\r\n\r\n")
    for part in parts:
        yield part
        await asyncio.sleep(pause_s)


@contextlib.asynccontextmanager
async def serving(parts: Iterator[bytes], pause_s: float = 0.0) -> AsyncIterator[str]:
    tasks = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            async for part in answer_once(reader, parts, pause_s):
                writer.write(part)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
        for task in filter(None, tasks):
            task.cancel()
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)


def endless() -> Iterator[bytes]:
    yield OK + b"\r\n"
    while True:
        yield b"x" * 65536


def slow(head: bool) -> Iterator[bytes]:
    yield OK if head else OK + b"\r\n"
    while True:
        yield b"x"


def tiny_chunks() -> Iterator[bytes]:
    yield OK + b"Transfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"1\r\nx\r\n" * 10_000


def encoded(names: str, count: int) -> Iterator[bytes]:
    body = layers(count, 1 << 20)
    yield OK + f"Content-Encoding: {names}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


HOSTILE = {
    "endless": (endless(), 0.0, "the response has more than 1048576 bytes"),
    "slow head": (slow(head=True), 0.01, "there was no answer within 0.5 s"),
    "slow body": (slow(head=False), 0.01, "there was no answer within 0.5 s"),
    "tiny chunks": (tiny_chunks(), 0.0, "than 1048576 bytes, counting its tiny parts in full|no answer within 0.5 s"),
    "one encoding": (encoded("gzip", 1), 0.0, "expected an answer without content encoding, found 'gzip'"),
    "three encodings": (encoded("gzip, gzip, gzip", 3), 0.0, "without content encoding, found 'gzip, gzip, gzip'"),
    "no HTTP": (iter([b"SSH-2.0-x\r\n"]), 0.0, "found RemoteProtocolError"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_answer_is_refused_with_a_sentence(name: str) -> None:
    parts, pause_s, sentence = HOSTILE[name]
    async with (
        serving(parts, pause_s) as url,
        HttpClient(timeout_s=0.5 if "0.5 s" in sentence else PATIENCE_S) as client,
    ):
        with pytest.raises(NoHttpAnswer, match=sentence):
            await client.ask("POST", url, json={})


async def test_redirects_are_not_followed_and_cookies_are_not_kept() -> None:
    reply = b"HTTP/1.1 302 x\r\nLocation: /elsewhere\r\nSet-Cookie: a=b\r\nContent-Length: 0\r\n\r\n"
    async with serving(iter([reply])) as url, HttpClient(timeout_s=PATIENCE_S) as client:
        assert (await client.ask("GET", url)).status == 302
        assert len(client._http.cookies.jar) == 0


async def test_synchronous_code_may_ask_in_a_running_loop() -> None:
    async with serving(iter([OK + b"Content-Length: 2\r\n\r\n{}"])) as url:
        answer = await asyncio.to_thread(ask, "GET", url, timeout_s=PATIENCE_S)
    assert (answer.json(), answer.text()) == ({}, "{}")
    with pytest.raises(NoHttpAnswer, match="InvalidURL"):
        ask("GET", "http://host:port", timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        ("7", 7.0),
        ("9" * 5_000, LONGEST_RETRY_S),
        ("soon", None),
        ("", None),
        ("-1", None),
        ("\u0667", None),
        (formatdate(0.0, usegmt=True), 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", LONGEST_RETRY_S),
        ("Fri, 31 Dec 9999 23:59:59 -9999", None),
        ("Fri, 99999999999999999999 Dec 2026 00:00:00 GMT", None),
        ("Fri, 01 Dec 99999999999999999999 00:00:00 GMT", None),
        ("Fri, 01 Dec 2026 99999999999999999999:00:00 GMT", None),
        ("Fri, 01 Dec 2026 00:00:00 +99999999999999999999", None),
        ("Fri, 01 Dec 2026 00:00:00 " + "9" * 100_000, None),
    ],
)
def test_retry_after_is_seconds_or_a_date_of_at_most_a_day(header: str, wait_s: float | None) -> None:
    assert Answer("", 429, b"", header).retry_after_s == wait_s


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 99_000, "the JSON is nested too deeply|Expecting value"),
        (b'{"a":' * 40_000, "nested too deeply|Expecting value"),
        (b"[[]" + b",[]" * 60_000 + b"]", "expected JSON of at most 100000 values"),
        (b"1" * 5_000, "Exceeds the limit"),
        ("[1]".encode("utf-16"), "can't decode|invalid start byte"),
    ],
)
def test_json_is_bounded_before_it_is_parsed(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Answer("", 200, content).json()


def test_the_text_of_an_error_is_short_and_without_the_key() -> None:
    text = Answer("", 500, b"\xff " + b"a " * 500_000 + b"sk-1").text("sk-1")
    assert len(text) < 4_100
    assert Answer("", 500, b"key sk-1\n!").text("sk-1") == "key … !"


MEMORY = """
import asyncio, sys
from pathlib import Path
from penstock.shared.http.client import HttpClient
from penstock.shared.http.answer import NoHttpAnswer
def peak_kib():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
async def main():
    async with HttpClient(timeout_s=60) as client:
        before = peak_kib()
        answers = await asyncio.gather(*(client.ask("GET", sys.argv[1]) for _ in range(16)), return_exceptions=True)
        assert all(isinstance(each, NoHttpAnswer) for each in answers), answers
        print(peak_kib() - before)
asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["bomb", "endless"])
async def test_sixteen_hostile_answers_at_once_cost_a_process_less_than_a_hundred_megabytes(kind: str) -> None:
    body = layers(3, 256 << 20)
    bomb = OK + b"Content-Encoding: gzip, gzip, gzip\r\n\r\n" + body

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for part in [bomb] if kind == "bomb" else endless():
                writer.write(part)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", MEMORY, url, stdout=subprocess.PIPE)
    async with asyncio.timeout(PATIENCE_S):
        written, _ = await child.communicate()
    server.close()
    assert child.returncode == 0
    assert int(written) * 1024 < 100 * 1024**2


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (encoded("gzip", 1), "expected an answer of the hub without content encoding, found 'gzip'"),
        (endless(), "the hub's answer has more than 16777216 bytes"),
    ],
)
async def test_an_answer_of_the_hub_is_bounded_in_its_library_too(parts: Iterator[bytes], sentence: str) -> None:
    from huggingface_hub import HfApi

    bound_hub()
    async with serving(parts) as url:
        with pytest.raises(OSError, match=sentence):
            await asyncio.to_thread(HfApi(endpoint=url).dataset_info, "a/b", timeout=PATIENCE_S)
