"""Laws of the API's server: clients do not affect each other."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvloop
from starlette.requests import ClientDisconnect
from starlette.types import Message

from benchmarks.bus import api_flood
from penstock.services.coordinator.api.app import make_app
from penstock.services.coordinator.api.auth import Access
from penstock.services.coordinator.api.bodies import Bodies, BodyBounds, BodyRefused
from penstock.services.coordinator.api.dependencies import Parts
from penstock.services.coordinator.api.routes.events import OpenStreams
from penstock.services.coordinator.api.server import ApiServer
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import Keys
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.process.connections import ConnectionBounds
from tests.conftest import PATIENCE_S, until
from tests.support.coordinator_players import make, settings

PATIENT = ConnectionBounds(
    unproven=4, proven=6, head_bytes=4096, head_s=PATIENCE_S, request_s=PATIENCE_S, unread_s=PATIENCE_S
)
SHORT = dataclasses.replace(PATIENT, head_s=0.3, request_s=0.3, unread_s=0.3)


@contextlib.asynccontextmanager
async def serving(
    bus: Bus, folder: Path, bounds: ConnectionBounds, access: Access | None = None
) -> AsyncIterator[ApiServer]:
    await Ledger(bus).create()
    parts = make(bus, settings(folder, coordinator={"autostart": False}))
    server = ApiServer("127.0.0.1", 0, bounds)
    task = asyncio.create_task(
        server.run(
            make_app(dataclasses.replace(parts.api, access=access or Access())), folder / "coordinator.json", "test"
        )
    )
    try:
        await server.answers.wait()
        yield server
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def answer(server: ApiServer, request: bytes) -> tuple[int, dict[str, object]]:
    """Send a request, again if a busy machine sent nothing of it within the server's time for a head."""
    text = b""
    while not text:
        reader, writer = await connect(server)
        writer.write(request)
        text = await reader.read()
        writer.close()
    head, _, body = text.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


async def connect(server: ApiServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.address.partition(":")
    return await asyncio.open_connection(host, int(port))


async def works(server: ApiServer) -> None:
    """Wait for an answer: on a busy machine, a request may take longer than a server with short bounds waits."""
    await until(lambda: is_answering(server))


async def is_answering(server: ApiServer) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
            return bool((await http.get("/healthz")).json() == {"status": "ok"})
    return False


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: loc", 408, "in time"),
        (b"POST /v1/run/pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{", 408, "in time"),
        (b"POST /page/x HTTP/1.1\r\nHost: localhost\r\nExpect: x\r\nX: " + b"y" * 5000 + b"\r\n\r\n", 431, "4096"),
        (b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431, "4096 bytes"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 30_000 + b"\r\n", 431, "4096 bytes"),
        (b"nonsense\r\n\r\n", 400, "HTTP/1.1"),
    ],
)
async def test_slow_and_large_requests_are_refused_and_others_answered(
    bus: Bus, tmp_path: Path, request_: bytes, status: int, words: str
) -> None:
    async with serving(bus, tmp_path, SHORT if status == 408 else PATIENT) as server:
        actual, problem = await answer(server, request_)
        assert actual == problem["status"] == status
        assert words in str(problem["detail"])
        await works(server)


async def test_probes_by_http_1_0_name_no_host(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path, PATIENT) as server:
        assert await answer(server, b"GET /healthz HTTP/1.0\r\n\r\n") == (200, {"status": "ok"})
        assert (await answer(server, b"GET /readyz HTTP/1.0\r\n\r\n"))[0] in (200, 503)
        assert (await answer(server, b"GET /v1/run HTTP/1.0\r\n\r\n"))[0] == 400
        assert (await answer(server, b"GET /healthz HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n"))[0] == 400


async def test_a_head_that_does_not_end_is_refused(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path, PATIENT) as server:
        reader, writer = await connect(server)
        writer.write(b"GET /healthz HTTP/1.1\r\nX: ")
        answer = asyncio.create_task(reader.read())
        while not answer.done():
            writer.write(b"y" * 100)
            await asyncio.sleep(0.001)
        assert answer.result().startswith(b"HTTP/1.1 431 ")
        writer.close()
        await works(server)


async def test_a_silent_connection_is_closed(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path, SHORT) as server:
        reader, writer = await connect(server)
        assert await reader.read() == b""
        writer.close()


UNFINISHED = b"GET /v1/run HTTP/1.1\r\nHost: loc"
TOKEN = b"a token of an operator"


def authorized(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN.decode()}\r\n\r\n".encode()


async def test_a_connection_without_token_displaces_the_oldest_of_its_kind_only(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path, PATIENT, Access(TOKEN)) as server:
        operator_reader, operator_writer = await connect(server)
        operator_writer.write(authorized("/v1/run/history"))
        await operator_reader.readuntil(b"\r\n\r\n")
        held = []
        for _ in range(9):
            reader, writer = await connect(server)
            writer.write(UNFINISHED)
            held.append((reader, writer))
        for reader, _ in held[:5]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        assert not any(reader.at_eof() for reader, _ in held[5:])
        operator_writer.write(authorized("/v1/run/history"))
        assert b"HTTP/1.1 200" in await operator_reader.readuntil(b"200 OK")
        for writer in [operator_writer, *(writer for _, writer in held)]:
            writer.close()


async def test_a_probe_that_has_arrived_is_answered_however_many_follow(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path, PATIENT, Access(TOKEN)) as server:
        host, _, port = server.address.partition(":")
        sent = []
        for request in [b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", *[UNFINISHED] * 9]:
            sent.append(socket.create_connection((host, int(port))))
            sent[-1].sendall(request)
        probe, writer = await asyncio.open_connection(sock=sent[0])
        assert (await probe.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        for each in sent[1:]:
            each.close()


async def test_the_operator_and_probes_are_answered_during_a_flood(bus: Bus, tmp_path: Path) -> None:
    access = Access(api_flood.TOKEN.encode())
    async with serving(bus, tmp_path, ConnectionBounds(), access) as server:
        flooded = await api_flood.measure(server.url, threads=300, seconds=3.0)
    for asked in (flooded["operator"], flooded["liveness"]):
        assert (asked["answered"], asked["others"]) == (1.0, [])
    assert flooded["hostile_connections"] > ConnectionBounds().unproven


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize(
    "request_", [authorized("/v1/run") * 3, b"GET /v1/run HTTP/1.1\r\nHost: a\r\n\r\n", b"x\r\n\r\n"]
)
def test_clients_that_leave_early_are_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, request_: bytes, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def slow() -> str:
        await asyncio.sleep(0.02)
        return "{}"

    parts: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Parts))
    parts |= {"bus": SimpleNamespace(keys=Keys("test")), "monitor": SimpleNamespace(text=slow), "access": Access(TOKEN)}
    parts["folder"] = tmp_path

    async def leave() -> None:
        server = ApiServer("127.0.0.1", 0)
        task = asyncio.create_task(server.run(make_app(Parts(**parts)), tmp_path / "coordinator.json", "test"))
        await server.answers.wait()
        host, _, port = server.address.partition(":")
        for how in (socket.SHUT_WR, socket.SHUT_RDWR) * 5:
            with socket.create_connection((host, int(port))) as client:  # in one turn of the server's loop
                client.sendall(request_)
                client.shutdown(how)
            await asyncio.sleep(0)
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
            assert (await http.get("/v1/run", headers={"Authorization": f"Bearer {TOKEN.decode()}"})).status_code == 200
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(leave())
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


async def test_a_client_that_reads_nothing_is_cut_off(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path, SHORT) as server:
        loop, client = asyncio.get_running_loop(), socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        host, _, port = server.address.partition(":")
        await loop.sock_connect(client, (host, int(port)))
        with client, contextlib.suppress(OSError):
            while True:  # ends when the server has cut the connection
                await loop.sock_sendall(client, b"GET /page/page.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
        await works(server)


def sending(*messages: Message) -> "asyncio.Queue[Message]":
    queue: asyncio.Queue[Message] = asyncio.Queue()
    for message in messages:
        queue.put_nowait(message)
    return queue


def part(size: int, *, more: bool) -> Message:
    return {"type": "http.request", "body": b"x" * size, "more_body": more}


async def test_bodies_are_bounded_alone_and_together_and_counted_while_held() -> None:
    bodies = Bodies(BodyBounds(each_bytes=60, total_bytes=100))
    async with bodies.read(sending(part(30, more=True), part(30, more=False)).get) as first:
        assert first == b"x" * 60
        with pytest.raises(BodyRefused, match="at most 100 bytes") as refused:
            async with bodies.read(sending(part(41, more=False)).get):
                pass
        assert (refused.value.answer.status_code, refused.value.answer.headers["retry-after"]) == (503, "2")
        async with bodies.read(sending(part(40, more=False)).get) as second:
            assert len(second) == 40
    with pytest.raises(BodyRefused, match="at most 60 bytes"):
        async with bodies.read(sending(part(61, more=False)).get):
            pass
    async with bodies.read(sending(part(60, more=False)).get) as again:
        assert len(again) == 60


async def test_a_body_that_is_not_whole_is_no_request() -> None:
    with pytest.raises(ClientDisconnect):
        async with Bodies(BodyBounds(whole_s=PATIENCE_S)).read(
            sending(part(5, more=True), {"type": "http.disconnect"}).get
        ):
            pass
    with pytest.raises(BodyRefused, match="the whole body") as refused:
        async with Bodies(BodyBounds(whole_s=0.05)).read(sending(part(5, more=True)).get):
            pass
    assert refused.value.answer.status_code == 408


async def test_event_streams_are_bounded_and_free_their_place(bus: Bus, tmp_path: Path) -> None:
    async with (
        serving(bus, tmp_path, ConnectionBounds()) as server,
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http,
    ):
        async with contextlib.AsyncExitStack() as held:
            for _ in range(32):
                stream = await held.enter_async_context(http.stream("GET", "/v1/events/stream"))
                assert stream.status_code == 200
            refused = await http.get("/v1/events/stream")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            assert "at most 128 event streams, 32 from one address" in refused.json()["detail"]
            assert (await http.get("/v1/run/settings")).status_code == 200

        async def is_free() -> bool:
            return (await http.head("/v1/events/stream")).status_code == 200

        await until(is_free)


def test_the_place_of_a_stream_is_given_back_once() -> None:
    streams = OpenStreams(total=2, each=1)
    leave = streams.enter("a")
    streams.enter("b")
    leave()
    streams.enter("c")
    assert streams.open == {"b": 1, "c": 1}


async def test_an_api_that_cannot_serve_says_why(bus: Bus, tmp_path: Path) -> None:
    await Ledger(bus).create()
    parts = make(bus, settings(tmp_path, coordinator={"autostart": False}))
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        server = ApiServer("127.0.0.1", other.getsockname()[1])  # both may bind the port, and one may listen
        other.listen()
        with pytest.raises(OSError, match="Address already in use"):
            async with asyncio.timeout(PATIENCE_S):
                await server.run(make_app(parts.api), tmp_path / "coordinator.json", "test")
    server.close()
