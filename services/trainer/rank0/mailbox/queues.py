"""The two queues between rank 0's event loop (``driver``) and its training thread (``penstock.services.trainer.loop``): a
command in, one result for each but STOP out, with notices beside them. What became of a checkpoint has a queue of its
own, as it is written beside training.

A side's error is raised by the other: in the loop at once, in training at its next command.
"""

import asyncio
import queue

from penstock.services.trainer.rank0.mailbox.commands import Command
from penstock.services.trainer.rank0.mailbox.results import Notice, Result, Saved


class Mailbox:
    """The only object that these threads use; made on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command | Exception] = queue.SimpleQueue()
        self._results: asyncio.Queue[Result | Notice | BaseException] = asyncio.Queue()
        self._saved: asyncio.Queue[Saved] = asyncio.Queue()

    def receive(self) -> Command | None:
        command = self._commands.get()
        if isinstance(command, Exception):
            raise command
        return command

    def send(self, result: Result | Notice | BaseException) -> None:
        """Send a result, or the error that ended training."""
        self._loop.call_soon_threadsafe(self._results.put_nowait, result)

    def send_saved(self, saved: Saved) -> None:
        """Send what became of a checkpoint, from the thread that wrote it."""
        self._loop.call_soon_threadsafe(self._saved.put_nowait, saved)

    async def saved(self) -> Saved:
        """Return what became of the checkpoint that was commanded last."""
        return await self._saved.get()

    def command(self, command: Command) -> None:
        self._commands.put(command)

    async def result(self) -> Result | Notice:
        result = await self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self, error: BaseException) -> None:
        self._commands.put(error if isinstance(error, Exception) else RuntimeError("rank 0's driver was cancelled"))


class NoMailbox:
    """Mailbox of ranks other than 0, which receive commands by broadcast."""

    def receive(self) -> None:
        """Return at once: rank 0 has the command."""

    def send(self, result: Result | Notice | BaseException) -> None:
        """Drop the result: rank 0 sends its own."""

    def send_saved(self, saved: Saved) -> None:
        """Drop it, too."""
