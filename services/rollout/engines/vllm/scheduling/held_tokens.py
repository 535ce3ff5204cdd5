"""Hand over a request's tokens together instead of one by one.

::

    engine's process   scheduler ─▶ a token of each running request ─▶ held ─▶ up to 32 at a time, or the request's end
                                                                                      │
    replica's process                                                 one for all engines of a GPU ◀┘

A replica needs whole completions, but vLLM's front end handles each token of each request in Python, and all
engines of a GPU share that process. Only tokens of requests that want their final output are held, and never
anything else that vLLM says about a request. Statistics of the scheduler, which are part of each step's message, are
sent every tenth of a second, and when nothing runs any more.
"""

import functools
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.services.rollout.engines.vllm.scheduling.plain_decoding import PlainDecoding

MOST = 32
"""Tokens; metrics of generated tokens advance by as many."""
_STATISTICS_S = 0.1


class HeldTokens:
    """Tokens of running requests that are not sent yet."""

    def __init__(self, output_class: Any) -> None:
        names = [name for name in output_class.__struct_fields__ if name not in ("request_id", "new_token_ids")]
        self._others = operator.attrgetter(*names)
        self._defaults = self._others(output_class(request_id="", new_token_ids=[]))
        self._held: dict[str, list[int]] = {}

    @property
    def by_request(self) -> Mapping[str, list[int]]:
        """Tokens that are not sent yet; more may be appended."""
        return self._held

    def sent(self, outputs: Sequence[Any], requests: Mapping[str, Any], waits_for: Any) -> list[Any]:
        """Return the outputs that are sent now.

        Args:
            outputs: vLLM's ``EngineCoreOutput`` of a step.
            requests: the scheduler's, by id, without those that ended.
            waits_for: the ``output_kind`` of requests whose tokens may be held.
        """
        sent = list(self._sent(outputs, requests, waits_for))
        if len(self._held) > len(requests):  # some were taken back
            self._held = {name: held for name, held in self._held.items() if name in requests}
        return sent

    def _sent(self, outputs: Sequence[Any], requests: Mapping[str, Any], waits_for: Any) -> Iterator[Any]:
        for output in outputs:
            name, held = output.request_id, self._held.get(output.request_id)
            if self._may_wait(output, requests.get(name), waits_for):
                if held is None:
                    self._held[name] = list(output.new_token_ids)
                    continue
                if len(held) + len(output.new_token_ids) < MOST:
                    held.extend(output.new_token_ids)
                    continue
            if held is not None:
                del self._held[name]
                output.new_token_ids = [*held, *output.new_token_ids]
            yield output

    def _may_wait(self, output: Any, request: Any, waits_for: Any) -> bool:
        """Whether tokens are all that it says, and the request continues."""
        parameters = getattr(request, "sampling_params", None)
        if parameters is None or parameters.output_kind != waits_for:
            return False
        return all(other is default for other, default in zip(self._others(output), self._defaults, strict=True))


class Holding:
    """Mixed into one of vLLM's schedulers."""

    output_class: Any
    """``EngineCoreOutput``."""
    waits_for: Any
    """``RequestOutputKind.FINAL_ONLY``."""
    requests: dict[str, Any]
    running: list[Any]
    _plain: PlainDecoding | None = None

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._held_tokens = HeldTokens(self.output_class)
        self._told_s = -_STATISTICS_S

    def schedule(self, *given: Any, **named: Any) -> Any:
        schedule = functools.partial(super().schedule, *given, **named)  # type: ignore[misc]
        if self._plain is None or any(given) or any(named.values()):
            return schedule()
        return self._plain.schedule(self, schedule)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self._plain is not None:
            scheduler_output = self._plain.others(
                scheduler_output, model_runner_output, self._held_tokens.by_request, self.requests
            )
        made = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for client in made.values():
            client.outputs = self._held_tokens.sent(client.outputs, self.requests, self.waits_for)
        return made

    def make_stats(self, *of_this_step: Any, **named: Any) -> Any:
        """Return statistics since the last ones, or None if they are not due and nothing is of this step alone."""
        now_s = time.monotonic()
        alone = any(part is not None for part in (*of_this_step, *named.values()))
        if self.running and not alone and now_s - self._told_s < _STATISTICS_S:
            return None
        self._told_s = now_s
        return super().make_stats(*of_this_step, **named)  # type: ignore[misc]
