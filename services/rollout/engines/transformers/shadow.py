"""A second copy of the weights, in which versions are received and from which peers are served.

Each version overwrites the last; slow peers then fail on checksums. Versions received by file are not served.
"""

import threading
from collections.abc import Mapping

import torch

from penstock.services.rollout.engines.transformers.loading import OpenedModel
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.peers.handshake import Secret
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import Layout
from penstock.shared.weights.receiver.receiver import Receiver
from penstock.shared.weights.source.source import WeightSource
from penstock.shared.weights.transport.offer import Offer

_LEAVE_S = 2.0
"""Time for peers to finish before their version is overwritten."""

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""(parameter, new value)."""


class Shadow:
    """Receives one model's weights; serves peers on ``host``, unless empty."""

    def __init__(self, opened: OpenedModel, host: str, deadline_s: float, secret: Secret) -> None:
        self._opened = opened
        self._receiver = Receiver(1, 1, opened.device)
        self._source = WeightSource(host, 0, secret, deadline_s=deadline_s) if host else None
        self._snapshot: FlatSnapshot | None = None
        self._pairs: Pairs = []
        self._closed = threading.Event()

    @property
    def address(self) -> str:
        """``host:port`` for peers, or empty."""
        return "" if self._source is None else self._source.address

    def receive(self, offer: Offer) -> None:
        """Receive and serve a version, from one thread; raises WeightsError."""
        if self._closed.is_set():
            raise WeightsError("the replica is stopping")
        if self._source is not None:
            self._source.withdraw(_LEAVE_S)
        snapshot = self._snapshot_for(offer.layout)
        if self._source is not None and offer.transport != "file":
            snapshot.begin(offer.header)
            self._source.offer(snapshot)
        self._receiver.receive(offer, snapshot)

    def _snapshot_for(self, layout: Layout) -> FlatSnapshot:
        if self._snapshot is None or self._snapshot.layout != layout:
            check(self._opened, {entry.name: entry.shape for entry in layout.tensors})
            self._snapshot = None  # release its memory first
            self._snapshot = FlatSnapshot(layout, self._opened.device)
            self._pairs = [(self._opened.parameters[name], value) for name, value in self._snapshot.tensors().items()]
        return self._snapshot

    def pairs(self, version: PolicyVersion) -> Pairs:
        """Return each parameter with its value in ``version``, the last received; else raises WeightsError."""
        received = None if self._snapshot is None or self._snapshot.header is None else self._snapshot.header.version
        if received != version:
            raise WeightsError(f"expected version {version} to be received before it is swapped to, found {received}")
        return self._pairs

    @property
    def nbytes(self) -> int:
        return 0 if self._snapshot is None else sum(bucket.nbytes for bucket in self._snapshot.buckets)

    def drop(self) -> None:
        if self._source is not None:
            self._source.withdraw(_LEAVE_S)
        self._receiver.unmap()
        self._snapshot, self._pairs = None, []

    def begin(self) -> None:
        """Before :meth:`receive` is given to its thread."""
        self._receiver.begin()

    def abort(self) -> None:
        self._receiver.abort()

    def close(self) -> None:
        self._closed.set()
        self._receiver.close()
        if self._source is not None:
            self._source.close()


def check(opened: OpenedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise WeightsError unless these names and shapes are what ``opened`` needs."""
    missing, unknown = opened.required - shapes.keys(), shapes.keys() - opened.parameters.keys()
    if missing or unknown:
        name = min(missing or unknown)
        raise WeightsError(
            f"expected the tensors of policy.model, found {len(missing)} missing and {len(unknown)} unknown, "
            f"{name!r} for one: trainer and rollout must be configured with the same policy.model"
        )
    for name, shape in shapes.items():
        if tuple(opened.parameters[name].shape) != tuple(shape):
            raise WeightsError(
                f"expected {name!r} of shape {tuple(opened.parameters[name].shape)}, found {tuple(shape)}: "
                "trainer and rollout must be configured with the same policy.model"
            )
