"""Commands to all ranks, which run the same loop.

Rank 0 alone uses the bus. Each command is broadcast as bytes: MessagePack, no pickle. A command with nothing to do is sent every
few seconds while rank 0 waits, so that no rank's collective times out during a long pause.
"""

import dataclasses
from collections.abc import Sequence
from enum import IntEnum

import msgpack
import torch
import torch.distributed as dist

from services.trainer.checkpoint.manifests import CheckpointState
from shared.bus import wire
from shared.bus.messages import Experience, PolicyVersion, StepPlan

TURN_S = 2.0
"""Rank 0 waits no longer for anything (a batch, a checkpoint that is fetched) before it sends a command: IDLE, or WAIT."""


class CommandKind(IntEnum):
    """What to do."""

    IDLE = 0
    LOAD = 1
    REPLAY = 2
    TRAIN = 3
    """Make a step and publish its weights, as a version that is committed afterwards."""
    STOP = 4
    CHECKPOINT = 5
    WAIT = 6
    """Nothing yet: rank 0 looks for the checkpoint to continue from."""
    TRY = 7
    """Run one group that may have ended the trainer, and train nothing."""
    PUBLISH = 8
    """Publish the weights as a version."""
    EXPORT = 9
    """Write the final policy."""


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """One turn. ``payloads`` are encoded experience, in the order of the batch. Rank 0 alone has ``version`` and ``state``."""

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
    version: PolicyVersion | None = None
    """The number under which weights are published."""
    state: CheckpointState | None = None
    """What a checkpoint knows beside weights and optimizer."""


def share(command: Command | None, device: torch.device) -> Command:
    """Return rank 0's command on every rank; the others pass None."""
    if dist.get_world_size() == 1:
        assert command is not None
        return command
    data = b"" if command is None else _write(command)
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    if command is not None:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, src=0)
    return command if command is not None else _read(buffer.cpu().numpy().tobytes())


def _write(command: Command) -> bytes:
    plan = None if command.plan is None else wire.encode(command.plan)
    payloads, lags = list(command.payloads), list(command.lags)
    fields = (int(command.kind), command.folder, payloads, lags, command.learning_rate, plan)
    data: bytes = msgpack.packb(fields)
    return data


def _read(data: bytes) -> Command:
    kind, folder, payloads, lags, learning_rate, raw = msgpack.unpackb(data)
    plan = None if raw is None else wire.decode(raw, StepPlan)
    return Command(CommandKind(kind), folder, tuple(payloads), decode_all(payloads), tuple(lags), learning_rate, plan)


def decode_all(payloads: Sequence[bytes]) -> tuple[Experience, ...]:
    """Return the experience in ``payloads``."""
    return tuple(wire.decode(payload, Experience) for payload in payloads)
