"""Let vLLM's model runner take several steps together, without its scheduler between them.

::

    scheduler   a step of k tokens of each request, with the blocks for them
    runner      k steps of one token, launched one after another     (positions, tokens and draws stay on the device)
    scheduler   k tokens of each request

With guesses (``siblings.py``), steps have several tokens of each request, of which those that are right count.
Steps after the first replay its CUDA graph of the whole model, with the work of vLLM's own steps except what cannot have
changed; without such a graph they are vLLM's own. Also tells the scheduler whether an output was ready before Python
asked for it. For vLLM 0.26 and its newer runner ("V2"), alone on one GPU; elsewhere steps have one token.
"""

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from penstock.services.rollout.engines.vllm.arguments import release
from penstock.services.rollout.engines.vllm.scheduling.guessing import GUESSED, GUESSES, GUESSING_UP_TO, PASS_TOKENS
from penstock.services.rollout.engines.vllm.scheduling.plain_decoding import TOKENS_EACH, UNWAITED
from penstock.shared.errors import SettingsError

log = logging.getLogger(__name__)

_SAMPLER = "vllm.v1.worker.gpu.sample.sampler"
"""Others draw in their own way."""
_COMPARED = (0, 26)
"""The release whose runner, sampler and attention these modules know."""


def _is_known(worker: Any) -> bool:
    """Whether ``worker`` steps alone, on a GPU, with a runner that keeps tokens there."""
    parallel = worker.parallel_config
    return (
        release() == _COMPARED
        and worker.device.type == "cuda"
        and hasattr(worker.model_runner, "req_states")
        and parallel.world_size == parallel.data_parallel_size == 1
        and getattr(worker.model_runner, "speculator", None) is None
        and worker.model_runner.lora_config is None
    )


def quick_sampler(worker: Any) -> Callable[..., Any] | None:
    """Return :func:`one_pass_sampler.one_pass` of ``worker``'s sampler, or None where vLLM draws."""
    if not _is_known(worker) or type(worker.model_runner.sampler).__module__ != _SAMPLER:
        return None
    from penstock.services.rollout.engines.vllm.decoding.one_pass_sampler import is_right, one_pass

    try:
        if is_right(worker.device, worker.model_runner.vocab_size):
            return one_pass(worker.model_runner.sampler)
        log.warning("the one-pass sampler differs from PyTorch's logprobs here: vLLM draws")
    except Exception:  # of a compiler
        log.warning("the one-pass sampler does not compile here: vLLM draws", exc_info=True)
    return None


def open_siblings(worker: Any, refusal: str) -> Any:
    """Return the :class:`siblings.Siblings` of ``worker``'s runner, or None; may raise SettingsError."""
    config = worker.vllm_config
    if not config.additional_config.get(GUESSING_UP_TO):
        return None
    scheduler = getattr(config.scheduler_config.scheduler_cls, "__name__", "vLLM's")
    if refusal or not _is_known(worker) or scheduler != "HoldingAsyncScheduler":
        raise SettingsError(
            "expected vLLM 0.26, alone on one GPU, with its newer model runner, asynchronous scheduling and no adapters, to guess tokens, "
            f"found {refusal or f'{worker.device.type}, {release()} and the scheduler {scheduler}'}: set rollout.vllm.speculation = 0"
        )
    from penstock.services.rollout.engines.vllm.decoding.siblings import Siblings

    return Siblings(worker.model_runner)


def take_several_steps(worker: Any, siblings: Any = None) -> None:
    """Let ``worker``'s runner take :class:`SeveralSteps`, if it is known."""
    if _is_known(worker):
        SeveralSteps(worker.model_runner, siblings)


def split_less() -> None:
    """Do not split a sequence's keys and values in attention where the batch alone fills the device.

    In CUDA graphs vLLM 0.26 splits them into up to 32 parts and adds these up in a second kernel, whatever the batch.
    """
    if release() != _COMPARED or not torch.cuda.is_available():
        return
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder as Builder

    if hasattr(Builder.build, "__wrapped__"):
        return
    build = Builder.build

    @functools.wraps(build)
    def unsplit(self: Any, common_prefix_len: int, common_attn_metadata: Any, *more: Any, **named: Any) -> Any:
        most = self.max_num_splits
        blocks = common_attn_metadata.num_reqs * self.num_heads_kv
        if most and blocks >= 2 * torch.cuda.get_device_properties(self.device).multi_processor_count:
            self.max_num_splits = 1
        try:
            return build(self, common_prefix_len, common_attn_metadata, *more, **named)
        finally:
            self.max_num_splits = most

    Builder.build = unsplit


class SeveralSteps:
    """Takes ``runner``'s steps."""

    def __init__(self, runner: Any, siblings: Any = None) -> None:
        self._runner, self._siblings = runner, siblings
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        if siblings is not None:
            self._execute = functools.partial(siblings.execute, self._execute)
        self._later: Iterator[Any] = iter(())
        self._count = 0
        """Steps after the first."""
        self._replay: Callable[[], Any] | None = None
        """Replays the graph of the whole model that the last step replayed."""
        runner.execute_model, runner.sample_tokens = self.execute_model, self.sample_tokens
        for graphs in (getattr(runner, "cudagraph_manager", None), getattr(siblings, "graphs", None)):
            if graphs is not None:
                graphs.run_fullgraph = functools.partial(self._noting_graph, graphs.run_fullgraph)

    def _noting_graph(self, replay: Callable[[Any], Any], graph: Any) -> Any:
        self._replay = functools.partial(replay, graph)
        return replay(graph)

    def execute_model(self, scheduler_output: Any, *others: Any, **named: Any) -> Any:
        self._later = single_steps(scheduler_output)
        self._count = getattr(scheduler_output, TOKENS_EACH, 1) // _tokens(scheduler_output) - 1
        self._replay = None
        return self._execute(next(self._later), *others, **named)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:
        state: Any = getattr(self._runner, "execute_model_state", None)
        output = self._sample(grammar_output)
        if not hasattr(output, "copy_event"):
            return output
        outputs = [output]
        if self._count and self._replay is not None:
            token_nk = torch.cat([self._repeat(state.input_batch) for _ in range(self._count)], dim=1)
            together = _Together(output, _Copied(token_nk))
        else:
            for step in self._later:
                self._execute(step)
                outputs.append(self._sample(None))
            together = _Together(*outputs)
        output.get_output = together.get_output
        return output

    def _repeat(self, batch: Any) -> torch.Tensor:
        """Take a step with the requests, blocks and graph of the last one; return its tokens, n × 1, or with guesses
        n × 8, −1 after those that count.

        As ``execute_model`` and ``sample_tokens`` of vLLM 0.26, without what is the same as in the last step.
        """
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens, prepare_pos_seq_lens

        runner = self._runner
        states, buffers = runner.req_states, runner.input_buffers
        tokens = PASS_TOKENS if batch.num_draft_tokens else 1
        states.num_computed_tokens_np[batch.idx_mapping_np] += tokens
        batch.num_computed_tokens_np = batch.num_computed_tokens_np + tokens
        batch.seq_lens_cpu_upper_bound[: batch.num_reqs] += tokens
        if batch.num_draft_tokens:
            self._siblings.guess(batch.req_ids)
        prepare_pos_seq_lens(
            batch.idx_mapping,
            batch.query_start_loc,
            states.num_computed_tokens.gpu,
            buffers.positions,
            buffers.seq_lens,
        )
        combine_sampled_and_draft_tokens(
            buffers.input_ids,
            batch.idx_mapping,
            states.last_sampled_tokens,
            batch.query_start_loc,
            batch.seq_lens,
            states.prefill_len.gpu,
            states.draft_tokens,
            batch.cu_num_logits,
            tokens * batch.num_reqs,
            runner.model_state.num_new_sampled_tokens_per_step,
        )
        blocks, slots = runner.prepare_attn(batch)
        runner.model_state.prepare_attn(
            batch, CUDAGraphMode.FULL, blocks, slots, runner.attn_groups, runner.kv_cache_config
        )
        runner.model_state.prepare_inputs(batch, states)
        assert self._replay is not None
        drawn, sampled, rejected = runner.sample(self._replay(), batch, None)
        runner.postprocess_sampled(batch.idx_mapping, drawn.sampled_token_ids, sampled, rejected, batch.query_start_loc)
        token_nk: torch.Tensor = drawn.sampled_token_ids
        return token_nk


class _Together:
    """vLLM's output of a step, with the tokens of later ones."""

    def __init__(self, first: Any, *later: Any) -> None:
        self._first, self._get = first, first.get_output
        self._ready = later[-1].copy_event if later else first.copy_event
        self._later = later

    def get_output(self) -> Any:
        """Return vLLM's ``ModelRunnerOutput``."""
        unwaited = self._ready.query()
        self._ready.synchronize()
        parts, made = [self._first, *self._later], self._get()
        del self._first, self._get  # which refers to this
        if self._later:
            token_nk = np.concatenate([part.sampled_token_ids for part in parts], axis=1)
            if (token_nk < 0).any():
                made.sampled_token_ids = [row[row >= 0].tolist() for row in token_nk]
            else:
                made.sampled_token_ids = token_nk.tolist()
        setattr(made, UNWAITED, unwaited)
        return made


class _Copied:
    """Tokens on their way to the host."""

    def __init__(self, token_nk: torch.Tensor) -> None:
        self.sampled_token_ids = token_nk.to("cpu", non_blocking=True).numpy()
        self.copy_event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.copy_event.record()


def _tokens(step: Any) -> int:
    """Return the tokens of each request in each of the steps that ``step`` consists of."""
    return PASS_TOKENS if getattr(step, GUESSED, False) else 1


def single_steps(step: Any) -> Iterator[Any]:
    """Yield the steps of one token of each request, or one with its guesses, that ``step`` consists of."""
    tokens = _tokens(step)
    count = getattr(step, TOKENS_EACH, 1) // tokens
    if count == tokens == 1:
        yield step
        return
    cached = step.scheduled_cached_reqs
    single = copy.copy(step)
    single.num_scheduled_tokens = dict.fromkeys(step.num_scheduled_tokens, tokens)
    single.total_num_scheduled_tokens = tokens * len(single.num_scheduled_tokens)
    if tokens > 1:
        single.scheduled_spec_decode_tokens = dict.fromkeys(step.num_scheduled_tokens, [-1] * GUESSES)
    yield single
    for number in range(tokens, tokens * count, tokens):
        later, requests = copy.copy(single), copy.copy(cached)
        requests.new_block_ids = [None] * len(cached.req_ids)
        requests.num_computed_tokens = [computed + number for computed in cached.num_computed_tokens]
        requests.num_output_tokens = [made + number for made in cached.num_output_tokens]
        later.scheduled_cached_reqs = requests
        later.finished_req_ids, later.preempted_req_ids, later.free_encoder_mm_hashes = set(), set(), []
        later.new_block_ids_to_zero = later.kv_cache_block_copies = None
        yield later
