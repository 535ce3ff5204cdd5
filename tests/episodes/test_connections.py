"""Laws of the endpoint's connections: strangers stall no episode, and an episode only itself."""

import asyncio
import contextlib
import dataclasses
import resource
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.services.episodes.http.gateway import CONNECTIONS, Gateway
from penstock.shared.process.connections import ConnectionBounds
from tests.conftest import PATIENCE_S, until
from tests.support import builders

PATIENT = ConnectionBounds(
    unproven=4, proven=6, head_bytes=4096, head_s=PATIENCE_S, request_s=PATIENCE_S, unread_s=PATIENCE_S
)
SHORT = dataclasses.replace(PATIENT, head_s=0.3, request_s=0.3, unread_s=0.3)
UNFINISHED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def serving(bounds: ConnectionBounds, episodes: int = 1) -> AsyncIterator[tuple[Gateway, list[str]]]:
    """Yield a gateway, and the keys of its episodes."""
    gateway = Gateway("127.0.0.1:0", lambda: b"secret", "policy", 1000, bounds)
    task = asyncio.create_task(gateway.run())
    with contextlib.ExitStack() as visits:
        made: list[Any] = [SimpleNamespace(prompt=builders.prompt(number)) for number in range(episodes)]
        try:
            yield gateway, [visits.enter_context(gateway.visited(each)) for each in made]
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def connect(gateway: Gateway, content: bytes) -> Connection:
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(content)
    return reader, writer


def asking(key: str) -> bytes:
    return f"GET /v1/models HTTP/1.1\r\nHost: a\r\nx-api-key: {key}\r\n\r\n".encode()


async def ask(connection: Connection, key: str) -> int:
    """Return the status of an answer on an open connection, 0 if it was closed."""
    reader, writer = connection
    try:
        writer.write(asking(key))
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0
    return int(head.split()[1])


async def shown(gateway: Gateway, key: str) -> Connection:
    """Return a connection that has shown its key."""
    connection = await connect(gateway, b"")
    assert await ask(connection, key) == 200
    return connection


async def close(connections: list[Connection]) -> None:
    for _, writer in connections:
        writer.close()


async def test_ten_thousand_strangers_stall_no_episode() -> None:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wave = min(1000, files // 4)
    async with serving(ConnectionBounds()) as (gateway, (key,)):
        for _ in range(0, 10_000, wave):
            held = [await connect(gateway, UNFINISHED) for _ in range(wave)]
            fresh = await connect(gateway, b"")
            assert await ask(fresh, key) == 200, "it has time to prove its key"
            await close([*held, fresh])


@pytest.mark.parametrize(
    ("content", "bounds", "status"),
    [
        (UNFINISHED, SHORT, 408),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nx-api-key: KEY\r\n\r\n{", SHORT, 408),
        (UNFINISHED + b"a\r\nx: " + b"y" * 5000 + b"\r\n\r\n", PATIENT, 431),
        (b"\xff\xfe\r\n\r\n", PATIENT, 400),
    ],
)
async def test_slow_and_large_requests_are_refused(content: bytes, bounds: ConnectionBounds, status: int) -> None:
    async with serving(bounds) as (gateway, (key,)):
        reader, writer = await connect(gateway, content.replace(b"KEY", key.encode()))
        answer = await reader.read()
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert b'"type":"error"' in answer, "as the clients' SDKs read it"
        writer.close()


async def test_a_silent_connection_is_closed() -> None:
    async with serving(SHORT) as (gateway, (key,)):
        silent = await connect(gateway, b"")
        assert await ask(silent, key) == 200
        assert await silent[0].read() == b"", "an idle one too, in uvicorn's time"
        await close([silent])


async def test_a_key_that_is_no_episodes_closes_its_connection() -> None:
    async with serving(PATIENT) as (gateway, _):
        connection = await connect(gateway, b"")
        assert await ask(connection, "ep-0") == 401
        assert await connection[0].read() == b""
        await close([connection])


async def test_an_episode_displaces_its_own_connections_only() -> None:
    async with serving(PATIENT, 2) as (gateway, (greedy, other)):
        begun = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nx-api-key: {}\r\n\r\n{{"
        peaceful, *held = [await shown(gateway, key) for key in (other, *[greedy] * (CONNECTIONS + 4))]
        for (_, writer), key in ((peaceful, other), *((each, greedy) for each in held[4:])):
            writer.write(begun.format(key).encode())
        for reader, _ in held[:4]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        strangers = [await connect(gateway, UNFINISHED) for _ in range(9)]
        assert not any(reader.at_eof() for reader, _ in [peaceful, *held[4:]])
        await close([peaceful, *held, *strangers])


async def test_the_end_of_an_episode_cancels_all_of_its_requests_and_equal_ones() -> None:
    asked, ended = list[Any](), list[Any]()

    async def answer(*given: Any) -> None:
        asked.append(given)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(given)

    body = b'{"model": "policy", "messages": [{"role": "user", "content": "?"}]}'
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\nx-api-key: {}\r\n\r\n"
    episode: Any = SimpleNamespace(prompt=builders.prompt(9), answer=answer)
    async with serving(PATIENT) as (gateway, _):
        with gateway.visited(episode) as key:
            held = [await connect(gateway, head.format(len(body), key).encode() + body) for _ in range(3)]
            await until(lambda: len(asked) == 3)
        await until(lambda: len(ended) == 3)
        await close(held)
