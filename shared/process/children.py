"""Ends child processes and closes their pipes."""

import asyncio
import contextlib
import os
import signal

import psutil

_REAP_S = 1.0


def kill_group(pid: int) -> None:
    """SIGKILL the process group of ``pid``, if it exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_marked(variable: str, value: str) -> None:
    """SIGKILL every process that was given ``variable`` in its environment, wherever it has moved, until all have ended."""
    while marked := [process for process in psutil.process_iter() if _environment(process).get(variable) == value]:
        for process in marked:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(marked, _REAP_S)


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except psutil.Error:  # it ended, is a zombie, or another user's
        return {}


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
