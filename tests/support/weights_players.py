"""A trainer and a replica for tests of weight pulls, in processes that a test may stop or kill.

Tests call methods of :class:`Trainer` and :class:`Replica` through :class:`Player`.
"""

import asyncio
import contextlib
import hashlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import Header, Layout, plan_layout
from penstock.shared.weights.receiver import puller as pullers
from penstock.shared.weights.receiver.puller import Puller
from penstock.shared.weights.receiver.receiver import Receiver
from penstock.shared.weights.source import session
from penstock.shared.weights.source.source import WeightSource
from penstock.shared.weights.transport.offer import Offer
from penstock.shared.weights.transport.place import DeviceLocation, boot_id, plain_uuid
from tests.conftest import PATIENCE_S
from tests.support import weights

CPU = torch.device("cpu")
CALL_S = PATIENCE_S
Tensors = list[tuple[str, torch.Tensor]]


def policy(seed: int, scale: int = 1) -> Tensors:
    """Return tensors of several types and shapes, the first larger than a bucket of ``layout``."""
    random = torch.Generator().manual_seed(seed)
    return [
        ("embed", torch.randn(251 * scale, 67, generator=random, dtype=torch.bfloat16)),
        ("norm", torch.randn(67, generator=random, dtype=torch.float32)),
        ("layers.0.w", torch.randn(33, 67, generator=random, dtype=torch.bfloat16)),
        ("layers.0.scalar", torch.randn((), generator=random, dtype=torch.float16)),
        ("layers.0.none", torch.empty(0, 5, dtype=torch.float32)),
        ("layers.1.w", torch.randn(67, 33, generator=random, dtype=torch.bfloat16)),
        ("positions", torch.randint(0, 1 << 60, (13,), generator=random)),
        ("mask", torch.randint(0, 2, (7, 3), generator=random).bool()),
        ("bytes", torch.randint(0, 256, (1001,), generator=random).to(torch.uint8)),
    ]


def layout_of(tensors: Tensors, bucket_bytes: int = 2048) -> Layout:
    return plan_layout(((n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors), bucket_bytes)


def record_of(header: Header) -> PolicyRecord:
    return PolicyRecord(
        version=header.version,
        parent=None,
        step=header.step,
        created_at_s=0.0,
        manifest_digest=header.digest,
        location="",
    )


def fingerprint(tensors: Any) -> str:
    actual = hashlib.sha256()
    for name, tensor in tensors:
        actual.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        actual.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return actual.hexdigest()


def place(device: torch.device) -> DeviceLocation:
    if device.type != "cuda":
        return DeviceLocation()
    return DeviceLocation("cuda", (plain_uuid(torch.cuda.get_device_properties(device).uuid),), boot_id())


def counts() -> tuple[int, int]:
    return int(session.PULLS_SERVED._value.get()), int(session.PULL_FAILURES._value.get())


class Trainer:
    def __init__(
        self, deadline_s: float, folder: str | None = None, device: str = "cpu", share: tuple[int, int] = (0, 1)
    ) -> None:
        self.device = torch.device(device)
        self._share = share
        self._others: list[str] = []
        self.source = WeightSource(
            "127.0.0.1", 0, weights.secret, deadline_s=deadline_s, file_folder=Path(folder) if folder else None
        )
        self.snapshot: FlatSnapshot | None = None
        self._record: PolicyRecord | None = None

    def address(self) -> str:
        return self.source.address

    def publish(self, version: int, seed: int, scale: int = 1) -> PolicyRecord:
        tensors = policy(seed, scale)
        layout = layout_of(tensors)
        if self.snapshot is None or self.snapshot.layout != layout:
            self.snapshot = FlatSnapshot(layout, self.device, self._share)
        checksums = FlatSnapshot(layout, CPU).fill(tensors, PolicyVersion(version), version).checksums
        header = self.snapshot.fill(tensors, PolicyVersion(version), version, lambda _: checksums)
        self.source.offer(self.snapshot, self._others)
        self._record = record_of(header)
        return self._record

    def name_others(self, addresses: list[str]) -> None:
        """Name the sources of the other shares to pullers."""
        self._others = addresses

    def arrive(self, version: int, seed: int, buckets: int) -> PolicyRecord:
        """Serve a version of which only the first ``buckets`` have arrived."""
        record = self.publish(version, seed)
        assert self.snapshot is not None
        assert self.snapshot.header is not None
        self.snapshot.begin(self.snapshot.header)
        self.mark(0, buckets)
        return record

    def mark(self, first: int, end: int | None = None) -> None:
        assert self.snapshot is not None
        for bucket in range(first, len(self.snapshot.buckets) if end is None else end):
            self.snapshot.mark(bucket)

    def record(self) -> PolicyRecord:
        assert self._record is not None
        return self._record

    def corrupt(self, bucket: int) -> None:
        assert self.snapshot is not None
        self.snapshot.buckets[bucket][5] ^= 1

    def void(self) -> None:
        assert self.snapshot is not None
        self.snapshot.void("the test says so")

    def withdraw(self, wait_s: float) -> float:
        """Return the seconds that it took."""
        before_s = time.monotonic()
        self.source.withdraw(wait_s)
        return time.monotonic() - before_s

    def buckets(self) -> int:
        assert self.snapshot is not None
        return len(self.snapshot.buckets)

    def counts(self) -> tuple[int, int]:
        return counts()

    def open_own_group(self) -> None:
        """Open the process group of a trainer's ranks."""
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    def sum_in_own_group(self, value: float) -> float:
        tensor = torch.tensor(value)
        dist.all_reduce(tensor)
        return float(tensor)

    def close(self) -> None:
        self.source.close()


class Reasons(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(vars(record)["reason"])


class Replica:
    """A puller, a receiver, a shadow and a source that serves it on."""

    def __init__(self, deadline_s: float, rank: int = 1, ranks: int = 1, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.puller = Puller(place(self.device), ranks, deadline_s, weights.secret)
        self.receiver = Receiver(rank, ranks, self.device)
        self.source = WeightSource("127.0.0.1", 0, weights.secret, deadline_s=deadline_s)
        self.shadow: FlatSnapshot | None = None
        self._begun = 0
        self._loop = asyncio.new_event_loop()
        self._reasons = Reasons()
        logging.getLogger("penstock.shared.weights.receiver.puller").addHandler(self._reasons)

    def address(self) -> str:
        return self.source.address

    def pull(self, source: str, record: PolicyRecord) -> str:
        return self._loop.run_until_complete(self._pull(source, record))

    async def _pull(self, source: str, record: PolicyRecord) -> str:
        offer = await self.puller.ask(source, record)
        self._begun += 1
        error: str | None = "the receive did not end"
        try:
            await asyncio.to_thread(self._stage, offer)
            error = None
        except WeightsError as failure:
            error = str(failure)
            raise
        finally:
            await self.puller.finish(offer, error)
        assert self.shadow is not None
        return fingerprint(self.shadow.tensors().items())

    def receive(self, offer: dict[str, Any]) -> str:
        self._stage(Offer.unpack(offer))
        assert self.shadow is not None
        return fingerprint(self.shadow.tensors().items())

    def _stage(self, offer: Offer) -> None:
        if self.shadow is None or self.shadow.layout != offer.layout:
            self.shadow = FlatSnapshot(offer.layout, self.device)
        self.source.offer(self.shadow)
        self.receiver.receive(offer, self.shadow)

    def begun(self) -> int:
        """Return the number of pulls that a source began."""
        return self._begun

    def wait_for_answers(self, deadline_s: float) -> None:
        self.puller._deadline_s = deadline_s

    def reasons(self) -> list[str]:
        return self._reasons.texts

    def arrived(self) -> int:
        return 0 if self.shadow is None else sum(self.shadow._marked)

    def has_default_group(self) -> bool:
        """Whether torch's global process group is open in this process."""
        return dist.is_initialized()

    def fingerprint(self) -> str:
        assert self.shadow is not None
        return fingerprint(self.shadow.tensors().items())

    def holds(self) -> int | None:
        return None if self.shadow is None or self.shadow.header is None else self.shadow.header.version

    def counts(self) -> tuple[int, int]:
        return counts()

    def sessions(self) -> list[str]:
        return [known.name for known in self.receiver._sessions.values()]

    def abort(self) -> None:
        self.receiver.abort()

    def close(self) -> None:
        self.source.close()
        self.receiver.close()
        if not self._loop.is_running():  # a pull aborted by a test
            self._loop.run_until_complete(self._leave())
            self._loop.close()

    async def _leave(self) -> None:
        await self.puller.close()
        await asyncio.sleep(0)  # a transport closes in the loop's next round


# ------------------------------------------------------------------ processes


def _serve(connection: Connection, kind: type, arguments: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    pullers._REASON_S = PATIENCE_S  # a busy source says its reason late
    actor = kind(**arguments)
    lock = threading.Lock()

    def call(number: int, method: str, given: tuple[Any, ...]) -> None:
        answer: tuple[int, Any, str | None]
        try:
            answer = (number, getattr(actor, method)(*given), None)
        except WeightsError as error:
            answer = (number, None, str(error))
        with lock:
            connection.send(answer)

    with contextlib.suppress(EOFError, OSError):
        while True:
            threading.Thread(target=call, args=connection.recv(), daemon=True).start()
    os._exit(0)


class Player:
    """A :class:`Trainer` or :class:`Replica` in another process."""

    def __init__(self, kind: type, **arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.weights_players"])
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, kind, arguments), daemon=True)
        self.process.start()
        theirs.close()
        self._number = 0
        self._answers: dict[int, tuple[Any, str | None]] = {}

    def call(self, method: str, *given: Any) -> Any:
        return self.result(self.later(method, *given))

    def later(self, method: str, *given: Any) -> int:
        self._number += 1
        self._connection.send((self._number, method, given))
        return self._number

    def answered(self, number: int) -> bool:
        """Whether the answer had come when another was read."""
        return number in self._answers

    def result(self, number: int, timeout_s: float = CALL_S) -> Any:
        ends_at_s = time.monotonic() + timeout_s
        while number not in self._answers:
            assert self._connection.poll(max(0.0, ends_at_s - time.monotonic())), "no answer"
            actual, value, error = self._connection.recv()
            self._answers[actual] = (value, error)
        value, error = self._answers.pop(number)
        if error is not None:
            raise WeightsError(error)
        return value

    def until(self, method: str, condition: Callable[[Any], bool], timeout_s: float = CALL_S) -> None:
        ends_at_s = time.monotonic() + timeout_s
        while not condition(self.call(method)):
            assert time.monotonic() < ends_at_s, f"{method} never answered as expected"
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.join(PATIENCE_S)
        self._connection.close()


Start = Callable[..., Player]


def players(usual_deadline_s: float) -> Iterator[Start]:
    """Yield a function that starts players; all end with the generator."""
    started: list[Player] = []

    def start(kind: type, deadline_s: float = usual_deadline_s, **arguments: Any) -> Player:
        started.append(Player(kind, deadline_s=deadline_s, **arguments))
        return started[-1]

    yield start
    for player in started:
        player.close()
