"""One request through vLLM: parameters, refusals and output.

Tokens come from vLLM, versions and logprobs from the workers' rows (``worker_channel``), matched by request name. With
``native``, logprobs come from vLLM too, at a large cost in throughput.
"""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.services.rollout.engines.engine import EngineDied, GeneratedSample, GenerationRequest, unstopped
from penstock.services.rollout.engines.stop_texts import StopTexts
from penstock.services.rollout.engines.vllm.worker_channel import Reports, TokenRow
from penstock.shared.bus.messages import FinishReason, Float32Array, Int32Array, PolicyVersion
from penstock.shared.errors import PermanentError
from penstock.shared.tasks import together

ROW_S = 60.0
"""Rows arrive within milliseconds; later, the worker is lost."""
_GREEDY = 1e-5
_SEARCHED = 8
"""New tokens in which a stop text is searched together: after it up to 7 more are generated."""
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
        if request.stop is None or request.sampling.samples == 1:
            return await self._samples(request, version)
        alone = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, samples=1))
        # vLLM takes back a whole request, not one of its samples
        parts = await together(self._samples(alone, version) for _ in range(request.sampling.samples))
        return tuple(sample for part in parts for sample in part)

    async def _samples(self, request: GenerationRequest, version: PolicyVersion) -> tuple[GeneratedSample, ...]:
        if self._native and request.sampling.top_k:
            raise PermanentError(
                "truncated sampling needs the logprobs that Penstock records in vLLM's workers, which are off here (see the "
                "replica's log): set sampling.top_p and top_k to 1 and 0, and min_p to 0"
            )
        greedy = request.sampling.temperature < _GREEDY  # vLLM draws one greedy sample; all are equal
        count = 1 if greedy else request.sampling.samples
        name = f"g{next(self._numbers)}"
        self._reports.expect(name)
        try:
            parameters, salt = self.parameters(request, count), f"v{version if request.salt is None else request.salt}"
            finished, end = await self._until(name, request.prompt_token_ids, salt, parameters, request.stop)
            rows = await self.rows(name, count)
        finally:
            self._reports.forget(name)
        outputs = sorted(finished.outputs, key=lambda output: int(output.index))
        drawn = tuple(
            dataclasses.replace(
                _sample(output, row, request, self._stop, end, self._native),
                cached_tokens=finished.num_cached_tokens or 0,
            )
            for output, row in zip(outputs, rows, strict=True)
        )
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
            top_k=request.sampling.top_k,
            top_p=request.sampling.top_p,
            min_p=request.sampling.min_p,
            max_tokens=request.sampling.max_new_tokens,
            min_tokens=min(request.sampling.min_new_tokens, request.sampling.max_new_tokens),
            stop_token_ids=list(self._stop),
            ignore_eos=True,  # the model's own are in ``stop``
            detokenize=False,
            logprobs=0 if self._native else None,
            flat_logprobs=self._native,
            output_kind=RequestOutputKind.FINAL_ONLY if request.stop is None else RequestOutputKind.CUMULATIVE,
        )

    async def run(self, name: str, token_ids: Int32Array, salt: str, parameters: Any) -> Any:
        """Return vLLM's output with all samples; raises PermanentError or EngineDied."""
        return (await self._until(name, token_ids, salt, parameters))[0]

    async def _until(
        self, name: str, token_ids: Int32Array, salt: str, parameters: Any, stop: StopTexts | None = None
    ) -> tuple[Any, int]:
        """Return vLLM's output, and the length at which ``stop`` ends its only sample, or 0."""
        from vllm import exceptions
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        refusals = (ValueError, getattr(exceptions, "VLLMClientError", ValueError))  # the latter since 0.3x
        prompt = {"prompt_token_ids": token_ids.tolist(), "cache_salt": salt}
        last: Any = None
        searched = ended = 0
        try:
            outputs = self._llm.generate(prompt, parameters, name, lora_request=self.adapter)
            async with contextlib.aclosing(outputs):  # which takes the request back
                async for last in outputs:
                    drawn = last.outputs[0].token_ids if stop is not None else ()
                    if stop is not None and (len(drawn) >= searched + _SEARCHED or last.finished):
                        ended, searched = stop.end(drawn, searched), len(drawn)
                    if ended:
                        break
        except refusals as error:
            raise PermanentError(f"vLLM refuses the prompt: {error}") from error
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineDied(f"vLLM failed: {error}") from error
        if last is None or not (last.finished or ended):
            raise EngineDied("vLLM ended a request that is not finished: a bug")
        return last, ended

    async def rows(self, name: str, count: int) -> list[TokenRow]:
        """Wait for a finished request's rows, which come with the next step."""
        while True:
            held = self._held()
            try:
                async with asyncio.timeout(ROW_S):
                    return await self._reports.rows(name, count)
            except TimeoutError as error:
                if not held and not self._held():
                    raise EngineDied(
                        f"the logprobs of a finished request did not arrive within {ROW_S:.0f} s"
                    ) from error


def _sample(
    output: Any, row: TokenRow, request: GenerationRequest, stop: tuple[int, ...], end: int, native: bool
) -> GeneratedSample:
    """``end``: the length at which a text stops it, or 0."""
    token_ids, sampling = np.array(output.token_ids, dtype=np.int32)[: end or None], request.sampling
    length, finish = len(token_ids), "stop" if end else output.finish_reason
    logprobs = np.array(output.logprobs.logprobs, dtype=np.float32) if native else row.logprobs
    spans = [span for span in row.versions if span[0] < length]
    if len(logprobs) < length or finish not in _FINISH or not spans or spans[0][0] != 0:
        raise EngineDied(
            f"expected {length} logprobs, versions from the first token on and an end by itself, found {len(logprobs)}, "
            f"{spans[:1]} and {finish!r}: a bug"
        )
    sizes, ids = row.support_sizes[:length], row.support_ids
    if not sampling.top_k:
        sizes, ids = unstopped(length, sampling, stop)
    elif sampling.is_restricted and len(sizes) < length:
        raise EngineDied(f"expected the possible tokens at {length} positions, found {len(sizes)}: a bug")
    return GeneratedSample(
        token_ids=token_ids,
        behavior_logprobs=logprobs[:length].copy(),
        version_spans=np.array(spans, dtype=np.int32),
        finish_reason=_FINISH[finish],
        support_sizes=sizes.copy(),
        support_ids=ids[: int(sizes.clip(min=0).sum())].copy() if sampling.top_k else ids,
        routes=None if row.routes is None or len(row.routes) < length else row.routes[:length],
    )
