"""Guess a request's next tokens from its group, and verify the guesses in one pass of the model. Imports Triton.

::

    guess    last tokens ─▶ where they occur in the group's texts ─▶ the tokens after the longest, latest occurrence
    pass     last token and guesses ─▶ logits at each ─▶ a token drawn at each, as without guesses
    settle   drawn tokens up to the first that differs from its guess

A token is drawn from the model's distribution after the tokens before it, whatever was guessed, so samples are those
without guesses. A group is all requests with the same prompt, those that ended included until another request takes
their place in vLLM's state. All is on the device, without a wait of the host.

Legend: n requests, m logits, d guesses of a request, S texts in which they are searched, R places of vLLM's state.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from penstock.services.rollout.engines.vllm.scheduling.guessing import GUESSES, GUESSING_UP_TO, PASS_TOKENS
from penstock.services.rollout.engines.vllm.token_record import sent

_LONGEST = 8
"""Tokens that are compared."""
_BLOCK = 1024
_TEXTS = 16
"""Maximum texts in which a request's tokens are searched."""
_AHEAD = 256
"""Granularity of the searched length, in tokens: more than are under way."""
_BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48)
"""Requests for which CUDA graphs are captured, beside the most."""


@triton.jit(do_not_specialize=["texts"])  # type: ignore[untyped-decorator]
def _search(  # type: ignore[no-untyped-def]
    token_RT, stride, length_R, row_n, text_nS, texts, best_n, LONGEST: tl.constexpr, BLOCK: tl.constexpr
):
    request, text = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_n + request).to(tl.int64)
    other = tl.load(text_nS + request * texts + text).to(tl.int64)
    if other < 0:
        return
    length, other_length = tl.load(length_R + row), tl.load(length_R + other)
    end = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)  # place of the first guess
    alive = (end > 0) & (end < other_length)
    matched = tl.zeros((BLOCK,), dtype=tl.int64)
    for back in tl.static_range(LONGEST):
        last = tl.load(token_RT + row * stride + length - 1 - back, mask=length > back, other=-1)
        theirs = tl.load(token_RT + other * stride + end - 1 - back, mask=alive & (end > back), other=-2)
        alive = alive & (theirs == last)
        matched += alive.to(tl.int64)
    best = tl.max((matched << 52) | (end.to(tl.int64) << 16) | other, axis=0)
    if best >= (1 << 52):
        tl.atomic_max(best_n + request, best)


@triton.jit  # type: ignore[untyped-decorator]
def _copy(token_RT, stride, length_R, row_n, best_n, guess_Rd, guesses, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    request = tl.program_id(0)
    row, best = tl.load(row_n + request).to(tl.int64), tl.load(best_n + request)
    other, end = best & 0xFFFF, (best >> 16) & 0xFFFFFFFFF
    rest = tl.maximum(tl.load(length_R + other) - end, 1)
    number = tl.arange(0, BLOCK)
    is_guess = number < tl.where(best > 0, guesses, 0)
    guess = tl.load(
        token_RT + other * stride + end + number % rest, mask=is_guess, other=0
    )  # as if the text went round
    tl.store(guess_Rd + row * guesses + number, guess.to(tl.int64), mask=number < guesses)


def guess(
    token_RT: torch.Tensor,
    length_R: torch.Tensor,
    row_n: torch.Tensor,
    text_nS: torch.Tensor,
    longest: int,
    guess_Rd: torch.Tensor,
) -> None:
    """Write guesses of the next tokens of the texts ``row_n`` into their rows of ``guess_Rd``.

    Args:
        token_RT: texts, each of ``length_R`` tokens.
        text_nS: rows in which those of each request are searched, −1 for none.
        longest: no text is longer.
    """
    (requests, texts), stride = text_nS.shape, token_RT.stride(0)
    best_n = torch.zeros(requests, dtype=torch.int64, device=row_n.device)
    _search[(requests, texts, triton.cdiv(longest, _BLOCK))](
        token_RT, stride, length_R, row_n, text_nS, texts, best_n, LONGEST=_LONGEST, BLOCK=_BLOCK
    )
    guesses = guess_Rd.shape[1]
    _copy[(requests,)](
        token_RT, stride, length_R, row_n, best_n, guess_Rd, guesses, BLOCK=triton.next_power_of_2(guesses), num_warps=1
    )


@triton.jit  # type: ignore[untyped-decorator]
def _settle(token_m, read_ptr, place_m, drawn_nk, sampled_n, rejected_n, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    request = tl.program_id(0)
    number = tl.arange(0, TOKENS)
    first = request * TOKENS
    token = tl.load(token_m + first + number)
    has_guess = number < TOKENS - 1
    guess = tl.load(read_ptr + tl.load(place_m + first + number + 1, mask=has_guess, other=0), mask=has_guess, other=-1)
    sampled = tl.min(tl.where(has_guess & (guess == token), TOKENS, number), axis=0) + 1
    tl.store(drawn_nk + first + number, tl.where(number < sampled, token, -1))
    tl.store(sampled_n + request, sampled)
    tl.store(rejected_n + request, TOKENS - sampled)


def settle(
    token_m: torch.Tensor, read: torch.Tensor, place_m: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens of each request up to the first that differs from its guess, n × 8 with −1 after them, their
    number and that of the others. ``token_m`` were drawn after the tokens at ``place_m`` of ``read``: of each request its
    last one, and its guesses.
    """
    requests = len(token_m) // PASS_TOKENS
    drawn_nk = token_m.new_empty(requests, PASS_TOKENS)
    sampled_n, rejected_n = (token_m.new_empty(requests, dtype=torch.int32) for _ in range(2))
    _settle[(requests,)](token_m, read, place_m, drawn_nk, sampled_n, rejected_n, TOKENS=PASS_TOKENS, num_warps=1)
    return drawn_nk, sampled_n, rejected_n


class Siblings:
    """Guesses for ``runner``, vLLM's, and verifies."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._states = runner, runner.req_states
        places = self._states.max_num_reqs
        self._states.draft_tokens = torch.zeros(places, GUESSES, dtype=torch.int64, device=runner.device)
        self._group_R = np.zeros(places, dtype=np.int64)
        self._requests: Sequence[str] = ()
        self._row_n = self._text_nS = torch.empty(0)
        self._searched = np.zeros(0, dtype=np.int64)
        self._warm_up()
        self.graphs = self._capture()
        self._sample, runner.sample = runner.sample, self.sample

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Compile the kernels."""
        states, row_n = self._states, torch.zeros(1, dtype=torch.int32, device=self._runner.device)
        guess(states.all_token_ids.gpu, states.total_len.gpu, row_n, row_n.view(1, 1), _AHEAD, states.draft_tokens)
        token_m = torch.zeros(PASS_TOKENS, dtype=torch.int64, device=self._runner.device)
        settle(token_m, token_m.to(torch.int32), token_m)

    @torch.inference_mode()
    def _capture(self) -> Any:
        """Return vLLM's manager of CUDA graphs for passes with guesses, or None where whole steps have none."""
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        runner, own = self._runner, self._runner.cudagraph_manager
        if own is None or own.cudagraph_mode.decode_mode() != CUDAGraphMode.FULL or not self._has_graphs():
            return None
        most = min(runner.vllm_config.additional_config[GUESSING_UP_TO], runner.max_num_reqs)
        graphs = type(own)(runner.vllm_config, runner.device, CUDAGraphMode.FULL_DECODE_ONLY, PASS_TOKENS)
        captured = [
            BatchExecutionDescriptor(CUDAGraphMode.FULL, requests * PASS_TOKENS, requests, PASS_TOKENS)
            for requests in (most, *(batch for batch in reversed(_BATCHES) if batch < most))
        ]
        graphs._capture_descs, graphs._candidates = {CUDAGraphMode.FULL: captured}, {}
        for graph in captured:
            graphs._candidates |= {(tokens, 0): [graph] for tokens in range(graph.num_tokens + 1)}
        graphs.capture(
            runner.model, runner.model_state, runner.input_buffers, runner.intermediate_tensors, runner.block_tables,
            runner.attn_groups, runner.kv_cache_config, progress_bar_desc="Capturing CUDA graphs with guesses",
        )  # fmt: skip
        return graphs

    def _has_graphs(self) -> bool:
        """Whether graphs may have several tokens of each request."""
        from vllm.v1.attention.backend import AttentionCGSupport

        return all(
            group.get_metadata_builder(0).get_cudagraph_support(self._runner.vllm_config, group.kv_cache_spec).value
            >= AttentionCGSupport.UNIFORM_BATCH.value
            for groups in self._runner.attn_groups
            for group in groups
        )

    def execute(self, execute: Callable[..., Any], step: Any, *others: Any, **named: Any) -> Any:
        """Call vLLM's ``execute_model``, with guesses if ``step`` has them."""
        runner = self._runner
        before = runner.decode_query_len, runner.cudagraph_manager
        if step.scheduled_spec_decode_tokens:
            self.guess(list(step.num_scheduled_tokens))
            runner.decode_query_len, runner.cudagraph_manager = PASS_TOKENS, self.graphs or before[1]
        answer = execute(step, *others, **named)
        runner.decode_query_len, runner.cudagraph_manager = before
        for new in step.scheduled_new_reqs:
            self._group_R[self._states.req_id_to_index[new.req_id]] = hash(tuple(new.prompt_token_ids))
            self._requests = ()
        return answer

    @torch.inference_mode()
    def guess(self, requests: Sequence[str]) -> None:
        """Guess what comes after the last tokens of ``requests``."""
        if requests != self._requests:
            self._find(requests)
        states = self._states
        longest = (int(states.num_computed_tokens_np[self._searched].max()) // _AHEAD + 2) * _AHEAD
        guess(states.all_token_ids.gpu, states.total_len.gpu, self._row_n, self._text_nS, longest, states.draft_tokens)

    def _find(self, requests: Sequence[str]) -> None:
        """Find the texts of each request's group."""
        rows = [self._states.req_id_to_index[request] for request in requests]
        others = [np.flatnonzero(self._group_R == self._group_R[row]) for row in rows]
        texts = [np.append(row, other[other != row][: _TEXTS - 1]) for row, other in zip(rows, others, strict=True)]
        text_nS = np.full((len(rows), max(map(len, texts))), -1, dtype=np.int32)
        for place, of_request in enumerate(texts):
            text_nS[place, : len(of_request)] = of_request
        self._searched = np.unique(np.concatenate(texts))
        row_n, device = np.array(rows, dtype=np.int32), self._runner.device
        self._row_n, self._text_nS = sent(row_n, device), sent(text_nS, device)
        self._requests = requests

    def sample(self, hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
        """As vLLM's ``sample``: (output, tokens of each request, tokens read in vain of each)."""
        drawn = self._sample(hidden_states, batch, grammar_output)
        if not batch.num_draft_tokens:
            return drawn
        output = drawn[0]
        output.sampled_token_ids, output.num_sampled, output.num_rejected = settle(
            output.sampled_token_ids.view(-1), batch.input_ids, batch.logits_indices
        )
        return output, output.num_sampled, output.num_rejected

    def counted_tokens(self) -> dict[str, int]:
        """Return the tokens of each request, prompt included, as the device counts them, for which the host waits."""
        length_R = self._states.total_len.gpu.tolist()
        return {request: length_R[row] for request, row in self._states.req_id_to_index.items()}
