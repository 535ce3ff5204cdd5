"""The two queues between rank 0's event loop and its training thread, and what goes through them.

::

    event loop (``driver``)  ──  Command  ──▶  training thread (``services.trainer.loop``)
                             ◀──  Result  ──   one for each command but STOP; notices beside them

A side that fails puts its error into its queue, and the other side raises it: a driver that failed ends the training at the next
command, and training that failed ends the driver at once.
"""

import asyncio
import dataclasses
import queue
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from services.trainer.checkpoint.local_store import Checkpoint
from services.trainer.rank0.commands import Command
from services.trainer.rank0.publication import Whereabouts
from shared.bus.messages import Probe, StepPlan

R = TypeVar("R", bound="Result")


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The end of a command: it is done, and there is nothing more to say."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLoaded(Result):
    """Training can begin; it takes token ids below ``vocabulary``, and sequences within ``context_tokens`` (0: of any length)."""

    vocabulary: int
    context_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed(Result):
    """A step of the journal was repeated; ``difference`` says why its weights differ from what was published, if they do."""

    difference: str


@dataclasses.dataclass(frozen=True, slots=True)
class Published(Result):
    """Replicas can get the weights."""

    weights: Whereabouts | None
    """None on ranks other than 0."""
    probe: Probe | None


@dataclasses.dataclass(frozen=True, slots=True)
class StepMade(Result):
    """A step was made and its weights published; it is not committed yet."""

    published: Published
    measured: Mapping[str, float]
    plan: StepPlan
    seconds: Mapping[str, float]
    """By phase, since the step before."""
    memory: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class StepSkipped(Result):
    """A batch gave a loss or gradient that is not finite. ``touched``: some weights were updated before it showed."""

    reason: str
    touched: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Saved(Result):
    """A checkpoint is complete, or storage refused it."""

    checkpoint: Checkpoint | None
    refusal: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyWritten(Result):
    """The final policy is in ``folders``."""

    folders: tuple[Path, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SelfTested:
    """Notice: how the self-test of a part of the model went."""

    part: str
    outcome: str
    figures: Mapping[str, float]
    reason: str
    """Why sequences are not packed; "" if they are."""


@dataclasses.dataclass(frozen=True, slots=True)
class StopRequested:
    """Notice: another host of this trainer was told to stop."""


Notice = SelfTested | StopRequested


class Mailbox:
    """The only object that both threads use. It is made on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command | Exception] = queue.SimpleQueue()
        self._results: asyncio.Queue[Result | Notice | BaseException] = asyncio.Queue()

    # ---------------------------------------------------------------- training thread

    def receive(self) -> Command | None:
        """Wait for the next command; raise what ended the driver."""
        command = self._commands.get()
        if isinstance(command, Exception):
            raise command
        return command

    def send(self, result: Result | Notice | BaseException) -> None:
        """Hand over a result, or what ended the training."""
        self._loop.call_soon_threadsafe(self._results.put_nowait, result)

    # ---------------------------------------------------------------- event loop

    def command(self, command: Command) -> None:
        """Have every rank execute ``command``."""
        self._commands.put(command)

    async def result(self) -> Result | Notice:
        """Wait for the next result or notice; raise what ended the training."""
        result = await self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self, error: BaseException) -> None:
        """Have the training thread raise what ended the driver."""
        self._commands.put(error if isinstance(error, Exception) else RuntimeError("rank 0's driver was cancelled"))


class NoMailbox:
    """The mailbox of a rank other than 0, which receives commands by broadcast."""

    def receive(self) -> None:
        """Return at once: rank 0 has the command."""

    def send(self, result: Result | Notice | BaseException) -> None:
        """Drop the result: rank 0 sends its own."""
