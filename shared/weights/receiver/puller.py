"""The control side of a pull, in the rollout process. No torch.

::

    offer = await puller.ask(source, record)       ← its header must match the ledger
    await engine.stage(offer)                      ← every rank's Receiver joins the group and receives
    await puller.finish(offer, error=None)         ← or the error, which drops the session

Each source keeps one open connection, its session, with the ranks' group.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from penstock.shared.bus.messages import PolicyRecord
from penstock.shared.errors import PeerError, SourceGone, WeightsError
from penstock.shared.peers import frames
from penstock.shared.peers.handshake import Secret, connect
from penstock.shared.weights.format import manifest
from penstock.shared.weights.format.layout import Header, Layout, plan_layout
from penstock.shared.weights.transport.offer import Offer
from penstock.shared.weights.transport.place import DeviceLocation
from penstock.shared.weights.waits import FILE_DEADLINES

log = logging.getLogger(__name__)

__all__ = ["DeviceLocation", "Puller", "file_offer"]

_KNOWN_LAYOUTS = 4
_REASON_S = 0.1
_MAX_SHARES = 1024


@dataclasses.dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Puller:
    """Requests weights for ``ranks`` processes at ``place``; answers are due within ``deadline_s``."""

    def __init__(self, place: DeviceLocation, ranks: int, deadline_s: float, secret: Secret) -> None:
        self._place = place
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._secret = secret
        self._sessions: dict[str, _Connection] = {}
        self._layouts: dict[str, Layout] = {}
        """By digest, newest last."""

    async def ask(self, source: str, record: PolicyRecord) -> Offer:
        """Return the offer of ``source`` (host:port) for ``record``'s version, for which it then awaits the ranks."""
        return await self._whole("ask", source, record, self._deadline_s)

    async def ask_for_file(self, source: str, record: PolicyRecord) -> Offer:
        """Let ``source`` write the version to shared storage; return its location, or raise WeightsError."""
        return await self._whole("file", source, record, FILE_DEADLINES * self._deadline_s)

    async def finish(self, offer: Offer, error: str | None) -> None:
        """Report the end of a pull, unless the source is gone; an error drops the session."""
        await asyncio.gather(*(self._finish(source, error) for source in offer.sources))

    async def _finish(self, offer: Offer, error: str | None) -> None:
        session = self._sessions.get(offer.source)
        if session is None or offer.transport == "file":
            return
        try:
            async with asyncio.timeout(self._deadline_s):
                session.writer.write(frames.pack({"verb": "done", "ok": error is None, "error": error or ""}))
                await session.writer.drain()
        except (OSError, TimeoutError):
            self._drop(offer.source)
        if error is not None:
            await self._hear(session, offer)
            self._drop(offer.source)

    async def _hear(self, session: _Connection, offer: Offer) -> None:
        with contextlib.suppress(OSError, TimeoutError, PeerError):
            async with asyncio.timeout(min(_REASON_S, self._deadline_s)):
                said = await frames.receive_async(session.reader)
            log.warning("the source ended a pull", extra={"source": offer.source, "reason": str(said.get("error"))})

    async def close(self) -> None:
        for source in list(self._sessions):
            self._drop(source)

    async def _whole(self, verb: str, source: str, record: PolicyRecord, deadline_s: float) -> Offer:
        """Return the offer of ``source``, with those of the other sources that it names."""
        offer, others = await self._question(verb, source, record, deadline_s)
        try:
            questions = (self._question(verb, other, record, deadline_s) for other in others)
            answers = await asyncio.gather(*questions, return_exceptions=True)
        except BaseException:
            self._drop(source)
            raise
        parts = [answer for answer in answers if not isinstance(answer, BaseException)]
        offer = dataclasses.replace(offer, parts=tuple(part for part, _ in parts))
        for error in answers:
            if isinstance(error, BaseException):
                await self.finish(offer, str(error))
                raise error
        return offer

    async def _question(
        self, verb: str, source: str, record: PolicyRecord, deadline_s: float
    ) -> tuple[Offer, Sequence[str]]:
        try:
            async with asyncio.timeout(deadline_s):
                fields = await self._exchange(verb, source, record)
            if "error" in fields:
                refusal = str(fields["error"])
            else:
                return self._understood(fields, source, record), _addresses(fields)
        except TimeoutError as error:
            self._drop(source)
            raise WeightsError(f"{source} did not answer within {deadline_s:g} s") from error
        except (OSError, PeerError) as error:
            self._drop(source)
            kind = SourceGone if isinstance(error, ConnectionRefusedError) else WeightsError
            raise kind(f"could not reach the source of weights at {source}: {error}") from error
        except BaseException:
            self._drop(source)
            raise
        raise WeightsError(f"{source}: {refusal}")  # the session continues

    async def _exchange(self, verb: str, source: str, record: PolicyRecord) -> frames.Frame:
        fresh = source not in self._sessions
        try:
            return await self._asked(verb, source, record)
        except (OSError, PeerError):
            if fresh:
                raise
            self._drop(source)
            return await self._asked(verb, source, record)

    async def _asked(self, verb: str, source: str, record: PolicyRecord) -> frames.Frame:
        session = self._sessions.get(source)
        if session is None:
            session = self._sessions[source] = _Connection(*await connect(source, self._secret()))
        question = {
            "verb": verb,
            "version": record.version,
            "ranks": self._ranks,
            "known_layout": next(reversed(self._layouts), ""),
            "place": self._place.pack(),
        }
        session.writer.write(frames.pack(question))
        await session.writer.drain()
        return await frames.receive_async(session.reader)

    def _understood(self, fields: frames.Frame, source: str, record: PolicyRecord) -> Offer:
        try:
            offer = Offer.unpack(fields["offer"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WeightsError(f"expected an offer of {source}, found other content: {error!r}") from error
        offer = dataclasses.replace(offer, layout=self._layout(offer))
        if offer.transport != "file":
            offer = dataclasses.replace(offer, source=source)
        _check(offer, record, source)
        return offer

    def _layout(self, offer: Offer) -> Layout:
        if not offer.layout.tensors:
            known = self._layouts.get(offer.header.layout)
            if known is None:
                raise WeightsError("the source did not send the layout of the weights")
            return known
        digest = offer.layout.digest
        if digest != offer.header.layout:
            raise WeightsError("expected the layout that the header names, found another")
        self._layouts.pop(digest, None)
        self._layouts[digest] = offer.layout
        while len(self._layouts) > _KNOWN_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return offer.layout

    def _drop(self, source: str) -> None:
        session = self._sessions.pop(source, None)
        if session is not None:
            with contextlib.suppress(OSError, RuntimeError):
                session.writer.close()


def _addresses(fields: frames.Frame) -> Sequence[str]:
    addresses = fields.get("others", [])
    if not isinstance(addresses, list) or len(addresses) >= _MAX_SHARES:
        raise WeightsError(f"expected less than {_MAX_SHARES} addresses of further sources, found other content")
    return [str(address) for address in addresses]


def file_offer(record: PolicyRecord, deadline_s: float) -> Offer:
    """Return ``record``'s file snapshot as an offer, after checking its manifest; raises WeightsError."""
    location = Path(record.location)
    try:
        data = (location / "manifest.json").read_bytes()
    except OSError as error:
        raise WeightsError(f"could not read the snapshot at {location}: {error.strerror or error}") from error
    if hashlib.sha256(data).hexdigest() != record.manifest_digest:
        raise WeightsError(f"expected the manifest {record.manifest_digest[:12]}… at {location}, found another")
    decoded = manifest.decode(data, str(location))
    layout = plan_layout((entry.name, entry.dtype, entry.shape) for entry in decoded.tensors)
    return Offer(
        source=record.location,
        transport="file",
        layout=layout,
        header=Header(decoded.version, decoded.step, layout.digest, ()),
        deadline_s=deadline_s,
        manifest_digest=record.manifest_digest,
    )


def _check(offer: Offer, record: PolicyRecord, source: str) -> None:
    header = offer.header
    if header.version != record.version or header.digest != record.manifest_digest:
        raise WeightsError(
            f"expected version {record.version} with digest {record.manifest_digest[:12]}… at {source}, found version "
            f"{header.version} with {header.digest[:12]}…: other weights of that number"
        )
    if len(header.checksums) != len(offer.layout.bucket_bytes):
        raise WeightsError(f"expected a checksum of each bucket of {source}, found {len(header.checksums)}")
