"""Typed commands and scripts on a run's keys, only for ``penstock.shared.bus``."""

from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import OutOfMemoryError

from penstock.shared.bus.client import connection
from penstock.shared.bus.client.lua import SCRIPTS, Argument, Given
from penstock.shared.bus.client.server import Server, check_lengths
from penstock.shared.bus.keys import Key, Keys, Named
from penstock.shared.bus.streams import Row, Stream


class Commands(Server):
    """Commands on one run's keys; ``run_id`` is their hash tag."""

    def __init__(self, client: connection.Client, run_id: str, *, wait_s: float | None = None) -> None:
        super().__init__(client, wait_s=wait_s)
        self.run_id = run_id
        self.keys = Keys(run_id)

    async def script(self, name: str, **given: Given) -> Any:
        """Run one of ``shared/bus/scripts`` atomically; ``given``: arguments and undeclared keys.

        Raises:
            BusFull: the server is at its maxmemory, and this script adds to what is in flight.
            PermanentError: an argument is longer than the server takes.
            TypeError: ``given`` does not fit the script's header.
        """
        script = SCRIPTS[name]
        return await self.evaluate(script, *script.bind(self.keys, given))

    async def write(self, key: Named, command: str, *arguments: Argument) -> Any:
        """Run a write, even at the server's maxmemory: a run's own records are small."""
        return await self.script("write", key=key, command=command, arguments=arguments)

    async def xadd(self, stream: Stream, *arguments: Argument) -> str:
        """Append an entry, even at the server's maxmemory; return its id."""
        try:
            return text(await self.ask("XADD", stream, *arguments))
        except OutOfMemoryError:
            return text(await self.write(stream, "XADD", *arguments))

    async def ask(self, command: str, *words: Argument | Named) -> Any:
        arguments = self._words(words)
        check_lengths(arguments)
        return await self.call(lambda: self._client.execute_command(command, *arguments))

    async def ask_all(self, *commands: tuple[Argument | Named, ...], at_once: bool = False) -> list[Any]:
        """Run commands (name, key, arguments) in one round trip. ``at_once``: in one transaction."""

        async def send() -> list[Any]:
            pipeline = self._client.pipeline(transaction=at_once)
            for words in commands:
                pipeline.execute_command(*self._words(words))
            return await pipeline.execute()

        return await self.call(send)

    def _words(self, words: Sequence[Argument | Named]) -> list[Argument]:
        return [word if isinstance(word, (str, bytes, int, float)) else self.keys.of(word) for word in words]

    # ---------------------------------------------------------------- typed reads

    async def get(self, key: Key) -> bytes | None:
        value: bytes | None = await self.ask("GET", key)
        return value

    async def hget(self, key: Key, field: str) -> bytes | None:
        value: bytes | None = await self.ask("HGET", key, field)
        return value

    async def hmget(self, key: Key, *fields: str) -> list[bytes | None]:
        values: list[bytes | None] = await self.ask("HMGET", key, *fields)
        return values

    async def hgetall(self, key: Key) -> dict[bytes, bytes]:
        fields: dict[bytes, bytes] = await self.ask("HGETALL", key)
        return fields

    async def smembers(self, key: Key) -> set[bytes]:
        members: set[bytes] = await self.ask("SMEMBERS", key)
        return members

    async def xrange(self, stream: Stream, start: str = "-", end: str = "+", count: int | None = None) -> list[Row]:
        """Return entries, oldest first."""
        return rows(await self.ask("XRANGE", stream, start, end, *_count(count)))

    async def xrevrange(self, stream: Stream, end: str = "+", start: str = "-", count: int | None = None) -> list[Row]:
        """Return entries, newest first."""
        return rows(await self.ask("XREVRANGE", stream, end, start, *_count(count)))

    async def xread(self, after: Mapping[Stream, str], count: int, block_s: float | None = None) -> list[Row]:
        """Return entries after these ids; wait up to ``block_s`` for the first."""
        answer = await self.ask("XREAD", "COUNT", count, *block(block_s), "STREAMS", *after, *after.values())
        return [row for _, entries in answer or () for row in rows(entries)]

    async def keys_like(self, pattern: str) -> list[str]:
        async def scan() -> list[str]:
            return [key.decode() async for key in self._client.scan_iter(match=pattern, count=1000)]

        return await self.call(scan)

    async def unlink(self, names: Sequence[str]) -> None:
        """Delete keys by full name."""
        await self.call(lambda: self._client.execute_command("UNLINK", *names))


def rows(entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> list[Row]:
    return [(text(entry), fields) for entry, fields in entries]


def block(block_s: float | None) -> tuple[Argument, ...]:
    return () if block_s is None else ("BLOCK", max(1, int(block_s * 1000)))


def _count(count: int | None) -> tuple[Argument, ...]:
    return () if count is None else ("COUNT", count)


def text(value: bytes | str) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
