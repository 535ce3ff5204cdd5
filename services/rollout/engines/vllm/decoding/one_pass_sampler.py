"""Draw tokens and take their logprobs in one pass over the logits. Imports Triton.

vLLM's sampler draws a random number for each logit (Gumbel-max), and its logprobs read the logits twice more. Here each
block of the vocabulary is reduced to its maximum and its sum of exponentials; one uniform number of 53 bits for each
row chooses a block, then a token of it, by the inverse of the cumulative distribution::

    blocks   (row, block)   logits ─▶ maximum, sum of exponentials        float32
    draw     (row)          sums ─▶ block ─▶ token, log softmax[token]    float64

The logits are vLLM's after temperature, penalties, min-p and the like; steps with top-k, top-p, greedy requests or
logprobs that vLLM returns are drawn by vLLM.

Legend: n rows, V vocabulary, B blocks.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _reduce_blocks(logits, stride, max_nB, sum_nB, blocks, vocabulary, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + place, mask=place < vocabulary, other=float("-inf")).to(tl.float32)
    most = tl.max(value, axis=0)
    total = tl.sum(tl.exp(value - tl.where(most == float("-inf"), 0.0, most)), axis=0)
    tl.store(max_nB + row * blocks + block, most)
    tl.store(sum_nB + row * blocks + block, total)


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    logits, stride, seed_n, position_n, max_nB, sum_nB, token_n, logprob_n, blocks, vocabulary,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCKS)
    is_block = number < blocks
    most_B = tl.load(max_nB + row * blocks + number, mask=is_block, other=float("-inf"))
    most = tl.max(most_B, axis=0)
    sum_B = tl.load(sum_nB + row * blocks + number, mask=is_block, other=0.0)
    weight_B = sum_B.to(tl.float64) * tl.exp((most_B - most).to(tl.float64))
    total = tl.sum(weight_B, axis=0)

    low, high, _, _ = tl.randint4x(tl.load(seed_n + row), tl.load(position_n + row))
    bits = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    uniform = (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2⁻⁵³

    reached_B = tl.cumsum(weight_B, axis=0)
    target = uniform * total
    last = tl.max(tl.where(weight_B > 0.0, number, 0), axis=0)
    block = tl.minimum(tl.sum((reached_B <= target).to(tl.int32), axis=0), last)
    before = tl.sum(tl.where(number < block, weight_B, 0.0), axis=0)
    weight = tl.sum(tl.where(number == block, weight_B, 0.0), axis=0)
    within = tl.minimum(tl.maximum((target - before) / weight, 0.0), 1.0)

    offset = tl.arange(0, BLOCK)
    place = block * BLOCK + offset
    value = tl.load(logits + row * stride + place, mask=place < vocabulary, other=float("-inf")).to(tl.float32)
    top = tl.max(value, axis=0)
    share = tl.exp(value - top).to(tl.float64)
    share_sum = tl.cumsum(share, axis=0)
    last_offset = tl.max(tl.where(share > 0.0, offset, 0), axis=0)
    chosen = tl.sum((share_sum <= within * tl.sum(share, axis=0)).to(tl.int32), axis=0)
    chosen = tl.minimum(chosen, last_offset)
    token = block * BLOCK + chosen
    drawn = tl.sum(tl.where(offset == chosen, value, 0.0), axis=0)
    tl.store(token_n + row, token.to(tl.int64))
    tl.store(logprob_n + row, ((drawn - most).to(tl.float64) - tl.log(total)).to(tl.float32))


def draw(logits_nV: torch.Tensor, seed_n: torch.Tensor, position_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids of softmax(logits), and their logprobs in float32.

    Args:
        logits_nV: of any float type, with contiguous rows; −∞ excludes a token.
        seed_n: with the position, it determines the draw.
    """
    rows, vocabulary = logits_nV.shape
    blocks = triton.cdiv(vocabulary, _BLOCK)
    max_nB, sum_nB = logits_nV.new_empty((2, rows, blocks), dtype=torch.float32)
    token_n = logits_nV.new_empty(rows, dtype=torch.int64)
    logprob_n = logits_nV.new_empty(rows, dtype=torch.float32)
    stride = logits_nV.stride(0)
    _reduce_blocks[(rows, blocks)](logits_nV, stride, max_nB, sum_nB, blocks, vocabulary, BLOCK=_BLOCK, num_warps=8)
    _draw[(rows,)](
        logits_nV, stride, seed_n, position_n, max_nB, sum_nB, token_n, logprob_n, blocks, vocabulary,
        BLOCK=_BLOCK, BLOCKS=triton.next_power_of_2(blocks), num_warps=8,
    )  # fmt: skip
    return token_n, logprob_n


def is_right(device: torch.device, vocabulary: int) -> bool:
    """Compile the kernels for ``vocabulary``, and compare logprobs with PyTorch's in float64."""
    generator = torch.Generator(device).manual_seed(0)
    logits_nV = torch.randn(4, vocabulary, device=device, generator=generator).to(torch.bfloat16)
    place_n = torch.arange(4, device=device)
    token_n, logprob_n = draw(logits_nV, place_n, place_n)
    if not bool(((token_n >= 0) & (token_n < vocabulary)).all()):
        return False
    expected_n = logits_nV.double().log_softmax(1).gather(1, token_n.unsqueeze(1)).squeeze(1)
    return torch.allclose(logprob_n.double(), expected_n, rtol=1e-5, atol=1e-5)


Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def one_pass(sampler: Any) -> Callable[..., Drawn | None]:
    """Return a function of the arguments of vLLM's ``sampler.sample``: (token ids, processed logits, logprobs), or None
    where vLLM draws."""
    arguments, states = inspect.signature(sampler.sample), sampler.sampling_states

    def sample(*given: Any, **named: Any) -> Drawn | None:
        by_name = arguments.bind(*given, **named).arguments
        request_n = by_name["expanded_idx_mapping"]
        requests = by_name["idx_mapping_np"]
        if (
            by_name.pop("return_logprobs", False)
            or states.any_greedy(requests)
            or any(limit is not None for limit in states.get_top_k_top_p(request_n, requests))
        ):
            return None
        logits_nV = sampler.apply_sampling_params(**by_name, skip_top_k_top_p=True)
        token_n, logprob_n = draw(logits_nV, states.seeds.gpu[request_n], by_name["pos"])
        return token_n, logits_nV, logprob_n

    return sample
