"""Children that are ended, with their pipes."""

import asyncio
import os
import signal
import sys

import pytest

from penstock.shared.process.children import kill_group, reap
from tests.conftest import PATIENCE_S, until

_PARENT = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.asyncio
@pytest.mark.parametrize("ended_before", [False, True])
async def test_the_pipes_of_a_killed_process_are_closed_though_a_descendant_holds_them(
    ended_before: bool,
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PARENT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    survivor = int(await process.stdout.readline())
    kill_group(process.pid)
    try:
        if ended_before:
            await until(lambda: process.returncode is not None)
        async with asyncio.timeout(PATIENCE_S):
            await reap(process)
        assert process.returncode == -signal.SIGKILL
        assert process.stdin is not None
        assert process.stdin.is_closing()
        assert await process.stdout.read() == b""  # at its end, without waiting for the survivor
    finally:
        os.kill(survivor, signal.SIGKILL)
