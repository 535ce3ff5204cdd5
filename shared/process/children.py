"""Ends child processes and closes their pipes."""

import asyncio
import contextlib
import os
import signal


def kill_group(pid: int) -> None:
    """SIGKILL the process group of ``pid``, if it exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def reap(process: asyncio.subprocess.Process) -> None:
    """Close the pipes of a killed process and wait for it, even when cancelled.

    ``Process.wait`` alone waits until a descendant that was not killed lets go of the pipes, or leaves them open.
    """
    transport: asyncio.SubprocessTransport = process._transport  # type: ignore[attr-defined]
    for descriptor in range(3):
        pipe = transport.get_pipe_transport(descriptor)
        if pipe is not None:
            pipe.close()
    cancelled: asyncio.CancelledError | None = None
    while process.returncode is None:
        try:
            await process.wait()
        except asyncio.CancelledError as error:
            cancelled = error
    transport.close()
    await asyncio.sleep(0)  # the pipes' descriptors are closed by callbacks
    if cancelled is not None:
        raise cancelled
