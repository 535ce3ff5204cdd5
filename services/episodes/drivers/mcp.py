"""MCP servers, in a driver's process (:mod:`child`): commands by stdio, URLs by streamable HTTP.

::

    Sessions of a slot ──▶ Session ──▶ the loop's thread: mcp.Client ──▶ a server

A server is started, or a session begun for each episode, so that none sees what another one did. Where all of a server's
tools say that they only read (``readOnlyHint``) the session is kept, and a call that was lost with it is made once more.
Servers' environment has no secrets, and they end with the process. Their answers are bounded.
"""

import asyncio
import contextlib
import functools
import json
import os
import re
import shlex
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import anyio
import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import CONNECTION_CLOSED, CallToolResult, Tool, jsonrpc_message_adapter
from pydantic import ValidationError

from penstock.shared.errors import TemporaryError
from penstock.shared.process.children import kill_group, reap
from penstock.shared.process.parent import die_with

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MOST_TOOLS, _LONGEST_SCHEMA = 128, 65_536
_LARGEST_MESSAGE = 4 << 20
_END_S, _SIGN_OF_LIFE_S = 1.0, 10.0


class Servers:
    """The servers that the settings name."""

    def __init__(self, names: Sequence[str], setup_s: float, tool_s: float) -> None:
        self.names, self.setup_s, self.tool_s = names, setup_s, tool_s
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` returns on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def sessions(self) -> "Sessions":
        return Sessions(self)


class Sessions:
    """A slot's, one a server; for one thread."""

    def __init__(self, servers: Servers) -> None:
        self._sessions = [Session(servers, name) for name in servers.names]

    def open(self) -> None:
        """Raises ConnectionError or TemporaryError: a server does not work."""
        for session in self._sessions:
            session.open()

    def close(self, *, kept: bool = True) -> None:
        for session in self._sessions:
            if not (kept and session.only_reads):
                session.close()

    def schemas(self) -> list[dict[str, Any]]:
        return [_schema(tool) for session in self._sessions for tool in session.tools.values()]

    def tools(self) -> dict[str, Callable[..., str]]:
        return {name: functools.partial(session.call, name) for session in self._sessions for name in session.tools}


class Session:
    """One with the server ``name``."""

    def __init__(self, servers: Servers, name: str) -> None:
        self._servers, self._name = servers, name
        self._connection: _Connection | None = None
        self.tools: Mapping[str, Tool] = {}

    @property
    def only_reads(self) -> bool:
        hints = [tool.annotations for tool in self.tools.values()]
        return all(hint is not None and hint.read_only_hint is True for hint in hints)

    def open(self) -> None:
        if self._connection is not None and self._connection.is_open:
            return
        self.close()
        connection = _Connection(self._name)
        self.tools = self._servers.wait(connection.open(self._servers.setup_s))
        self._connection = connection

    def close(self) -> None:
        if self._connection is not None:
            self._servers.wait(self._connection.close())
        self._connection = None

    def call(self, tool: str, /, **arguments: Any) -> str:
        """Return the text of the answer. Raises ConnectionError, or TemporaryError: what came is no answer."""
        try:
            return self._call(tool, arguments)
        except ConnectionError:
            self.close()
            if not self.only_reads:
                raise
        self.open()
        return self._call(tool, arguments)

    def _call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        if self._connection is None:
            raise ConnectionError(f"the MCP server {self._name!r} was lost")
        return self._servers.wait(self._connection.call(tool, arguments, self._servers.tool_s))


class _Connection:
    """On the loop: a task that holds the client open."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._over = asyncio.Event()
        self._client: Client | None = None
        self._holding: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._holding is not None and not self._holding.done()

    async def open(self, within_s: float) -> dict[str, Tool]:
        ready: asyncio.Future[dict[str, Tool]] = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold(ready))
        try:
            async with asyncio.timeout(within_s):
                return await ready
        except TimeoutError as error:
            self._holding.cancel()
            raise TemporaryError(f"the MCP server {self._name!r} gave no tools within {within_s:g} s") from error

    async def _hold(self, ready: "asyncio.Future[dict[str, Tool]]") -> None:
        try:
            async with Client(_transport(self._name)) as self._client:
                tools = await _listed(self._client)
                if not ready.done():
                    ready.set_result(tools)
                await self._over.wait()
        except Exception as error:  # noqa: BLE001 (a stranger's answers, as groups of the library's errors)
            if not ready.done():
                ready.set_exception(ConnectionError(f"the MCP server {self._name!r} does not work: {_words(error)}"))

    async def close(self) -> None:
        """End the session; its server ends soon after."""
        self._over.set()

    async def call(self, tool: str, arguments: Mapping[str, Any], within_s: float) -> str:
        assert self._client is not None
        try:
            async with asyncio.timeout(within_s):
                return _text(await self._client.call_tool(tool, dict(arguments)))
        except TimeoutError:
            await self._check()
            return f"no answer within {within_s:g} s"
        except MCPError as error:
            if error.code != CONNECTION_CLOSED and self.is_open:
                return f"error {error.code}: {error}"
            raise ConnectionError(f"the MCP server {self._name!r} ended") from error
        except (ValidationError, RuntimeError, ValueError) as error:
            raise TemporaryError(f"the MCP server {self._name!r} gave no answer of the protocol: {error}") from error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise ConnectionError(f"the MCP server {self._name!r} ended") from error

    async def _check(self) -> None:
        """Raise ConnectionError unless the server lives: what does not end was then the policy's wish."""
        assert self._client is not None
        try:
            async with asyncio.timeout(_SIGN_OF_LIFE_S):
                await self._client.session.list_tools()
        except Exception as error:
            raise ConnectionError(f"the MCP server {self._name!r} does not answer") from error


async def _listed(client: Client) -> dict[str, Tool]:
    """Return the tools by name. Raises ValueError: they are no tools for a policy."""
    tools, cursor = list[Tool](), None
    while len(tools) <= _MOST_TOOLS:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor or not page.tools:
            break
    if len(tools) > _MOST_TOOLS:
        raise ValueError(f"expected at most {_MOST_TOOLS} tools, found more")
    for tool in tools:
        if not _NAME.fullmatch(tool.name):
            raise ValueError(f"expected a tool's name of letters, digits and _.-, found {tool.name[:200]!r}")
        if len(json.dumps(_schema(tool))) > _LONGEST_SCHEMA:
            raise ValueError(
                f"expected a schema of {tool.name} of at most {_LONGEST_SCHEMA} characters, found a longer one"
            )
    return {tool.name: tool for tool in tools}


def _schema(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
    return {"type": "function", "function": function}


def _text(result: CallToolResult) -> str:
    parts = [block.text if block.type == "text" else f"({block.type}, left out)" for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _words(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:1000]


def _transport(name: str) -> Any:
    if re.match(r"https?://", name):
        return _http(name)
    return _stdio(shlex.split(name))


@contextlib.asynccontextmanager
async def _http(url: str) -> AsyncIterator[Any]:
    headers = {"accept-encoding": "identity"}
    timeout = httpx2.Timeout(30.0, read=None)
    async with (
        httpx2.AsyncClient(transport=_Bounded(), headers=headers, timeout=timeout) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=_LARGEST_MESSAGE) as streams,
    ):
        yield streams


class _Bounded(httpx2.AsyncHTTPTransport):
    """Refuses bodies beyond the largest message; the library bounds events."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.RemoteProtocolError("expected no compression, found one")
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _Counted(response.stream)
        return response


class _Counted(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        received = 0
        async for part in self._stream:
            received += len(part)
            if received > _LARGEST_MESSAGE:
                raise httpx2.RemoteProtocolError(f"expected a message of at most {_LARGEST_MESSAGE} bytes, found more")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


@contextlib.asynccontextmanager
async def _stdio(command: Sequence[str]) -> AsyncIterator[Any]:
    """Run a server that ends with this process, which the library's own would outlive; no line is longer than a message."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LARGEST_MESSAGE,
        start_new_session=True,
        preexec_fn=functools.partial(die_with, os.getpid(), signal.SIGKILL),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    to_client, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    sent, from_client = anyio.create_memory_object_stream[SessionMessage](0)
    with received, sent:
        reading = asyncio.create_task(_read(process.stdout, to_client))
        writing = asyncio.create_task(_write(process.stdin, from_client, to_client))
        try:
            yield received, sent
        finally:
            reading.cancel()
            writing.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(reading, writing, return_exceptions=True)
                await _end(process)


async def _read(output: asyncio.StreamReader, to_client: Any) -> None:
    async with to_client:
        with contextlib.suppress(
            ValueError, anyio.BrokenResourceError
        ):  # a line beyond the limit, or the session's end
            async for line in output:
                try:
                    message: SessionMessage | Exception = SessionMessage(jsonrpc_message_adapter.validate_json(line))
                except ValidationError as error:
                    message = error
                await to_client.send(message)


async def _write(stdin: asyncio.StreamWriter, from_client: Any, to_client: Any) -> None:
    async with from_client:
        try:
            async for sent in from_client:
                line = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                stdin.write(line.encode() + b"\n")
                await stdin.drain()
        except ConnectionError:
            await to_client.aclose()  # calls end, and do not wait


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            await process.wait()
    kill_group(process.pid)
    await reap(process)
