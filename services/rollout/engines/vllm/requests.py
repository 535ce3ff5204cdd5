"""One request through vLLM: parameters, refusals and output.

Tokens come from vLLM, versions and logprobs from the workers' rows (``worker_channel``), matched by request name. With
``native``, logprobs come from vLLM too, at a large cost in throughput.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from services.rollout.engines.engine import EngineDied, GeneratedSample, GenerationRequest
from services.rollout.engines.vllm.worker_channel import Reports, TokenRow
from shared.bus.messages import FinishReason, Float32Array, Int32Array, PolicyVersion
from shared.errors import PermanentError

_ROW_S = 60.0
"""Rows arrive within milliseconds; later, the worker is lost."""
_GREEDY = 1e-5
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Requests:
    """Sends requests to ``llm``; ``native`` logprobs are vLLM's own, ``held`` returns whether the model is paused."""

    def __init__(
        self, llm: Any, reports: Reports, *, stop: tuple[int, ...], native: bool, held: Callable[[], bool]
    ) -> None:
        self._llm = llm
        self._reports = reports
        self._stop = stop
        self._native = native
        self._held = held
        self._numbers = itertools.count()
        self.adapter: Any = None

    async def samples(self, request: GenerationRequest, version: PolicyVersion) -> tuple[GeneratedSample, ...]:
        """Return samples; the prefix cache is per ``version``. Raises PermanentError or EngineDied."""
        greedy = request.sampling.temperature < _GREEDY  # vLLM draws one greedy sample; all are equal
        count = 1 if greedy else request.sampling.samples
        name = f"g{next(self._numbers)}"
        self._reports.expect(name)
        try:
            finished = await self.run(name, request.prompt_token_ids, f"v{version}", self.parameters(request, count))
            rows = await self.rows(name, count)
        finally:
            self._reports.forget(name)
        outputs = sorted(finished.outputs, key=lambda output: int(output.index))
        drawn = tuple(_sample(output, row, self._native) for output, row in zip(outputs, rows, strict=True))
        return drawn * (request.sampling.samples // count)

    async def logprobs(self, token_ids: Int32Array) -> Float32Array:
        """Return teacher-forced logprobs of ``token_ids[1:]`` at temperature 1."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        final = RequestOutputKind.FINAL_ONLY
        parameters = SamplingParams(
            max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False, output_kind=final
        )
        # As a salt, it bypasses the prefix cache, which has no logprobs.
        name = f"probe{next(self._numbers)}"
        finished = await self.run(name, token_ids, name, parameters)
        ids = token_ids.tolist()
        logprobs = [finished.prompt_logprobs[place][ids[place]].logprob for place in range(1, len(ids))]
        return np.array(logprobs, dtype=np.float32)

    async def rehearse(self, request: GenerationRequest) -> None:
        """Generate and drop samples, without logprobs."""
        parameters = self.parameters(request, request.sampling.samples)
        name = f"rehearsal{next(self._numbers)}"
        await self.run(name, request.prompt_token_ids, name, parameters)

    def parameters(self, request: GenerationRequest, count: int) -> Any:
        """Return vLLM's parameters for ``count`` samples."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            n=count,
            temperature=request.sampling.temperature,
            max_tokens=request.sampling.max_new_tokens,
            stop_token_ids=list(self._stop),
            ignore_eos=True,  # the model's own are in ``stop``
            detokenize=False,
            logprobs=0 if self._native else None,
            flat_logprobs=self._native,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def run(self, name: str, token_ids: Int32Array, salt: str, parameters: Any) -> Any:
        """Return vLLM's output with all samples; raises PermanentError or EngineDied."""
        from vllm import exceptions
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        refusals = (ValueError, getattr(exceptions, "VLLMClientError", ValueError))  # the latter since 0.3x
        prompt = {"prompt_token_ids": token_ids.tolist(), "cache_salt": salt}
        last: Any = None
        try:
            async for output in self._llm.generate(prompt, parameters, name, lora_request=self.adapter):
                last = output
        except refusals as error:
            raise PermanentError(f"vLLM refuses the prompt: {error}") from error
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineDied(f"vLLM failed: {error}") from error
        if last is None or not last.finished:
            raise EngineDied("vLLM ended a request that is not finished: a bug")
        return last

    async def rows(self, name: str, count: int) -> list[TokenRow]:
        """Wait for a finished request's rows, which come with the next step."""
        while True:
            held = self._held()
            try:
                async with asyncio.timeout(_ROW_S):
                    return await self._reports.rows(name, count)
            except TimeoutError as error:
                if not held and not self._held():
                    raise EngineDied(
                        f"the logprobs of a finished request did not arrive within {_ROW_S:.0f} s"
                    ) from error


def _sample(output: Any, row: TokenRow, native: bool) -> GeneratedSample:
    token_ids = np.array(output.token_ids, dtype=np.int32)
    length = len(token_ids)
    logprobs = np.array(output.logprobs.logprobs, dtype=np.float32) if native else row.logprobs
    spans = [span for span in row.versions if span[0] < length]
    if len(logprobs) < length or output.finish_reason not in _FINISH or not spans or spans[0][0] != 0:
        raise EngineDied(
            f"expected {length} logprobs, versions from the first token on and an end by itself, found {len(logprobs)}, "
            f"{spans[:1]} and {output.finish_reason!r}: a bug"
        )
    return GeneratedSample(
        token_ids=token_ids,
        behavior_logprobs=logprobs[:length].copy(),
        version_spans=np.array(spans, dtype=np.int32),
        finish_reason=_FINISH[output.finish_reason],
    )
