"""The process group of a source (rank 0) and one replica's ranks (1…TP).

A group serves a session's pulls until a failure, after which neither NCCL nor gloo can be trusted. torch's default
group is not used. Both ends of a pull::

    meet(pull)       through the store: bytes move only when every rank is there, so that no GPU spins
    broadcast(b) …   enqueued, at most ``window`` of them ahead of the oldest
    transfer.land()  by polling, with a deadline: then the bytes are there in the order of the current stream

torch 2.11 to 2.13: queries to a stopped process may block forever, so ``bounded`` runs them.
``ProcessGroupGloo.abort`` leaves receives pending, so gloo receives into the group's own memory. ``ProcessGroupNCCL``
operations wait for the caller's stream, and its watchdog ends the process on errors by default.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from penstock.shared.errors import WeightsError
from penstock.shared.weights.stream_order import Lane, Point
from penstock.shared.weights.waits import Interrupt, bounded, first_line, poll, uninterrupted

WHOLE = b"whole"
"""A rank's word at a meeting: it receives whole buckets."""
_EVERY_RANK = "every rank of the replica and its source"
_ANNOUNCED_S = 10.0
"""In which processes announce that they open a group; those of earlier versions do not."""
_NCCL_WINDOW = 64
"""Broadcasts in flight: 256 MiB over NVLink take 45 ms, more than a thread may wait for the GIL."""
_GLOO_WINDOW = 2
_MAX_CTAS = 32
"""Multiprocessors (of 132 on an H200) per broadcast."""
_WARM_UP_BYTES = 1 << 20
_ERROR_GRACE_S = 0.25
_QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # its monitor would query a store that may be stopped
    "TORCH_NCCL_BLOCKING_WAIT": None,
    "NCCL_ASYNC_ERROR_HANDLING": None,
    "NCCL_BLOCKING_WAIT": None,
}
_environment = threading.Lock()


class Transfer:
    def land(self, deadline_s: float, interrupt: Interrupt = uninterrupted) -> None:
        """Return when its bytes are there in stream order; raises WeightsError."""
        raise NotImplementedError


class TransferGroup:
    """A session's process group. Used by one thread at a time; any may abort it."""

    window: int

    def __init__(self, store: Store, rank: int, ranks: int, deadline_s: float) -> None:
        self.rank = rank
        self.store = store
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._backend: Any = None

    def meet(self, pull: int, interrupt: Interrupt = uninterrupted, word: bytes = WHOLE) -> list[bytes]:
        """Wait for every rank to reach this pull with its ``word``; return the words at rank 0. Raises WeightsError."""
        return bounded(lambda left: self._meet(pull, left, word), self._deadline_s, "the peers of a pull", interrupt)

    def _meet(self, pull: int, interrupt: Interrupt, word: bytes) -> list[bytes]:
        here = [f"pull/{pull}/{rank}" for rank in range(self._ranks)]
        awaited = here[1:] if self.rank == 0 else here[:1]
        if self.rank:
            self.store.set(here[self.rank], word.decode())
        poll(lambda: self.store.check(awaited), self._deadline_s, _EVERY_RANK, interrupt)
        if self.rank:
            return []
        words = [self.store.get(key) for key in awaited]
        self.store.set(here[0], "go")
        for rank in range(self._ranks):
            self.store.delete_key(f"pull/{pull - 1}/{rank}")
        return words

    def broadcast(self, bucket: torch.Tensor) -> Transfer:
        """Enqueue ``bucket`` (uint8) from rank 0 to all; raises WeightsError if broken."""
        raise NotImplementedError

    def scatter(self, slots: Sequence[torch.Tensor]) -> Transfer:
        """Enqueue one of the ``slots`` (uint8, of one size) from rank 0, in order, to every other rank, which gives its own
        alone; keeps them until the transfer is dropped. Raises WeightsError if broken."""
        raise NotImplementedError

    def _enqueue(self, tensor: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return self._begun(lambda: self._backend.broadcast([tensor], options))

    def _enqueue_each(self, slots: Sequence[torch.Tensor]) -> Any:
        """Rank 0 takes part in a scatter: it sends itself a copy of the first slot."""
        options = dist.ScatterOptions()
        options.rootRank = 0
        if self.rank:
            return self._begun(lambda: self._backend.scatter([slots[0]], [], options))
        own = torch.empty_like(slots[0])
        return self._begun(lambda: self._backend.scatter([own], [[slots[0], *slots]], options))

    def _begun(self, enqueue: Callable[[], Any]) -> Any:
        try:
            return enqueue()
        except RuntimeError as error:
            raise WeightsError(f"could not transfer a bucket: {first_line(error)}") from error

    def abort(self) -> bool:
        """Free the group within twice the deadline; never raises.

        Return whether nothing can still write into a bucket.
        """
        raise NotImplementedError


def open_group(
    transport: Literal["nccl", "gloo"],
    store: Callable[[], Store],
    rank: int,
    ranks: int,
    deadline_s: float,
    device: torch.device,
    host: str,
    interrupt: Interrupt = uninterrupted,
) -> TransferGroup:
    """Return the group of ``ranks`` processes, if all open it within ``deadline_s``; else raises WeightsError.

    ``store`` connects to the rendezvous (may block); ``host`` is this process's address, for gloo.
    """

    def opened(left: Interrupt) -> TransferGroup:
        shared = store()
        shared.set(f"open/{rank}", "")
        here = [f"open/{each}" for each in range(ranks)]
        with contextlib.suppress(WeightsError):  # opening one waits where nothing interrupts it
            poll(lambda: shared.check(here), min(deadline_s, _ANNOUNCED_S), _EVERY_RANK, left)
        left()
        if transport == "nccl":
            return _NcclGroup(shared, rank, ranks, deadline_s, device)
        return _GlooGroup(shared, rank, ranks, deadline_s, host)

    purpose = f"a {transport} group of {ranks} ranks"
    return bounded(opened, deadline_s, purpose, interrupt, discard=_discard)


def _discard(late: TransferGroup) -> None:
    late.abort()


# ----------------------------------------------------------------------- gloo


class _GlooGroup(TransferGroup):
    window = _GLOO_WINDOW

    def __init__(self, store: Store, rank: int, ranks: int, deadline_s: float, host: str) -> None:
        super().__init__(store, rank, ranks, deadline_s)
        backend: Any = dist.ProcessGroupGloo
        options = backend._Options()
        options._timeout = timedelta(seconds=deadline_s)
        options._devices = [backend.create_device(hostname=host)]
        options._threads = _GLOO_WINDOW
        self._backend = backend(store, rank, ranks, options)

    def broadcast(self, bucket: torch.Tensor) -> Transfer:
        if self.rank == 0:
            return _GlooTransfer(self._enqueue(bucket.cpu()), None, None)
        arriving = torch.empty(bucket.shape, dtype=torch.uint8)
        return _GlooTransfer(self._enqueue(arriving), arriving, bucket)

    def scatter(self, slots: Sequence[torch.Tensor]) -> Transfer:
        if self.rank == 0:
            return _GlooTransfer(self._enqueue_each([slot.cpu() for slot in slots]), None, None)
        arriving = torch.empty(slots[0].shape, dtype=torch.uint8)
        return _GlooTransfer(self._enqueue_each([arriving]), arriving, slots[0])

    def abort(self) -> bool:
        last = [self._backend]  # dropping it waits for pending work: use a thread
        self._backend = None
        threading.Thread(target=lambda: _end(last.pop(), threading.Event()), name="end gloo", daemon=True).start()
        return True


class _GlooTransfer(Transfer):
    def __init__(self, work: Any, arriving: torch.Tensor | None, bucket: torch.Tensor | None) -> None:
        self._work = work
        self._arriving = arriving
        self._bucket = bucket

    def land(self, deadline_s: float, interrupt: Interrupt = uninterrupted) -> None:
        poll(self._work.is_completed, deadline_s, "a bucket", interrupt)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise WeightsError(f"could not receive a bucket: {first_line(error)}") from error
        if self._bucket is not None and self._arriving is not None:
            self._bucket.copy_(self._arriving)


# ----------------------------------------------------------------------- nccl


class _NcclGroup(TransferGroup):
    window = _NCCL_WINDOW

    def __init__(self, store: Store, rank: int, ranks: int, deadline_s: float, device: torch.device) -> None:
        super().__init__(store, rank, ranks, deadline_s)
        self._device = device
        with torch.cuda.device(device):
            self._fence = Lane(device)
            self._newest = Point(device)
            self._backend = _make_nccl(store, rank, ranks, deadline_s)
            try:
                self._warm_up(deadline_s)
            except WeightsError:
                self.abort()
                raise

    def _warm_up(self, deadline_s: float) -> None:
        """Create connections by a first broadcast, and with several receivers a scatter, which may block."""
        with Lane(self._device).entered():
            slot = torch.zeros(_WARM_UP_BYTES, dtype=torch.uint8, device=self._device)
            self.broadcast(slot).land(deadline_s)
            if self._ranks > 2:
                self.scatter([slot] * (self._ranks - 1 if self.rank == 0 else 1)).land(deadline_s)

    def broadcast(self, bucket: torch.Tensor) -> Transfer:
        return self._fenced(self._enqueue(bucket))

    def scatter(self, slots: Sequence[torch.Tensor]) -> Transfer:
        return self._fenced(self._enqueue_each(slots), slots)

    def _fenced(self, work: Any, kept: object = None) -> Transfer:
        with self._fence.entered():
            work.wait()  # makes the fence wait, not this thread
            arrived = Point(self._device)
            arrived.set()
        self._newest = arrived
        return _NcclTransfer(work, arrived, kept)

    def abort(self) -> bool:
        aborted = threading.Event()
        last = [self._backend]  # dropping it may wait for the store: use a thread
        self._backend = None
        threading.Thread(target=lambda: _end(last.pop(), aborted), name="end an NCCL group", daemon=True).start()
        try:
            poll(aborted.is_set, self._deadline_s, "the end of an NCCL group")
            poll(self._newest.reached, self._deadline_s, "the end of NCCL's kernels")
        except WeightsError:  # a thread that hangs in NCCL is abandoned
            return False
        return True


class _NcclTransfer(Transfer):
    def __init__(self, work: Any, arrived: Point, kept: object) -> None:
        self._work = work
        self._kept = kept
        self._arrived = arrived
        self._completed_at_s = 0.0

    def land(self, deadline_s: float, interrupt: Interrupt = uninterrupted) -> None:
        poll(self._landed, deadline_s, "a bucket", interrupt)
        self._arrived.follow()

    def _landed(self) -> bool:
        if self._arrived.reached():
            return True
        if self._work.is_completed():  # NCCL error: the event will not come, unless both came just now
            self._completed_at_s = self._completed_at_s or time.monotonic()
            if time.monotonic() - self._completed_at_s > _ERROR_GRACE_S:
                raise WeightsError("NCCL lost the peer")
        return False


def _make_nccl(store: Store, rank: int, ranks: int, deadline_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * deadline_s)  # ours expires first
    options.config.max_ctas = _MAX_CTAS
    with _quiet_watchdog():
        return dist.ProcessGroupNCCL(store, rank, ranks, options)


@contextlib.contextmanager
def _quiet_watchdog() -> Iterator[None]:
    """Let groups made in the block fail without ending the process."""
    with _environment:
        before = {name: os.environ.get(name) for name in _QUIET}
        _set_environment(_QUIET)
        try:
            yield
        finally:
            _set_environment(before)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _end(backend: Any, aborted: threading.Event) -> None:
    if backend is not None:
        with contextlib.suppress(RuntimeError):
            backend.abort()
    aborted.set()
