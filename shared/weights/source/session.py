"""One puller's connection at a source, in its own thread.

::

    ask ─▶ look on the shelf ─▶ offer ─▶ open or reuse the group ─▶ meet ─▶ bucket 0 … n ─▶ wait for done
     ▲                                                                                              │
     └──────────────────────── the same group, the next version ◀───────────────────────────────────┘

    puller                                                        source
      (mutual authentication: ``penstock.shared.peers.handshake``)
      {verb: ask, version, ranks, known_layout, place}  ──▶
                                                      ◀──  {offer, others} | {error}
      (bytes move through the group, or IPC)
      {verb: done, ok, error}                         ──▶
      {verb: file, version, ranks, place}             ──▶
                                                      ◀──  {offer, others} | {error}
      {verb: probe, bytes}                            ──▶
                                                      ◀──  {zeros}

``others`` are the sources of the remaining buckets, if each of the trainer's ranks has a share.

Failures, including a puller's death during a transfer, close the connection and discard the group.
"""

import contextlib
import dataclasses
import functools
import logging
import socket
import uuid
import weakref
from collections import deque
from typing import Any, TypeGuard

import torch
from prometheus_client import Counter

from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import PeerError, WeightsError
from penstock.shared.peers import frames
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import Header, Layout
from penstock.shared.weights.format.shares import Pieces, decode, pack, slot_bytes
from penstock.shared.weights.source.files import Files
from penstock.shared.weights.source.shelf import Shelf
from penstock.shared.weights.stream_order import Lane, Point
from penstock.shared.weights.transport import alarm, ipc
from penstock.shared.weights.transport.group import WHOLE, Transfer, TransferGroup, open_group
from penstock.shared.weights.transport.offer import Offer, Transport
from penstock.shared.weights.transport.place import DeviceLocation, boot_id, plain_uuid
from penstock.shared.weights.transport.rendezvous import Rendezvous
from penstock.shared.weights.transport.sockets import tune
from penstock.shared.weights.waits import Interrupt, poll

log = logging.getLogger(__name__)

PULLS_SERVED = Counter("penstock_weights_pulls_served_total", "Pulls that ended with verified weights at the puller.")
PULL_FAILURES = Counter("penstock_weights_pull_failures_total", "Pulls that this process offered and that failed.")
SENT_BYTES = Counter("penstock_weights_sent_bytes_total", "Bytes of weights that this process sent to pullers.")

_WHOLE_BEFORE = b"here"
"""What a replica of Penstock 0.2.0 says instead of WHOLE."""
_MAX_RANKS = 64
_PACKED = 2
"""Buckets that are packed at a time, as each takes memory of its size."""
_NO_LAYOUT = Layout((), ())


@dataclasses.dataclass(frozen=True, slots=True)
class _Question:
    version: PolicyVersion
    ranks: int
    known_layout: str
    place: DeviceLocation


class Session:
    def __init__(
        self,
        connection: socket.socket,
        shelf: Shelf,
        rendezvous: Rendezvous,
        files: Files,
        address: str,
        deadline_s: float,
        idle_s: float,
    ) -> None:
        self.connection = connection
        self._shelf = shelf
        self._rendezvous = rendezvous
        self._files = files
        self._address = address
        self._deadline_s = deadline_s
        self._name = uuid.uuid4().hex
        self._idle_s = idle_s
        self._asked = False
        self._pulls = 0
        self._done: frames.Frame | None = None
        self._group: TransferGroup | None = None
        self._group_kind: tuple[Transport, int] = ("gloo", 0)
        self._lanes: dict[torch.device, Lane] = {}
        self._shared: weakref.WeakKeyDictionary[FlatSnapshot, ipc.SharedBuckets] = weakref.WeakKeyDictionary()

    def run(self) -> None:
        """Answer until the puller leaves; contains all peer errors."""
        try:
            tune(self.connection)
            while self._next():
                pass
        except (WeightsError, OSError) as error:
            log.warning("a session with a puller failed", extra={"session": self._name, "error": str(error)})
        finally:
            self.connection.close()
            self._drop_group()

    def _next(self) -> bool:
        if not frames.readable(self.connection, self._idle_s if self._asked else self._deadline_s):
            if self._asked:
                return False
            raise WeightsError("the peer sent no request before the deadline")
        if not self.connection.recv(1, socket.MSG_PEEK):
            return False
        frame = self._said()
        if frame.get("verb") == "probe":
            self._probe(frame)
            return True
        try:
            question = _question(frame)
        except WeightsError as error:
            self._answer({"error": str(error)})
            raise
        self._asked = True
        handle = {"ask": self._ask, "file": self._file}[frame["verb"]]
        handle(question)
        return True

    def _said(self) -> frames.Frame:
        try:
            return frames.receive(self.connection, self._deadline_s)
        except PeerError as error:
            raise WeightsError(str(error)) from error

    def _answer(self, frame: frames.Frame) -> None:
        try:
            frames.send(self.connection, frame, self._deadline_s)
        except PeerError as error:
            raise WeightsError(str(error)) from error

    # ------------------------------------------------------------------ verbs

    def _probe(self, frame: frames.Frame) -> None:
        """Answer with zeros, by which the peer measures the link."""
        nbytes = frame.get("bytes")
        if not _whole_number(nbytes, 0, frames.PROBE_BYTES):
            raise WeightsError(f"expected a probe of 0 to {frames.PROBE_BYTES:,} bytes, found {str(nbytes)[:40]}")
        self._answer({"zeros": bytes(nbytes)})

    def _ask(self, question: _Question) -> None:
        self._done = None
        with contextlib.ExitStack() as until_done:
            try:
                snapshot, header = self._shelf.find(question.version, self._watch)
                withdrawn = until_done.enter_context(self._shelf.pull(snapshot))
            except WeightsError as error:
                self._answer({"error": str(error)})
                return
            try:
                self._pull(question, snapshot, header, withdrawn)
            except WeightsError as error:
                PULL_FAILURES.inc()
                if self._group is not None:
                    alarm.sound(self._group.store, self._pulls)
                with contextlib.suppress(WeightsError):
                    self._answer({"error": str(error)})
                raise
            PULLS_SERVED.inc()

    def _pull(self, question: _Question, snapshot: FlatSnapshot, header: Header, withdrawn: Interrupt) -> None:
        def interrupt() -> None:
            withdrawn()
            self._watch()

        transport = choose_transport(question.place, question.ranks, snapshot.device)
        self._pulls += 1
        offer = Offer(
            source=self._address,
            transport=transport,
            layout=snapshot.layout if question.known_layout != snapshot.layout_digest else _NO_LAYOUT,
            header=header,
            deadline_s=self._deadline_s,
            session=self._name,
            pull=self._pulls,
            store=(self.connection.getsockname()[0], self._rendezvous.port),
            handles=self._handles(snapshot, header, interrupt) if transport == "ipc" else (),
            shares=snapshot.shares,
        )
        self._answer({"offer": offer.pack(), "others": list(self._shelf.others)})
        if transport != "ipc":
            self._send(offer, 1 if snapshot.shares else question.ranks, snapshot, interrupt)
        poll(lambda: self._done is not None, self._deadline_s, "the puller to say that it is done", interrupt)

    def _file(self, question: _Question) -> None:
        self._done = None
        try:
            snapshot, header = self._shelf.find(question.version, self._watch)
            if snapshot.shares:
                raise WeightsError("this source has a share of the version: its trainer writes the whole")
            with self._shelf.pull(snapshot):
                self._all_there(snapshot, header, self._watch)
                written = self._files.write(snapshot, header)
        except WeightsError as error:
            self._answer({"error": str(error)})
            return
        offer = Offer(
            source=str(written.location),
            transport="file",
            layout=snapshot.layout,
            header=header,
            deadline_s=self._deadline_s,
            manifest_digest=written.digest,
        )
        self._answer({"offer": offer.pack(), "others": list(self._shelf.others)})

    # ------------------------------------------------------------- what moves

    def _send(self, offer: Offer, ranks: int, snapshot: FlatSnapshot, interrupt: Interrupt) -> None:
        with self._lane(snapshot.device).entered():
            group = self._opened(offer, ranks, snapshot.device, interrupt)
            pieces = _pieces(group.meet(offer.pull, interrupt), snapshot)
            slots = slot_bytes(pieces) if pieces else ()
            window = min(group.window, _PACKED) if pieces else group.window
            under_way: deque[Transfer] = deque()
            for number in snapshot.numbers:
                snapshot.wait(number, self._deadline_s, offer.header, interrupt)
                bucket = snapshot.buckets[number]
                if pieces:
                    packed = [torch.zeros(slots[number], dtype=torch.uint8, device=bucket.device) for _ in pieces]
                    for rank, slot in zip(pieces, packed, strict=True):
                        pack(rank[number], bucket, slot)
                    under_way.append(group.scatter(packed))
                    SENT_BYTES.inc(slots[number] * len(pieces))
                else:
                    under_way.append(group.broadcast(bucket))
                    SENT_BYTES.inc(bucket.numel())
                if len(under_way) >= window:
                    under_way.popleft().land(self._deadline_s, interrupt)
            while under_way:
                under_way.popleft().land(self._deadline_s, interrupt)

    def _opened(self, offer: Offer, ranks: int, device: torch.device, interrupt: Interrupt) -> TransferGroup:
        assert offer.transport in ("nccl", "gloo")
        kind = (offer.transport, ranks)
        if self._group is None or self._group_kind != kind:
            self._drop_group()
            host = offer.store[0]
            self._group = open_group(
                offer.transport,
                lambda: self._rendezvous.connect(host, offer.session),
                0,
                1 + ranks,
                self._deadline_s,
                device,
                host,
                interrupt,
            )
            self._group_kind = kind
        return self._group

    def _lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            self._lanes[device] = Lane(device)
        return self._lanes[device]

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _handles(self, snapshot: FlatSnapshot, header: Header, interrupt: Interrupt) -> tuple[tuple[Any, ...], ...]:
        self._all_there(snapshot, header, interrupt)
        if snapshot not in self._shared:
            self._shared[snapshot] = ipc.SharedBuckets(snapshot)
        return self._shared[snapshot].handles

    def _all_there(self, snapshot: FlatSnapshot, header: Header, interrupt: Interrupt) -> None:
        with self._lane(snapshot.device).entered():
            for number in snapshot.numbers:
                snapshot.wait(number, self._deadline_s, header, interrupt)
            arrived = Point(snapshot.device)
            arrived.set()
            poll(arrived.reached, self._deadline_s, "the last bucket", interrupt)

    def _watch(self) -> None:
        if self._done is None and frames.readable(self.connection):
            frame = self._said()
            if frame.get("verb") != "done":
                raise WeightsError("expected the verb done from the puller")
            if frame.get("ok") is not True:
                raise WeightsError(f"the puller failed to receive: {str(frame.get('error'))[:300]}")
            self._done = frame


def _pieces(words: list[bytes], snapshot: FlatSnapshot) -> list[Pieces]:
    """Return the pieces that each rank asked for; none if all receive whole buckets. Raises WeightsError."""
    if set(words) <= {WHOLE, _WHOLE_BEFORE}:
        return []
    if snapshot.shares or WHOLE in words:
        raise WeightsError("expected every rank to receive its share or every rank the whole, found both")
    return [_decoded(word, snapshot.layout) for word in words]


@functools.lru_cache(maxsize=_MAX_RANKS)
def _decoded(word: bytes, layout: Layout) -> Pieces:
    return decode(word, layout)


def choose_transport(place: DeviceLocation, ranks: int, device: torch.device) -> Transport:
    if place.device == "cpu" or device.type == "cpu":
        return "gloo"
    own = plain_uuid(torch.cuda.get_device_properties(device).uuid)
    if own not in {plain_uuid(uuid) for uuid in place.gpu_uuids}:
        return "nccl"
    return "ipc" if ranks == 1 and place.boot_id == boot_id() else "gloo"  # NCCL refuses two ranks on one GPU


def _question(frame: frames.Frame) -> _Question:
    verb, version, ranks, place = (frame.get(name) for name in ("verb", "version", "ranks", "place"))
    uuids = place.get("gpu_uuids") if isinstance(place, dict) else None
    if verb not in ("ask", "file"):
        raise WeightsError(f"expected the verb ask or file, found {str(verb)[:40]!r}")
    if not _whole_number(version, 0, 1 << 62) or not _whole_number(ranks, 1, _MAX_RANKS) or not isinstance(place, dict):
        raise WeightsError("expected a version, 1 to 64 ranks and a place, found other content")
    return _Question(
        version=PolicyVersion(version),
        ranks=ranks,
        known_layout=str(frame.get("known_layout", "")),
        place=DeviceLocation(
            device="cuda" if place.get("device") == "cuda" else "cpu",
            gpu_uuids=tuple(str(uuid) for uuid in uuids) if isinstance(uuids, list) else (),
            boot_id=str(place.get("boot_id", "")),
        ),
    )


def _whole_number(value: object, least: int, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
