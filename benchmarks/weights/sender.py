"""The sending side of ``benchmarks.weights.update``."""

import itertools
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.weights.players import SECRET, Answers, Options, layout_of, serve

RAW_ROUNDS = 3


async def trainer(connection: Connection, options: Options) -> None:
    """Publish versions until the pipe closes."""
    import torch

    from penstock.shared.bus.messages import PolicyVersion
    from penstock.shared.weights.format.flat import FlatSnapshot
    from penstock.shared.weights.source.source import WeightSource

    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    layout = layout_of(options)
    policy = {
        entry.name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=device)
        for entry in layout.tensors
    }
    snapshots = itertools.cycle([FlatSnapshot(layout, device), FlatSnapshot(layout, device)])
    source = WeightSource("127.0.0.1", 0, lambda: SECRET, deadline_s=options.deadline_s)

    def learn(version: int) -> None:
        generator = torch.Generator(device).manual_seed(version)
        for tensor in policy.values():
            tensor.normal_(0.0, 0.02, generator=generator)
        if device.type == "cuda":
            torch.cuda.synchronize()

    def publish(version: int, changed: bool = True) -> dict[str, Any]:
        """Write weights to the free snapshot, and serve it."""
        if changed:
            learn(version)
        snapshot, began_s = next(snapshots), time.monotonic()
        header = snapshot.fill(list(policy.items()), PolicyVersion(version), version)
        source.offer(snapshot)
        return {
            "version": version,
            "digest": header.digest,
            "address": source.address,
            "began_s": began_s,
            "offered_s": time.monotonic(),
            "bytes": layout.nbytes,
        }

    native, training = _NativeTrainer(policy), _Training(device)
    answers: Answers = {"publish": publish, "steps": training.count, "join": native.join, "send": native.send}
    try:
        await serve(connection, answers)
    finally:
        source.close()


class _Training:
    """A thread that computes on its own stream."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._steps = 0
        self._thread: threading.Thread | None = None

    def count(self) -> dict[str, float]:
        """Return the steps so far, and the time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return {"steps": self._steps, "at_s": time.monotonic()}

    def _run(self) -> None:
        import torch

        on_gpu = self._device.type == "cuda"
        size = 8192 if on_gpu else 512
        left, right = (torch.randn(size, size, device=self._device).bfloat16() for _ in range(2))
        stream: Any = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            while True:
                for _ in range(10):
                    left @ right
                if on_gpu:
                    torch.cuda.current_stream().synchronize()
                self._steps += 1


class _NativeTrainer:
    def __init__(self, policy: dict[str, Any]) -> None:
        self._policy = policy
        self._group: Any = None

    def join(self, port: int, world: int) -> None:
        """Join the replica's workers."""
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        group = StatelessProcessGroup.create(host="127.0.0.1", port=port, rank=0, world_size=world)
        self._group = PyNcclCommunicator(group, device=torch.device("cuda:0"))

    def send(self) -> dict[str, Any]:
        """Send all weights; blocks until sent."""
        import torch
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        began_s = time.monotonic()
        packed_nccl_broadcast_producer(
            iterator=iter(self._policy.items()), group=self._group, src=0, post_iter_func=lambda pair: pair[1]
        )
        torch.cuda.synchronize()
        return {"seconds": time.monotonic() - began_s}


def raw_end(
    connection: Connection, surroundings: dict[str, str], rank: int, device: str, nbytes: int, port: int
) -> None:
    """Broadcast ``nbytes`` in pieces of 256 MiB; answer the best seconds."""
    os.environ |= surroundings
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    on_gpu = device == "cuda"
    place = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        device_id=place if on_gpu else None,
    )
    pieces = [torch.zeros(size, dtype=torch.uint8, device=place) for size in _pieces(min(nbytes, 1 << 30))]
    rounds = -(-nbytes // sum(len(piece) for piece in pieces))
    seconds = []
    for _ in range(1 + RAW_ROUNDS):
        dist.barrier()
        began_s = time.monotonic()
        for _ in range(rounds):
            for piece in pieces:
                dist.broadcast(piece, src=0)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began_s)
    connection.send((True, {"seconds": min(seconds[1:]), "bytes": rounds * sum(len(piece) for piece in pieces)}))
    dist.destroy_process_group()


def _pieces(nbytes: int) -> Iterator[int]:
    while nbytes > 0:
        yield min(nbytes, 256 << 20)
        nbytes -= 256 << 20
