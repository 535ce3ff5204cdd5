"""vLLM's schedulers with :class:`Holding`. Imports vLLM."""

import logging
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import RequestStatus

from penstock.services.rollout.engines.vllm.arguments import release
from penstock.services.rollout.engines.vllm.scheduling.guessing import GUESSING_UP_TO
from penstock.services.rollout.engines.vllm.scheduling.held_tokens import MOST, Holding
from penstock.services.rollout.engines.vllm.scheduling.plain_decoding import plain_decoding
from penstock.shared.errors import SettingsError

_WARNING = "Using custom scheduler class"
"""vLLM's, that its interface may change: the adapter supports named versions, and its tests run each."""


class HoldingScheduler(Holding, Scheduler):  # type: ignore[misc]
    """Of engines that schedule between steps."""

    output_class, waits_for = EngineCoreOutput, RequestOutputKind.FINAL_ONLY


class HoldingAsyncScheduler(Holding, AsyncScheduler):  # type: ignore[misc]
    """Of engines that schedule during steps."""

    output_class, waits_for = EngineCoreOutput, RequestOutputKind.FINAL_ONLY

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        guessing = self.vllm_config.additional_config.get(GUESSING_UP_TO, 0)
        self._plain = plain_decoding(self, RequestStatus.RUNNING, release(), MOST - 1, guessing)
        if guessing and self._plain is None:
            raise SettingsError(
                "expected a model with full attention alone, prefix caching and no connector to guess tokens, found another: set "
                "rollout.vllm.speculation = 0"
            )


def hold_tokens(config: Any) -> None:
    """Let the engine of ``config`` (vLLM's ``VllmConfig``) hold tokens, unless it has a scheduler of the user's."""
    scheduling = config.scheduler_config
    if scheduling.scheduler_cls is None:
        scheduling.scheduler_cls = HoldingAsyncScheduler if scheduling.async_scheduling else HoldingScheduler


logging.getLogger("vllm.config.scheduler").addFilter(lambda record: not str(record.msg).startswith(_WARNING))
