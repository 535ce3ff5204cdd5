"""Move messages: publish, read, hand over, leave, commit. Changes of several keys are one Lua script.

Delivery is at least once, the effect exactly once: the script that publishes an entry's result also acknowledges the
entry, and does nothing if another consumer was first.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, Generic, NewType, TypeAlias, TypeVar, cast

from redis.exceptions import ResponseError

from penstock.shared.bus import streams
from penstock.shared.bus.assembly import part_of, split
from penstock.shared.bus.claims import Claims
from penstock.shared.bus.client import connection
from penstock.shared.bus.client.commands import block, rows, text
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import ASSEMBLY, COUNTS, GENERATING, PAYLOADS, key
from penstock.shared.bus.messages import Prompt, RolloutGroup
from penstock.shared.bus.streams import Row, Stream
from penstock.shared.errors import BusUnavailable, MessageError
from penstock.shared.text.redaction import redact

log = logging.getLogger(__name__)

M = TypeVar("M")
EntryId = NewType("EntryId", str)

CRASHES = key(
    "crashes", "hash", "until its entry leaves", "`<stream>:<entry>` → how many processes died while they held it"
)
SWEPT = key("swept:<stream>", "string", "2 s", "who looked for silent consumers, which no other does meanwhile")
LEASES = key(
    "leases:<stream>", "sorted set", "the run's", "consumer → until when what it holds is its own, Unix milliseconds"
)
CAUSES = key("causes", "hash", "until its entry leaves", "`<stream>:<entry>` → why its newest attempt failed")

_PAGE_ENTRIES = 256
_PAYLOADS_AT_ONCE = 16
_GIVEN_BACK = "given-back"
_LONGEST_REASON = 2000
_AT_ONCE_MS = 86_400_000


_Taken: TypeAlias = "tuple[str, int, int, Mapping[Any, Any]]"
"""Id, attempts, crashes and fields of an entry."""


@functools.lru_cache(maxsize=16)
def _prompt(data: bytes) -> Prompt:
    """Decode a prompt, once for the samples of its group, which share it. Raises MessageError."""
    return wire.decode(data, Prompt)


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery(Generic[M]):
    """One entry held by this consumer.

    ``attempts`` includes this one. Earlier ones ended with an error, or with a process that worked on this entry alone.
    """

    stream: Stream
    entry_id: EntryId
    group_id: str
    attempts: int
    data: bytes
    kind: type[M]
    crashes: int = 0
    """Processes that died or fell silent holding it among other entries."""
    part: str = ""
    """Index of its sample in the group; "all": all samples; "": not assembled."""

    def message(self) -> M:
        message = cast("M", _prompt(self.data)) if self.kind is Prompt else wire.decode(self.data, self.kind)
        written = getattr(message, "group_id", None)
        if written is not None and str(written) != self.group_id:
            raise MessageError(
                f"expected a message of group {self.group_id[:40]!r}, as in its entry, found one of {written}"
            )
        return cast("M", part_of(message, self.part)) if isinstance(message, Prompt) else message


@dataclasses.dataclass(frozen=True, slots=True)
class Depth:
    entries: int
    pending: int
    oldest_age_s: float


class Bus(Claims):
    """One run's streams on one server.

    Args:
        client: from :func:`connection.open_client`.
        run_id: hash tag of all keys.
        wait_s: timeout for an unreachable server; None: forever.
        audit_entries: length of ``audit``.
    """

    def __init__(
        self, client: connection.Client, run_id: str, *, wait_s: float | None = None, audit_entries: int = 100_000
    ) -> None:
        super().__init__(client, run_id, wait_s=wait_s)
        self.audit_entries = audit_entries
        self.server = ""
        self._url = ""

    @classmethod
    async def connect(
        cls, url: str, run_id: str, *, wait_s: float | None = None, audit_entries: int = 100_000
    ) -> "Bus":
        """Open the bus, check its server, create the consumer groups.

        Raises:
            SettingsError: URL or server cannot be used.
            BusUnavailable: no answer within ``wait_s``.
        """
        bus = cls(connection.open_client(url), run_id, wait_s=wait_s, audit_entries=audit_entries)
        bus._url = url
        try:
            bus.server = await bus.call(lambda: connection.check_server(bus._client))
            await bus.make_groups()
        except BusUnavailable as error:
            await bus.close()
            raise BusUnavailable(f"{error} (bus.url = {redact(url)!r})") from error
        except BaseException:
            await bus.close()
            raise
        return bus

    def of_run(self, run_id: str) -> "Bus":
        return Bus(self._client, run_id, wait_s=self._wait_s, audit_entries=self.audit_entries)

    def again(self) -> "Bus":
        """Return it over connections of its own, for another event loop."""
        return Bus(connection.open_client(self._url), self.run_id, wait_s=self._wait_s)

    async def make_groups(self) -> None:
        """Create missing consumer groups, at their streams' beginning."""
        for stream in streams.GROUPED_STREAMS:
            await self.script("make_group", stream=stream, group=stream.group or "")

    # ---------------------------------------------------------------- publish and read

    async def publish(self, stream: Stream, message: object, group_id: str = "") -> EntryId:
        """Append to a broadcast or trimmed stream."""
        fields: dict[Any, Any] = {"id": group_id, "data": wire.encode(message)}
        return await self.append(stream, fields)

    async def append(self, stream: Stream, fields: Mapping[Any, Any]) -> EntryId:
        trim = () if stream.max_entries is None else ("MAXLEN", "~", stream.max_entries)
        pairs = [word for pair in fields.items() for word in pair]
        return EntryId(await self.xadd(stream, *trim, "*", *pairs))

    async def read(
        self, stream: Stream, kind: type[M], consumer: str, count: int, block_s: float | None
    ) -> list[Delivery[M]]:
        """Take up to ``count`` new entries; wait up to ``block_s`` for the first."""
        words = ["XREADGROUP", "GROUP", stream.group or "", consumer, "COUNT", count, *block(block_s), "STREAMS"]
        command = self.call(lambda: self._client.execute_command(*words, self.keys.of(stream), ">"))
        answer = await self._unless_empty(command)
        entries = rows(answer[0][1]) if answer else ()
        taken = [(entry_id, 1, 0, fields) for entry_id, fields in entries if fields]
        return await self._deliveries(stream, kind, taken)

    async def own(
        self, stream: Stream, kind: type[M], consumer: str, page_entries: int = _PAGE_ENTRIES, *, suspect: bool = False
    ) -> AsyncIterator[Delivery[M]]:
        """Take an earlier process's unfinished entries again, oldest first, in pages; no attempt is counted.

        Args:
            suspect: note on each that a process died holding it.
        """
        start = "-"
        while True:
            retaken = self.script(
                "retake", stream=stream, group=stream.group or "", consumer=consumer, start=start, count=page_entries,
                stream_name=stream.name, suspect=int(suspect),
            )  # fmt: skip
            page = await self._unless_empty(retaken)
            for delivery in await self._delivered(stream, kind, page):
                yield delivery
            if len(page) < page_entries:
                return
            start = f"({text(page[-1][0])}"

    async def _unless_empty(self, command: Awaitable[list[Any]]) -> list[Any]:
        """Return the rows; recreate the consumer groups if the server lost its data."""
        try:
            return await command
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            await self.make_groups()
            return []

    async def pending(self, stream: Stream, consumer: str, count: int) -> frozenset[EntryId]:
        """Return up to ``count`` entries that ``consumer`` was delivered and that have not left the stream."""
        words = ("XPENDING", self.keys.of(stream), stream.group or "", "-", "+", count, consumer)
        asked = self.call(lambda: self._client.execute_command(*words, parse_detail=True))
        return frozenset(EntryId(text(row["message_id"])) for row in await self._unless_empty(asked))

    async def last_generated(self, stream: Stream) -> str:
        """Return the id of the newest entry that the stream ever had; "" if there is no such stream."""
        try:
            info = await self.ask("XINFO STREAM", stream)
        except ResponseError as error:
            if "no such key" not in str(error):
                raise
            return ""
        return text(info["last-generated-id"])

    async def within_reach(self, stream: Stream, consumer: str) -> int:
        """Return the number of entries that ``consumer`` holds or can take at once; not those of other consumers."""
        return int(
            await self.script(
                "within_reach", stream=stream, group=stream.group or "", consumer=consumer, given_back=_GIVEN_BACK
            )
        )

    async def reclaim(
        self, stream: Stream, kind: type[M], consumer: str, min_idle_s: float, count: int, *, suspects: int = -1
    ) -> list[Delivery[M]]:
        """Take over entries given back, or held for ``min_idle_s`` by a consumer without a lease (:meth:`renew`).

        Args:
            min_idle_s: 0 takes from any consumer.
            suspects: maximum number of the latter, each noted as it may have killed its consumer; -1: no limit and no note.
        """
        reclaimed = self.script(
            "reclaim", stream=stream, swept=SWEPT.of(stream.name), leases=LEASES.of(stream.name), group=stream.group or "",
            consumer=consumer, count=count, min_idle_ms=int(min_idle_s * 1000), given_back=_GIVEN_BACK,
            stream_name=stream.name, suspects=suspects,
        )  # fmt: skip
        return await self._delivered(stream, kind, await self._unless_empty(reclaimed))

    async def try_alone(self, delivery: Delivery[Any], consumer: str, *, passed: bool = False) -> bool:
        """Count this attempt before the entry is handled alone; False if no longer ours.

        Args:
            passed: the attempt ended and does not count.
        """
        tried = await self.script(
            "try_alone", stream=delivery.stream, group=delivery.stream.group or "", consumer=consumer,
            entry_id=delivery.entry_id, attempts=delivery.attempts + (not passed),
        )  # fmt: skip
        return bool(tried)

    async def note_crash(self, delivery: Delivery[M]) -> Delivery[M]:
        """Note that a process died holding the entry among others."""
        crashes = int(await self.write(CRASHES, "HINCRBY", _field(delivery), 1))
        return dataclasses.replace(delivery, crashes=crashes)

    async def note_cause(self, delivery: Delivery[Any], cause: str) -> None:
        """Note why an attempt failed."""
        await self.write(CAUSES, "HSET", _field(delivery), cause[:_LONGEST_REASON])

    async def cause(self, delivery: Delivery[Any]) -> str:
        """Return the newest attempt's error; "" if its process died."""
        noted = await self.hget(CAUSES, _field(delivery))
        return "" if noted is None else text(noted)

    async def _delivered(self, stream: Stream, kind: type[M], answers: Sequence[Any]) -> list[Delivery[M]]:
        taken = [
            (text(entry_id), int(attempts), int(crashes), dict(zip(fields[::2], fields[1::2], strict=True)))
            for entry_id, attempts, crashes, fields in answers
            if fields
        ]
        return await self._deliveries(stream, kind, taken)

    async def _deliveries(self, stream: Stream, kind: type[M], taken: Sequence[_Taken]) -> list[Delivery[M]]:
        """Return entries: parts with their groups' prompts, experience with its payload, which they do not have."""
        prompts: dict[str, bytes | None] = {}
        if stream in streams.SAMPLE_STREAMS:
            groups = {text(fields.get(b"id", b"")) for *_, fields in taken if fields.get(b"part")}
            prompts = dict(zip(groups, await self.hmget(GENERATING, *groups), strict=True)) if groups else {}
        apart = [entry for entry, *_, fields in taken if stream is streams.EXPERIENCE and not fields.get(b"data")]
        payloads = await self.payloads(apart)
        deliveries: list[Delivery[M]] = []
        for entry_id, attempts, crashes, fields in taken:
            group_id, part = text(fields.get(b"id", b"")), text(fields.get(b"part", b"")) if prompts else ""
            data = prompts[group_id] if part else payloads.get(entry_id) or fields.get(b"data")
            deliveries.append(Delivery(stream, EntryId(entry_id), group_id, attempts, data or b"", kind, crashes, part))
        return deliveries

    async def payloads(self, entries: Sequence[str]) -> dict[str, bytes]:
        """Return what entries of ``experience`` carry, of those that have not left, or were committed since the checkpoint.

        They are read few at a time: they are large.
        """
        known = dict[str, bytes]()
        for start in range(0, len(entries), _PAYLOADS_AT_ONCE):
            some = entries[start : start + _PAYLOADS_AT_ONCE]
            answers = await self.hmget(PAYLOADS, *(f"{streams.EXPERIENCE.name}:{entry}" for entry in some))
            known |= {entry: data for entry, data in zip(some, answers, strict=True) if data is not None}
        return known

    async def tail(
        self, stream: Stream, kind: type[M], after: str, count: int, block_s: float | None
    ) -> list[tuple[EntryId, M]]:
        """Return messages after ``after``; unreadable ones are logged and skipped."""
        while True:
            entries = await self.xread({stream: after}, count, block_s)
            messages = self._messages(kind, entries)
            if messages or not entries:
                return messages
            after = entries[-1][0]

    async def newest(self, stream: Stream, kind: type[M], count: int = 1) -> list[tuple[EntryId, M]]:
        """Return the newest messages, newest first."""
        return self._messages(kind, await self.xrevrange(stream, count=count))

    def _messages(self, kind: type[M], entries: Sequence[Row]) -> list[tuple[EntryId, M]]:
        messages: list[tuple[EntryId, M]] = []
        for entry_id, fields in entries:
            try:
                messages.append((EntryId(entry_id), wire.decode(fields.get(b"data", b""), kind)))
            except MessageError as error:
                log.warning("unreadable message skipped", extra={"entry": entry_id, "error": str(error)})
        return messages

    # ---------------------------------------------------------------- finish an entry

    async def hand_over(self, delivery: Delivery[Any], output: Stream, result: object) -> bool:
        """Publish ``result`` (message or bytes) and acknowledge the input; False if another consumer was first.

        Raises:
            PermanentError: it is longer than the server takes.
        """
        payload = result if isinstance(result, bytes) else wire.encode(result)
        return await self._hand_over([delivery], output, payload)

    async def hand_over_part(self, deliveries: Sequence[Delivery[Any]], output: Stream, part: RolloutGroup) -> int:
        """Publish the samples of a group that ended together, ``part.places``, and acknowledge their entries.

        If another consumer finished one of them, each is handed over alone. Return the number of those that counted.
        """
        if await self._hand_over(deliveries, output, wire.encode(part)):
            return len(deliveries)
        if len(deliveries) == 1:
            return 0
        alone = zip(deliveries, split(part), strict=True)
        return sum([await self.hand_over(delivery, output, sample) for delivery, sample in alone])

    async def _hand_over(self, deliveries: Sequence[Delivery[Any]], output: Stream, payload: bytes) -> bool:
        return await self._finish(deliveries, output, await self.shelved(payload, deliveries[0], output)) == 1

    async def lose(self, delivery: Delivery[Any], output: Stream, cause: str) -> bool | None:
        """Give up a sample, so that its group is made of the others; False if another consumer was first.

        None: fewer than half of the group's samples, or than two, would be left, and nothing is changed.
        """
        answer = await self._finish([delivery], output, b"", f"sample {delivery.part}: {cause}"[:_LONGEST_REASON])
        return None if answer < 0 else answer == 1

    async def _finish(
        self, deliveries: Sequence[Delivery[Any]], output: Stream, payload: bytes, cause: str = ""
    ) -> int:
        given = _input(deliveries[0])
        del given["part"], given["entry_id"]
        entries = [word for delivery in deliveries for word in (delivery.part, delivery.entry_id)]
        answer = await self.script(
            "hand_over", **given, output=output, output_name=output.name, payload=payload, cause=cause,
            audit_entries=self.audit_entries, entries=entries,
        )  # fmt: skip
        return int(answer)

    async def drop(self, delivery: Delivery[Any], reason: str, detail: str = "") -> bool:
        """Drop a group, counted as ``dropped:<reason>``."""
        return await self._leave(delivery, f"dropped:{reason}", detail, keep=False)

    async def bury(self, delivery: Delivery[Any], reason: str) -> bool:
        """Move an entry to the dead letters, counted as ``dead:<stream>``."""
        return await self._leave(delivery, f"dead:{delivery.stream.name}", reason, keep=True)

    async def acknowledge(self, delivery: Delivery[Any]) -> bool:
        """Acknowledge an entry without successor (evaluation results)."""
        return await self._leave(delivery, "", "", keep=False)

    async def _leave(self, delivery: Delivery[Any], outcome: str, detail: str, *, keep: bool) -> bool:
        stream = delivery.stream
        if delivery.part.isdecimal() and keep:
            detail = f"sample {delivery.part}: {detail}"
        left = await self.script(
            "leave", **_input(delivery), dead=stream.dead, outcome=outcome, detail=detail[:_LONGEST_REASON],
            attempts=delivery.attempts, keep=int(keep), audit_entries=self.audit_entries,
            counted=int(stream in streams.TRAINING_STREAMS),
        )  # fmt: skip
        return bool(left)

    async def requeue(
        self, delivery: Delivery[Any], prompt: Prompt, kept: Sequence[bytes] = (), reason: str = "requeued"
    ) -> bool:
        """Send a group back to the stream of its prompt, counted as ``reason``.

        Args:
            kept: the encoded part of each sample; b"" of those to generate again.
        """
        parts = [*kept, *[b""] * (prompt.sampling.samples - len(kept))]
        given = {**_input(delivery), "payload": wire.encode(prompt), "reason": reason, "parts": parts}
        given["source"] = streams.EPISODES if prompt.environment else streams.PROMPTS
        del given["part"]
        return bool(await self.script("requeue", **given))

    async def renew(self, stream: Stream, consumer: str, lease_s: float) -> set[EntryId]:
        """Keep what ``consumer`` holds from others for ``lease_s``; return all that it holds."""
        ours = await self.script(
            "renew", stream=stream, leases=LEASES.of(stream.name), group=stream.group or "", consumer=consumer,
            lease_ms=int(lease_s * 1000),
        )  # fmt: skip
        return {EntryId(text(entry)) for entry in ours}

    async def give_back(
        self, stream: Stream, consumer: str, entry_id: EntryId, *, idle_s: float, uncounted: int = 0
    ) -> int:
        """Let any consumer take an entry, as if idle for ``idle_s``.

        Args:
            uncounted: attempts that do not count.
        """
        return await self._give(stream, consumer, [entry_id], int(idle_s * 1000), uncounted, _GIVEN_BACK)

    async def give_all_back(self, stream: Stream, consumer: str) -> int:
        """Give back everything held, without counting this attempt; return the number of entries."""
        return await self._give(stream, consumer, [], _AT_ONCE_MS, 1, _GIVEN_BACK)

    async def leave_suspects(self, stream: Stream, consumer: str) -> int:
        """Give back everything held, as suspects; return the number of entries."""
        return await self._give(stream, consumer, [], _AT_ONCE_MS, 0, consumer)

    async def _give(
        self, stream: Stream, consumer: str, entries: Sequence[EntryId], idle_ms: int, uncounted: int, receiver: str
    ) -> int:
        given = await self.script(
            "give_back", stream=stream, leases=LEASES.of(stream.name), group=stream.group or "", consumer=consumer,
            idle_ms=idle_ms, uncounted=uncounted, receiver=receiver, entries=entries,
        )  # fmt: skip
        return int(given)

    # ---------------------------------------------------------------- look

    async def length(self, stream: Stream) -> int:
        return int(await self.ask("XLEN", stream))

    async def depths(self, *of: Stream) -> list[Depth]:
        answer = await self.script("depths", streams=of, groups=[stream.group or "" for stream in of])
        return [_depth(int(entries), int(pending), text(oldest)) for entries, pending, oldest in answer]

    async def depth(self, stream: Stream) -> Depth:
        return (await self.depths(stream))[0]

    async def counts(self) -> dict[str, int]:
        """Count endings of groups: ``trained``, ``dropped:<reason>``, ``dead:<stream>``; and those of ``NO_ENDINGS``."""
        return read_counts(await self.hgetall(COUNTS))

    async def remove(self, stream: Stream) -> None:
        await self.write(stream, "DEL")

    async def check_replication(self) -> str:
        """Raises SettingsError: see :func:`connection.check_replication`."""
        return await self.call(lambda: connection.check_replication(self._client))

    async def memory_bytes(self) -> tuple[int, int]:
        """Return memory used and maxmemory (0: not set)."""
        return await self.call(lambda: connection.memory_bytes(self._client))


def read_counts(raw: Mapping[bytes, bytes]) -> dict[str, int]:
    """Parse an answer to HGETALL."""
    return {text(name): int(value) for name, value in raw.items()}


def _depth(entries: int, pending: int, oldest: str) -> Depth:
    age_s = max(0.0, time.time() - int(oldest.partition("-")[0]) / 1000) if oldest else 0.0
    return Depth(entries, pending, age_s)


def _input(delivery: Delivery[Any]) -> dict[str, Any]:
    stream = delivery.stream
    return {
        "input": stream,
        "group": stream.group or "",
        "stream_name": stream.name,
        "entry_id": delivery.entry_id,
        "group_id": delivery.group_id,
        "part": delivery.part,
        "assembly": ASSEMBLY.of(delivery.group_id),
    }


def _field(delivery: Delivery[Any]) -> str:
    return f"{delivery.stream.name}:{delivery.entry_id}"
