"""Receives one verified version of the weights into a replica's rank, or fails.

::

    GroupFeed (NCCL, gloo) ┐
    MappedFeed (IPC)       ├─ start ─▶ land ─▶ shadow.mark ─▶ checksum ──▶ all checksums to the host, compared
    FileFeed, ChangesFeed  ┘     several buckets ahead, on a CUDA stream of its own

Calls block, so do not use the decoding thread. The host only enqueues and polls; checksum memory is allocated first, as
allocations could wait for transfers. A failure voids the shadow and discards the group.
"""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.changes import Changes, read_changes
from penstock.shared.weights.format.checksum import add_checksum, text
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import Header
from penstock.shared.weights.format.shares import Share, Sums, encode
from penstock.shared.weights.receiver.feeds import ChangesFeed, Feed, FileFeed, GroupFeed, MappedFeed, SharesFeed
from penstock.shared.weights.stream_order import Lane, Point
from penstock.shared.weights.transport import alarm, ipc
from penstock.shared.weights.transport.group import WHOLE, TransferGroup, open_group
from penstock.shared.weights.transport.offer import Offer
from penstock.shared.weights.transport.rendezvous import connect_store
from penstock.shared.weights.transport.sockets import own_address
from penstock.shared.weights.waits import FILE_DEADLINES, bounded, poll

log = logging.getLogger(__name__)

_MAX_SOURCES = 4
"""Sources with open groups, by recent use, beside those of the other shares."""

_WARM_UP_S = 60.0
_MAX_MAPPED = 2


@dataclasses.dataclass(slots=True)
class _Session:
    name: str
    group: TransferGroup | None = None
    mapped: dict[tuple[ipc.Handle, ...], tuple[torch.Tensor, ...]] = dataclasses.field(default_factory=dict)


class Receiver:
    """Rank ``rank`` (from 1) of ``ranks`` processes, on ``device``; one receive at a time."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self._rank = rank
        self._ranks = ranks
        self._device = device
        self._lane = Lane(device)
        _warm_up(device)
        self._sessions: dict[str, _Session] = {}
        """By source, least recently used first."""
        self._most = _MAX_SOURCES
        self._aborted = threading.Event()
        self._quiet = True
        """Whether no failed transfer may still write into a shadow."""

    def receive(self, offer: Offer, shadow: FlatSnapshot, share: Share | None = None) -> Sums:
        """Fill and verify ``shadow``, marking buckets as they arrive. No device work may still use it.

        With a ``share`` the shadow is packed, and the caller verifies by the returned sums of all ranks
        (:func:`penstock.shared.weights.format.shares.check_sums`), unless the header has no checksums.
        """
        self._prepare(offer)
        name = "" if share is None else share.digest
        if offer.shares not in ("", name):
            raise WeightsError(f"{offer.source} has the shares of other ranks: their trainer has the whole version")
        if shadow.shares != name:
            raise WeightsError("expected a shadow of this rank's share, found another: make a new one")
        if shadow.layout != offer.layout:
            raise WeightsError("expected a shadow of the offered layout, found another: make a new one")
        changes = self._changes(offer, shadow) if share is None else ()
        shadow.begin(offer.header)
        try:
            with self._lane.entered():
                return self._receive(offer, shadow, share, changes)
        except BaseException as error:
            shadow.void(f"receiving version {offer.header.version} failed: {error}")
            self._leave(offer)
            raise

    def receive_each(self, offer: Offer, buffer: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (number, bytes) of each verified bucket through ``buffer`` (uint8, the largest bucket's size).

        Bytes are valid until the next request, in the caller's stream order. Raises WeightsError; earlier buckets were
        valid.
        """
        self._prepare(offer)
        if buffer.numel() < max(offer.layout.bucket_bytes):
            raise WeightsError(f"expected a buffer of {max(offer.layout.bucket_bytes)} bytes, found {buffer.numel()}")
        try:
            yield from self._receive_each(offer, buffer)
        except BaseException:  # also if the caller stops early: the source would keep sending
            self._leave(offer)
            raise

    def abort(self) -> None:
        """End a receive with WeightsError, from another thread; one that has not begun ends as it begins."""
        self._aborted.set()

    def begin(self) -> None:
        """Forget an earlier abort; before the receive is given to its thread."""
        self._aborted.clear()

    def unmap(self) -> None:
        """Close the mapped memory of sources; a dead one's stays allocated until then."""
        for session in self._sessions.values():
            session.mapped.clear()

    def close(self) -> None:
        self._aborted.set()
        for source in list(self._sessions):
            self._drop(source)

    # -------------------------------------------------------------- receiving

    def _changes(self, offer: Offer, shadow: FlatSnapshot) -> Sequence[Changes]:
        """Return what makes an offered snapshot by file of the one that is in ``shadow``, if that is to be had."""
        if offer.transport != "file" or not shadow.files or shadow.header is None:
            return ()
        shown: dict[str, object] = {"version": offer.header.version}
        try:
            changes = bounded(
                lambda _: read_changes(Path(offer.source), offer.manifest_digest, shadow.files),
                FILE_DEADLINES * offer.deadline_s,
                f"the changes at {offer.source}",
                self._check_aborted,
            )
            if changes and self._sums(shadow, offer.deadline_s) != shadow.header.checksums:
                raise WeightsError("the version that they change is not in place as it was received")
        except WeightsError as error:
            self._check_aborted()
            log.warning("changes cannot be used, the whole is read", extra={**shown, "error": str(error)})
            return ()
        log.info("changes were read" if changes else "no changes to read", extra={**shown, "versions": len(changes)})
        return changes

    def _sums(self, shadow: FlatSnapshot, deadline_s: float) -> tuple[str, ...]:
        with self._lane.entered():
            figures = _Figures(len(shadow.buckets), self._device)
            for number, bucket in enumerate(shadow.buckets):
                figures.add(number, bucket)
            return figures.texts(deadline_s, self._check_aborted)

    def _receive(
        self, offer: Offer, shadow: FlatSnapshot, share: Share | None, changes: Sequence[Changes] = ()
    ) -> Sums:
        expected = _expected(offer.header, len(shadow.buckets))
        figures = _Figures(len(shadow.buckets), self._device) if share is None else _ShareFigures(offer, share, shadow)
        if changes:
            self._take(ChangesFeed(offer, changes), shadow, figures)
        else:
            with self._feed(offer, share) as feed:
                self._take(feed, shadow, figures)
        values = figures.texts(offer.deadline_s, self._check_aborted)
        if isinstance(figures, _ShareFigures):
            return figures.by_class(values)
        if expected:
            _compare(expected, values, offer)
        else:  # already verified: the shadow gets its own header
            shadow.header = dataclasses.replace(offer.header, checksums=values)
        shadow.files = offer.manifest_digest if offer.transport == "file" else ""
        return {}

    def _take(self, feed: Feed, shadow: FlatSnapshot, figures: "_Figures") -> None:
        for number in range(len(shadow.buckets) + feed.ahead - 1):
            if number < len(shadow.buckets):
                feed.start(number, shadow.buckets[number])
            landed = number - feed.ahead + 1
            if landed >= 0:
                feed.land()
                shadow.mark(landed)
                figures.add(landed, shadow.buckets[landed])

    def _receive_each(self, offer: Offer, buffer: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        sizes = offer.layout.bucket_bytes
        expected = _expected(offer.header, len(sizes))
        figures = _Figures(len(sizes), self._device)
        with self._feed(offer) as feed:
            for number, size in enumerate(sizes):
                bucket = buffer[:size]
                feed.start(number, bucket)
                feed.land()
                figures.add(number, bucket)
                values = figures.texts(offer.deadline_s, self._check_aborted)[number : number + 1]
                if expected:
                    _compare(expected[number : number + 1], values, offer, number)
                yield number, bucket

    @contextlib.contextmanager
    def _feed(self, offer: Offer, share: Share | None = None) -> Iterator[Feed]:
        with contextlib.ExitStack() as until_received:
            self._most = max(self._most, _MAX_SOURCES + len(offer.parts))
            sources = offer.sources[self._rank - 1 : self._rank] if offer.shares else offer.sources
            if not sources:
                raise WeightsError(f"{offer.source} has no source of rank {self._rank - 1}")
            feeds = [until_received.enter_context(self._feed_of(source, share)) for source in sources]
            yield feeds[0] if len(feeds) == 1 else SharesFeed(feeds)

    @contextlib.contextmanager
    def _feed_of(self, offer: Offer, share: Share | None) -> Iterator[Feed]:
        if offer.transport == "file":
            yield FileFeed(offer, self._check_aborted, share)
            return
        session = self._session(offer)
        if offer.transport == "ipc":
            if offer.handles not in session.mapped:
                if len(session.mapped) >= _MAX_MAPPED:
                    session.mapped.clear()
                session.mapped[offer.handles] = ipc.map_buckets(offer.handles, self._device)
            yield MappedFeed(session.mapped[offer.handles])
            return
        if session.group is None:
            session.group = self._open(offer)
        with alarm.listening(session.group.store, offer.pull) as given_up:

            def interrupt() -> None:
                self._check_aborted()
                given_up()

            scattered = share is not None and not offer.shares
            word = encode(share.pieces) if share is not None and scattered else WHOLE
            session.group.meet(offer.pull, interrupt, word)
            yield GroupFeed(session.group, offer.deadline_s, interrupt, scattered=scattered)

    def _open(self, offer: Offer) -> TransferGroup:
        assert offer.transport in ("nccl", "gloo")
        rank, ranks = (1, 1) if offer.shares else (self._rank, self._ranks)
        return open_group(
            offer.transport,
            lambda: connect_store(offer.store, offer.session, offer.deadline_s),
            rank,
            1 + ranks,
            offer.deadline_s,
            self._device,
            own_address(*offer.store),
            self._check_aborted,
        )

    # ---------------------------------------------------------------- keeping

    def _prepare(self, offer: Offer) -> None:
        self._check_aborted()
        if not self._quiet:
            raise WeightsError("the GPU hangs in an earlier transfer: restart this replica")
        if offer.transport != "file" and not offer.header.checksums:
            raise WeightsError(f"version {offer.header.version} has no checksums")

    def _session(self, offer: Offer) -> _Session:
        known = self._sessions.get(offer.source)
        if known is None or known.name != offer.session:
            self._drop(offer.source)
            known = _Session(offer.session)
        self._sessions.pop(offer.source, None)
        self._sessions[offer.source] = known
        while len(self._sessions) > self._most:
            self._drop(next(iter(self._sessions)))
        return known

    def _leave(self, offer: Offer) -> None:
        for source in offer.sources:
            self._drop(source.source)

    def _drop(self, source: str) -> None:
        session = self._sessions.pop(source, None)
        if session is not None and session.group is not None and not session.group.abort():
            self._quiet = False

    def _check_aborted(self) -> None:
        if self._aborted.is_set():
            raise WeightsError("receiving the weights was aborted")


class _Figures:
    def __init__(self, count: int, device: torch.device) -> None:
        self._on_device = torch.zeros(count, 2, dtype=torch.int64, device=device)  # 16 bytes apart for kernels
        self._on_host = torch.zeros(count, 2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied = Point(device)

    def add(self, number: int, bucket: torch.Tensor) -> None:
        add_checksum(bucket, self._on_device[number, 0])

    def texts(self, deadline_s: float, interrupt: Callable[[], None]) -> tuple[str, ...]:
        """Return them as text; raises WeightsError after ``deadline_s``."""
        self._on_host.copy_(self._on_device, non_blocking=True)
        self._copied.set()
        poll(self._copied.reached, deadline_s, "the checksums of the device", interrupt)
        return tuple(text(value) for value in self._on_host[:, 0])


class _ShareFigures(_Figures):
    """Checksums of a share's classes, each spread over an empty bucket."""

    def __init__(self, offer: Offer, share: Share, shadow: FlatSnapshot) -> None:
        self._share, self._sizes = share, offer.layout.bucket_bytes
        super().__init__(len(self._sizes) * len(share.names), shadow.device)
        self._empty = torch.empty(max(self._sizes), dtype=torch.uint8, device=shadow.device)

    def add(self, number: int, bucket: torch.Tensor) -> None:
        empty = self._empty[: self._sizes[number]]
        for index, name in enumerate(self._share.names):
            if self._share.spread(number, name, bucket, empty):
                super().add(index * len(self._sizes) + number, empty)

    def by_class(self, values: tuple[str, ...]) -> Sums:
        each = len(self._sizes)
        return {name: values[index * each : (index + 1) * each] for index, name in enumerate(self._share.names)}


def _warm_up(device: torch.device) -> None:
    """Load all kernels: first launches wait for the device, where NCCL may await a peer."""
    figures = _Figures(2, device)
    for number in (0, 1):
        figures.add(number, torch.zeros(256, dtype=torch.uint8, device=device))
    figures.texts(_WARM_UP_S, lambda: None)


def _expected(header: Header, buckets: int) -> tuple[str, ...]:
    if header.checksums and len(header.checksums) != buckets:
        raise WeightsError(f"expected {buckets} checksums in the header, found {len(header.checksums)}")
    return header.checksums


def _compare(expected: tuple[str, ...], received: tuple[str, ...], offer: Offer, first: int = 0) -> None:
    wrong = [first + place for place, pair in enumerate(zip(expected, received, strict=True)) if pair[0] != pair[1]]
    if not wrong:
        return
    names = [entry.name for entry in offer.layout.tensors if entry.bucket == wrong[0]]
    raise WeightsError(
        f"expected the checksum of the source {offer.source} for bucket {wrong[0]} ({names[0]} … {names[-1]}) of version "
        f"{offer.header.version}, found another, as for {len(wrong)} of {len(offer.layout.bucket_bytes)} buckets: "
        "it was overwritten while it was sent, or damaged"
    )
