"""What rank 0 tells every rank to do next, so that all of them run the same loop.

Rank 0 alone talks to the bus. Before each turn it broadcasts one order as bytes: MessagePack, no pickle. An order with
nothing to do comes every few seconds while rank 0 waits, so that no rank's collective times out during a long pause.
"""

import dataclasses
from collections.abc import Sequence
from enum import IntEnum

import msgpack
import torch
import torch.distributed as dist

from shared.bus import wire
from shared.bus.messages import Experience, StepPlan

TURN_S = 2.0
"""Rank 0 waits no longer for what it waits for (a batch, a checkpoint that is fetched) before it gives an order: IDLE, or WAIT."""


class CommandKind(IntEnum):
    """What to do."""

    IDLE = 0
    LOAD = 1
    REPLAY = 2
    TRAIN = 3
    STOP = 4
    CHECKPOINT = 5
    WAIT = 6
    """Nothing yet: rank 0 finds out from where to go on."""
    TRY = 7
    """Run one group that may have ended the trainer, and train nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """One turn. ``payloads`` are encoded experience, in the order of the batch."""

    kind: CommandKind
    folder: str = ""
    """The checkpoint to load."""
    payloads: tuple[bytes, ...] = ()
    groups: tuple[Experience, ...] = ()
    """The decoded payloads; other ranks decode for themselves."""
    lags: tuple[int, ...] = ()
    """The lag of each group, in steps."""
    learning_rate: float = 0.0
    """The peak learning rate under which this step is made: settings may change while the run goes on."""
    plan: StepPlan | None = None
    """Of a REPLAY: how the step was laid out when it was committed; None: not known."""


def share(order: Command | None, device: torch.device) -> Command:
    """Give rank 0's order to every rank; the others pass None."""
    if dist.get_world_size() == 1:
        assert order is not None
        return order
    data = b"" if order is None else _write(order)
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    if order is not None:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, src=0)
    return order if order is not None else _read(buffer.cpu().numpy().tobytes())


def agree(decision: bool | None, device: torch.device) -> bool:
    """Give rank 0's decision to every rank; the others pass None."""
    if dist.get_world_size() == 1:
        assert decision is not None
        return decision
    told = torch.tensor([int(bool(decision))], dtype=torch.int64, device=device)
    dist.broadcast(told, src=0)
    return bool(int(told))


def _write(order: Command) -> bytes:
    plan = None if order.plan is None else wire.encode(order.plan)
    fields = (int(order.kind), order.folder, list(order.payloads), list(order.lags), order.learning_rate, plan)
    data: bytes = msgpack.packb(fields)
    return data


def _read(data: bytes) -> Command:
    kind, folder, payloads, lags, learning_rate, raw = msgpack.unpackb(data)
    plan = None if raw is None else wire.decode(raw, StepPlan)
    return Command(CommandKind(kind), folder, tuple(payloads), decode_all(payloads), tuple(lags), learning_rate, plan)


def decode_all(payloads: Sequence[bytes]) -> tuple[Experience, ...]:
    """Return the experience in ``payloads``."""
    return tuple(wire.decode(payload, Experience) for payload in payloads)
