"""A worker that dies of one group by SIGKILL: ``python -m tests.support.poisoned_worker URL RUN NAME GROUP``."""

import asyncio
import os
import signal
import sys

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Prompt, RolloutGroup
from penstock.shared.bus.streams import PROMPTS, ROLLOUTS
from penstock.shared.bus.worker import Patience, Worker
from tests.support import builders


async def work(url: str, run_id: str, name: str, poison: int) -> None:
    async def handle(prompt: Prompt) -> RolloutGroup:
        if prompt.group_id == poison:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(0.02)
        return builders.group(prompt.group_id)

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    bus = await Bus.connect(url, run_id)
    patience = Patience(claim_after_s=180.0, max_attempts=2, retry_s=0.01, drain_s=60.0)
    await Worker(bus, name, PROMPTS, Prompt, ROLLOUTS, handle, 16, patience).run(stop)
    await bus.close()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
