"""Observe vLLM's model runner: its requests, logits and drawn tokens. Shorten its start.

::

    execute_model(scheduler output)   new, resumed and finished requests ─▶ record
    sample / sampler                  the batch's order and counts, logits and tokens ─▶ record

Runner "V2" (``vllm.v1.worker.gpu.model_runner``) returns processed logits; "V1" (``vllm.v1.worker.gpu_model_runner``,
also on CPUs) applies temperature in place. Both sample outside CUDA graphs. For other runners, only tokens are counted.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.services.rollout.engines.vllm.token_record import Finished, TokenRecord

_ROUTER_SHAPES = "_LL_BF16_WARMUP_MODEL_SHAPES"
"""(hidden size, experts) of models that vLLM compiles router kernels for."""


def draw_alike(runner: Any) -> None:
    """Let each tensor parallel rank draw the tokens of rank 0, where FlashInfer's sampler would return logits before
    top-k and top-p.
    """
    if hasattr(runner, "req_states"):
        runner.sampler.use_flashinfer = False


class RunnerTap:
    """Feed ``record`` from ``runner``; hand finished requests to ``deliver``. Without ``logits``, only count tokens.

    ``quick`` draws for the sampler of "V2": see :func:`decoding.one_pass_sampler.one_pass`.
    """

    def __init__(
        self,
        runner: Any,
        record: TokenRecord,
        deliver: Callable[[Finished], None],
        logits: bool,
        quick: Callable[..., Any] | None = None,
    ) -> None:
        self._runner = runner
        self._record = record
        self._deliver = deliver
        self._logits = logits
        self._quick = quick
        self._scheduled: dict[str, int] = {}
        self.listening = True
        """If False, later requests are not recorded; for measurements."""
        runner.execute_model = self._around_execution(runner.execute_model)
        if not logits:
            return
        if hasattr(runner, "req_states"):
            runner.sample = self._around_batch(runner.sample)
            runner.sampler.sample = self._around_new_sampler(runner.sampler.sample)
        else:
            runner.sampler.sample = self._around_old_sampler(runner.sampler.sample)

    def _around_execution(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: Any, *others: Any, **named: Any) -> Any:
            if not named.get("dummy_run"):
                self._follow(scheduler_output)
            return execute(scheduler_output, *others, **named)

        return execute_model

    def _follow(self, scheduler_output: Any) -> None:
        finished = self._record.release(scheduler_output.finished_req_ids)
        if finished is not None:
            self._deliver(finished)
        self._scheduled = scheduler_output.num_scheduled_tokens
        if self.listening:
            for new in scheduler_output.scheduled_new_reqs:
                known = new.prompt_token_ids if new.prefill_token_ids is None else new.prefill_token_ids
                self._record.admit(
                    new.req_id,
                    len(new.prompt_token_ids),
                    len(known),
                    new.sampling_params.max_tokens,
                    is_truncated(new.sampling_params),
                )
        cached = scheduler_output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for request, completion_tokens in zip(cached.req_ids, cached.num_output_tokens, strict=True):
                if request in cached.resumed_req_ids:
                    self._record.resume(request, completion_tokens)
        if not self._logits:
            self._count(scheduler_output)

    def _count(self, scheduler_output: Any) -> None:
        new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        requests = [*(new_request.req_id for new_request in new), *cached.req_ids]
        computed = [*(new_request.num_computed_tokens for new_request in new), *cached.num_computed_tokens]
        scheduled = [self._scheduled[request] for request in requests]
        self._record.step(requests, np.array(computed, dtype=np.int64), np.array(scheduled, dtype=np.int64))

    def _around_batch(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        def sample_batch(hidden_states: Any, input_batch: Any, *others: Any, **named: Any) -> Any:
            if self.listening:
                batch, place_m = input_batch, None
                if batch.num_draft_tokens or self._record.is_ahead:
                    place_m = batch.positions[batch.logits_indices]
                self._record.step(batch.req_ids, batch.num_computed_tokens_np, batch.num_scheduled_tokens, place_m)
            return sample(hidden_states, input_batch, *others, **named)

        return sample_batch

    def _around_new_sampler(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        def sample_tokens(*arguments: Any, **named: Any) -> Any:
            drawn = None if self._quick is None else self._quick(*arguments, **named)
            if drawn is not None:
                tokens, logits, logprobs = drawn
                self._record.store_logprobs(logprobs)
                return tokens, logits
            tokens, logits = sample(*arguments, **named)
            self._record.store(logits, tokens)
            return tokens, logits

        return sample_tokens

    def _around_old_sampler(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        def sample_tokens(logits: Any, *others: Any, **named: Any) -> Any:
            batch = self._runner.input_batch
            if self.listening and batch.req_ids:
                requests = batch.req_ids
                scheduled = np.fromiter(map(self._scheduled.__getitem__, requests), dtype=np.int64, count=len(requests))
                self._record.step(requests, batch.num_computed_tokens_cpu[: len(requests)], scheduled)
            tokens, processed = answer = sample(logits, *others, **named)
            self._record.store(logits if processed is None else processed, tokens)
            return answer

        return sample_tokens


def is_truncated(parameters: Any) -> bool:
    """Whether a request keeps only the most probable tokens (vLLM's top_k without a limit is 0 or −1)."""
    return bool(parameters.top_k > 0 and parameters.temperature > 0)


def can_listen(runner: Any) -> str:
    """Return why ``runner`` cannot be observed, or ""."""
    sampler = getattr(runner, "sampler", None)
    if getattr(runner, "speculative_config", None) is not None:
        return "speculative decoding accepts several tokens a step"
    if not callable(getattr(sampler, "sample", None)) or not callable(getattr(runner, "execute_model", None)):
        return f"{type(runner).__name__} has no sampler of a known kind"
    if hasattr(runner, "req_states"):
        return "" if callable(getattr(runner, "sample", None)) else "the runner does not sample itself"
    return "" if hasattr(runner, "input_batch") else "the runner has no batch"


def warm_up_own_routers(worker: Any) -> None:
    """Make ``worker`` compile router kernels for its own model's routers alone.

    On every Hopper GPU vLLM 0.26 compiles those of four other models, for half a minute; newer releases do not.
    """
    warm_up = getattr(worker, "compile_or_warm_up_model", None)
    if warm_up is None:
        return

    def warm_up_own() -> Any:
        from vllm.model_executor.warmup import kernel_warmup

        shapes = getattr(kernel_warmup, _ROUTER_SHAPES, ())
        if shapes:
            own = {tuple(reversed(parameter.shape)) for parameter in worker.get_model().parameters()}
            setattr(kernel_warmup, _ROUTER_SHAPES, tuple(shape for shape in shapes if shape in own))
        return warm_up()

    worker.compile_or_warm_up_model = warm_up_own
