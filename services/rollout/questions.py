"""Answer questions to the live policy (``POST /v1/run/generate``) in the room that training leaves."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Prompt, Purpose, RolloutGroup
from penstock.shared.bus.stores.replicas.questions import WITHIN_S, Questions
from penstock.shared.bus.worker import ENDS_PROCESS
from penstock.shared.errors import PermanentError

log = logging.getLogger(__name__)

_MOST = 8
"""Questions answered at a time."""

Handler = Callable[[Prompt, Purpose], Awaitable[RolloutGroup]]


class Answering:
    """Answers of one replica.

    Args:
        taking: set while the replica takes work.
    """

    def __init__(self, bus: Bus, replica: str, handler: Handler, taking: asyncio.Event | None) -> None:
        self._questions = Questions(bus, replica)
        self._handler = handler
        self._taking = taking
        self._room = asyncio.Semaphore(_MOST)

    async def run(self) -> None:
        """Answer until cancelled. Raises what ends the process, such as a dead engine."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                if self._taking is not None:
                    await self._taking.wait()
                async with self._room:
                    prompts = await self._questions.read()
                for prompt in prompts:
                    tasks.create_task(self._answer(prompt))

    async def _answer(self, prompt: Prompt) -> None:
        """Answer, or refuse: also when the longest wait for an answer is over."""
        try:
            async with asyncio.timeout(WITHIN_S), self._room:
                await self._questions.answer(prompt, await self._handler(prompt, Purpose.ASK))
        except TimeoutError:
            await self._questions.refuse(prompt, f"it was not answered within {WITHIN_S:g} s: ask again")
        except PermanentError as error:
            await self._questions.refuse(prompt, str(error))
        except ENDS_PROCESS:
            raise
        except Exception as error:
            log.warning("question not answered", exc_info=error)
            await self._questions.refuse(prompt, f"{type(error).__name__}: {error}")
