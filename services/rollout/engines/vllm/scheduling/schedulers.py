"""vLLM's schedulers with :class:`HeldTokens`. Imports vLLM."""

import logging
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput

from services.rollout.engines.vllm.scheduling.held_tokens import HeldTokens

_WARNING = "Using custom scheduler class"
"""vLLM's, that its interface may change: the adapter supports named versions, and its tests run each."""


class _Holding:
    requests: dict[str, Any]

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._held_tokens = HeldTokens(EngineCoreOutput)

    def update_from_output(self, *given: Any, **named: Any) -> Any:
        made = super().update_from_output(*given, **named)  # type: ignore[misc]
        for client in made.values():
            client.outputs = self._held_tokens.sent(client.outputs, self.requests, RequestOutputKind.FINAL_ONLY)
        return made


class HoldingScheduler(_Holding, Scheduler):  # type: ignore[misc]
    """Of engines that schedule between steps."""


class HoldingAsyncScheduler(_Holding, AsyncScheduler):  # type: ignore[misc]
    """Of engines that schedule during steps."""


def hold_tokens(config: Any) -> None:
    """Let the engine of ``config`` (vLLM's ``VllmConfig``) hold tokens, unless it has a scheduler of the user's."""
    scheduling = config.scheduler_config
    if scheduling.scheduler_cls is None:
        scheduling.scheduler_cls = HoldingAsyncScheduler if scheduling.async_scheduling else HoldingScheduler


logging.getLogger("vllm.config.scheduler").addFilter(lambda record: not str(record.msg).startswith(_WARNING))
