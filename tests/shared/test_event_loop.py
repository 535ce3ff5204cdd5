"""Laws of event loop stalls."""

import asyncio
import time

from prometheus_client import REGISTRY

from penstock.services.reward.scorers.turns import Turns
from penstock.shared.process import event_loop
from tests.conftest import until


def longest_s(clock: str) -> float:
    return REGISTRY.get_sample_value("penstock_event_loop_longest_stall_seconds", {"clock": clock}) or 0.0


async def test_a_callback_that_holds_the_loop_is_measured_on_the_clock_and_one_that_computes_as_processor_time() -> (
    None
):
    async with event_loop.watched():
        await until(lambda: longest_s("elapsed") >= 0)
        await asyncio.sleep(0.05)
        time.sleep(0.5)
        await until(lambda: longest_s("elapsed") >= 0.4)
        await until(lambda: longest_s("process") >= 0.4)
        until_s = time.thread_time() + 0.4
        while time.thread_time() < until_s:
            pass
        await until(lambda: longest_s("cpu") >= 0.25)


async def test_of_many_that_compute_at_once_one_computes_in_each_pass_of_the_loop() -> None:
    turns, passes, made = Turns(), 0, []

    async def count() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await asyncio.gather(*(turns.take(lambda: made.append(passes)) for _ in range(20)))
    counting.cancel()
    assert len(set(made)) == 20, "each in a pass of its own"
