"""Versions of weights for tests: in memory behind a real source, or in a file."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.services.rollout.engines.engine import Engine, SwapReport
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import plan_layout
from penstock.shared.weights.format.snapshot import write_snapshot
from penstock.shared.weights.receiver.puller import file_offer
from penstock.shared.weights.receiver.receiver import Receiver
from penstock.shared.weights.source.source import WeightSource
from penstock.shared.weights.transport.offer import Offer
from tests.conftest import PATIENCE_S

CPU = torch.device("cpu")
SECRET = b"the secret of a run"
Named = Iterable[tuple[str, torch.Tensor]]


def secret() -> bytes:
    return SECRET


def record(version: int, digest: str, location: str = "", source: str = "") -> PolicyRecord:
    return PolicyRecord(PolicyVersion(version), None, version, 0.0, digest, location, source=source)


def write(folder: Path, tensors: Named, version: int) -> PolicyRecord:
    written = write_snapshot(folder, PolicyVersion(version), version, tensors, torch.float32)
    return record(version, written.digest, str(written.location))


async def stage(engine: Engine, tensors: Named, version: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await engine.stage(file_offer(write(Path(folder), tensors, version), PATIENCE_S))


async def load(engine: Engine, tensors: Named, version: int) -> SwapReport:
    await stage(engine, tensors, version)
    return await engine.swap(PolicyVersion(version))


def fill(tensors: Mapping[str, torch.Tensor], version: int, bucket_bytes: int = 1 << 20) -> FlatSnapshot:
    shapes = ((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items())
    snapshot = FlatSnapshot(plan_layout(shapes, bucket_bytes), CPU)
    snapshot.fill(list(tensors.items()), PolicyVersion(version), version)
    return snapshot


@contextmanager
def serving(
    snapshot: FlatSnapshot | None = None, folder: Path | None = None, deadline_s: float = PATIENCE_S
) -> Iterator[WeightSource]:
    """A real local source. A puller that does not join its group leaves a thread, which ends after ``deadline_s``:
    20 s where a test has such pullers, as the tests' process waits for it (``tests/conftest.py``).
    """
    source = WeightSource("127.0.0.1", 0, secret, deadline_s=deadline_s, file_folder=folder)
    if snapshot is not None:
        source.offer(snapshot)
    try:
        yield source
    finally:
        source.close()


def offered(source: WeightSource, snapshot: FlatSnapshot) -> PolicyRecord:
    source.offer(snapshot)
    assert snapshot.header is not None
    return record(snapshot.header.version, snapshot.header.digest, source=source.address)


def receiving() -> Callable[[Offer], None]:
    """Return a real receiver of offers, for an engine without weights."""
    receiver = Receiver(1, 1, CPU)

    def receive(offer: Offer) -> None:
        receiver.receive(offer, FlatSnapshot(offer.layout, CPU))

    return receive
