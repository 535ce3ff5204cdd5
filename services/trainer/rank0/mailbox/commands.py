"""Commands to all ranks, which run the same loop.

Rank 0 broadcasts them as MessagePack, and idle ones while it waits, so that collectives do not time out.
"""

import dataclasses
import itertools
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum

import msgpack
import numpy as np

from penstock.services.trainer.checkpoint.manifests import CheckpointState
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, Int32Array, PolicyVersion, StepPlan

_LENGTH = struct.Struct("<Q")
TURN_S = 2.0
"""Rank 0's maximum wait before it sends IDLE or WAIT."""


class CommandKind(IntEnum):
    IDLE = 0
    LOAD = 1
    REPLAY = 2
    TRAIN = 3
    STOP = 4
    CHECKPOINT = 5
    WAIT = 6
    TRY = 7
    PUBLISH = 8
    EXPORT = 9
    FREE = 10
    FINISH = 11
    """Like STOP, and the run is over."""


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """One turn; ``payloads``, the encoded ``groups``, and ``state`` are set on rank 0 only."""

    kind: CommandKind
    folder: str = ""
    payloads: tuple[bytes, ...] = ()
    groups: tuple[Experience, ...] = ()
    lags: Mapping[PolicyVersion, int] = dataclasses.field(default_factory=dict)
    """Of the groups' versions, in steps."""
    learning_rate: float = 0.0
    """Peak of this step."""
    plan: StepPlan | None = None
    version: PolicyVersion | None = None
    state: CheckpointState | None = None
    contexts: tuple[int, ...] = ()
    """How many first tokens of each sample are not trained; empty: none."""
    rung: int = 0
    """Of the ladder: for FREE, and of the turn for TRAIN and TRY."""
    offload_bytes: float | None = None
    """Of optimizer states at rung 3, for FREE; None: all of them."""
    held_out: tuple[bytes, ...] = ()
    """Encoded demonstrations whose loss is reported with the step."""
    texts: tuple[Int32Array, ...] = ()
    """Token ids for the probe of a version that no step made."""
    routes: Mapping[bytes, bytes] = dataclasses.field(default_factory=dict)
    """By claim; on rank 0 only, which gives each rank what it packs."""


def share(command: Command | None) -> Command:
    """Return rank 0's command on every rank; the others pass None, and wait without using their GPU."""
    import torch
    import torch.distributed as dist

    from penstock.services.trainer.rank_group import host_group

    if dist.get_world_size() == 1:
        assert command is not None
        return command
    data = bytearray() if command is None else _write(command)
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, src=0, group=host_group())
    empty = torch.empty(0 if data else int(size), dtype=torch.uint8)
    buffer = torch.frombuffer(data, dtype=torch.uint8) if data else empty
    dist.broadcast(buffer, src=0, group=host_group())
    return command if command is not None else _read(buffer.numpy().data)


def _write(command: Command) -> bytearray:
    """Return the length of the fields, the fields, and the payloads, which are copied once."""
    plan = None if command.plan is None else wire.encode(command.plan)
    sizes = list(map(len, command.payloads))
    where, batch = (int(command.kind), command.folder), (sizes, list(command.lags.items()), command.contexts)
    fields = (
        *where,
        *batch,
        command.learning_rate,
        plan,
        command.rung,
        command.offload_bytes,
        command.version,
        command.held_out,
        [text.tolist() for text in command.texts],
    )
    packed: bytes = msgpack.packb(fields)
    return bytearray().join((_LENGTH.pack(len(packed)), packed, *command.payloads))


def _read(data: memoryview) -> Command:
    ends = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    kind, folder, sizes, lags, contexts, rate, raw, rung, offload_bytes, version, held_out, texts = msgpack.unpackb(
        data[_LENGTH.size : ends]
    )
    plan = None if raw is None else wire.decode(raw, StepPlan)
    starts = itertools.accumulate(sizes, initial=ends)
    groups = decode_all([data[start : start + size] for start, size in zip(starts, sizes, strict=False)])
    return Command(
        CommandKind(kind),
        folder,
        (),
        groups,
        dict(lags),
        rate,
        plan,
        version,
        contexts=tuple(contexts),
        rung=int(rung),
        offload_bytes=offload_bytes,
        held_out=tuple(held_out),
        texts=tuple(np.array(text, dtype=np.int32) for text in texts),
    )


def decode_all(payloads: Sequence[bytes | memoryview]) -> tuple[Experience, ...]:
    return tuple(wire.decode(payload, Experience) for payload in payloads)
