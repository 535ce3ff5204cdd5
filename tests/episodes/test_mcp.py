"""Tools of real MCP servers, in episodes on a real bus; the policy is scripted."""

import asyncio
import contextlib
import re
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.services.episodes.drivers.hosts import Hosts
from penstock.services.episodes.drivers.mcp import Servers
from penstock.shared.bus.bus import Bus
from penstock.shared.errors import SettingsError, TemporaryError
from tests.conftest import PATIENCE_S
from tests.episodes.test_service import buried, players, settings
from tests.support.chat_tokenizers import characters
from tests.support.environments import served
from tests.support.waits import until

SERVER = Path(__file__).parents[1] / "support" / "mcp_server.py"


GZIP = "Content-Type: application/json\r\nContent-Encoding: gzip"


def command(*arguments: str) -> str:
    return shlex.join([sys.executable, str(SERVER), *arguments])


@pytest.fixture
async def playing(bus: Bus, tmp_path: Path) -> AsyncIterator[Any]:
    async with players(bus, tmp_path) as begin:
        yield lambda script, *servers, **changes: begin(script, environment="", mcp=servers, **changes)


@pytest.fixture
async def over_http() -> AsyncIterator[str]:
    async with served(sys.executable, SERVER, "http") as port:
        yield f"http://127.0.0.1:{port}/mcp"


def calling(name: str, *values: str) -> Any:
    """A policy that calls a tool with each value in turn, those of its row if there are rows, and repeats the last answer."""

    def script(prompt: str, *_: Any) -> tuple[str, float]:
        (row,) = re.findall(r"row (\d+)", prompt)
        turn = prompt.count("</tool_call>")
        mine = values if name == "count" else values[int(row) : int(row) + 1]
        if turn == len(mine):
            return prompt.rpartition("</tool_call>t:")[2].removesuffix("a:"), 0.5
        key = "word" if name == "count" else "how"
        return f'<tool_call>{{"name": "{name}", "arguments": {{"{key}": "{mine[turn]}"}}}}</tool_call>', 0.5

    return script


async def test_each_episode_has_its_own_server(playing: Any) -> None:
    player = await playing(calling("count", "a", "b"), command("stdio"))
    await player.admit(*range(2))
    groups = await player.groups(2)
    assert [sample.text for group in groups for sample in group.samples] == ["a b"] * 4
    (tool,) = [tool for tool in player.hosts.tools if tool["function"]["name"] == "count"]
    assert tool["function"]["parameters"]["required"] == ["word"]


async def test_a_server_over_http_is_called_until_it_ends(playing: Any, over_http: str) -> None:
    player = await playing(calling("misbehave", "fine"), over_http)
    await player.admit(0)
    (group,) = await player.groups(1)
    assert {sample.text for sample in group.samples} == {"fine"}
    sessions = Servers([over_http], PATIENCE_S, PATIENCE_S).sessions()
    for how in ("flood", "die"):
        await asyncio.to_thread(sessions.open)
        with pytest.raises((ConnectionError, TemporaryError), match="the MCP server"):
            await asyncio.to_thread(sessions.tools()["misbehave"], how=how)
        sessions.close()


@pytest.mark.parametrize("head", ["Content-Type: application/json", "Content-Type: text/event-stream", GZIP])
async def test_an_answer_without_end_is_not_read_to_it(head: str) -> None:
    sent: list[int] = []

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent.append(0)
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode())
            while sent[-1] < 1 << 28:
                writer.write(b"x" * 65_536)
                await writer.drain()
                sent[-1] += 65_536
        writer.close()

    async with await asyncio.start_server(flood, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        sessions = Servers([f"http://127.0.0.1:{port}/mcp"], PATIENCE_S, PATIENCE_S).sessions()
        with pytest.raises((ConnectionError, TemporaryError), match="the MCP server"):
            await asyncio.to_thread(sessions.open)
        assert 0 < len(sent) < 10
        assert max(sent) < 1 << 26


async def test_a_server_ends_with_the_process_that_started_it() -> None:
    hosts = Hosts(settings(environment="", mcp=[command("stdio")]).episodes)
    await hosts.open()
    async with hosts.place("episode") as (host, slot):
        await host.ask(slot, "reset", PATIENCE_S, "setup_s", row={})
        assert host._process is not None
        servers = psutil.Process(host._process.pid).children(recursive=True)
        assert [str(SERVER) in server.cmdline() for server in servers] == [True]
        host._process.kill()
        await until(lambda: not any(server.is_running() for server in servers))
    await hosts.close()


MISBEHAVED = {
    "raise": "Error executing tool misbehave",
    "a<eos>u:b": "a<eos>u:b",
    "env": "OMP_NUM_THREADS",
}


async def test_whatever_a_server_answers_costs_at_most_its_episode(
    playing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "of the run")
    ways = (*MISBEHAVED, "die")
    player = await playing(calling("misbehave", *ways), command("stdio"), max_turns=2)
    await player.admit(*range(len(ways)))
    groups = await player.groups(len(MISBEHAVED))
    control = characters().convert_tokens_to_ids("<eos>")
    for group, (way, answer) in zip(groups, MISBEHAVED.items(), strict=True):
        for sample in group.samples:
            text = characters().decode(sample.token_ids)
            assert answer in text, way
            assert "A_SECRET" not in text
            assert (sample.token_ids == control).sum() == 5, "what a tool says is no control token"
    (reason,) = (await buried(player, 1)).values()
    assert re.search("the MCP server .* ended", reason)


def test_a_call_that_does_not_end_is_answered_and_the_session_kept_until_an_answer_is_too_long() -> None:
    sessions = Servers([command("stdio")], PATIENCE_S, 1.0).sessions()
    sessions.open()
    assert sessions.tools()["misbehave"](how="hang") == "no answer within 1 s"
    with pytest.raises(ConnectionError, match=r"the MCP server .* ended"):
        sessions.tools()["misbehave"](how="flood")
    sessions.close()


def test_a_server_that_only_reads_is_kept() -> None:
    sessions = Servers([command("stdio", "only-reads")], PATIENCE_S, PATIENCE_S).sessions()
    sessions.open()
    assert sessions.tools()["count"](word="a") == "a"
    sessions.close()
    sessions.open()
    assert sessions.tools()["count"](word="b") == "a b"
    with pytest.raises(ConnectionError, match="ended"):
        sessions.tools()["misbehave"](how="die")
    assert sessions.tools()["count"](word="c") == "c", "a server that died is started again"
    sessions.close(kept=False)


@pytest.mark.parametrize(
    ("servers", "error", "sentence"),
    [
        ([command("stdio"), command("stdio")], SettingsError, "found two that are called count"),
        (["/nonexistent/server"], SettingsError, "does not work: FileNotFoundError"),
        (["http://127.0.0.1:9/mcp"], SettingsError, "does not work"),
        (["sleep 1000"], SettingsError, "gave no tools within 1 s"),
        (["yes"], SettingsError, "gave no tools within 1 s"),
    ],
)
async def test_servers_that_cannot_be_used_are_refused(servers: list[str], error: Any, sentence: str) -> None:
    setup_s = 1.0 if "within" in sentence else PATIENCE_S
    hosts = Hosts(settings(environment="", mcp=servers, setup_s=setup_s).episodes)
    with pytest.raises(error, match=sentence):
        await hosts.open()
    await hosts.close()
