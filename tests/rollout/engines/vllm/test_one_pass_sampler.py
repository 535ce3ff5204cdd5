"""Tokens and logprobs in one pass, by Triton's interpreter, against float64."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import need_module

Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Call a function in a process whose Triton interprets kernels, which is decided when it is imported."""
    need_module("triton", "vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            yield lambda function, *given: pool.submit(function, *given).result()


@pytest.fixture
def draw(interpreted: Callable[..., Any]) -> Draw:
    return lambda *given: interpreted(_draw, *given)


def _draw(*given: torch.Tensor) -> Any:
    from penstock.services.rollout.engines.vllm.decoding import one_pass_sampler

    return one_pass_sampler.draw(*given)


def _seeds(rows: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [1, 50, 4096, 9001])
def test_logprobs_are_of_the_drawn_tokens(draw: Draw, dtype: torch.dtype, vocabulary: int) -> None:
    logits = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(0)).mul(4).to(dtype)
    logits[1, 1:], logits[2, : vocabulary - 1], logits[3] = -torch.inf, -torch.inf, 300.0
    tokens, logprobs = draw(logits, _seeds(6), torch.arange(6))
    expected = logits.double().log_softmax(1).gather(1, tokens[:, None])[:, 0]
    assert tokens[1:3].tolist() == [0, vocabulary - 1]
    # sums of float32 in another order
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-6)


def test_draws_are_distributed_as_the_probabilities(draw: Draw) -> None:
    """Across blocks of the vocabulary and within them; excluded tokens never."""
    rows, vocabulary, kinds = 300, 5000, 8
    logits = torch.full((vocabulary,), -torch.inf)
    places = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(1))[:kinds]
    logits[places] = torch.randn(kinds, generator=torch.Generator().manual_seed(2))
    tokens, _ = draw(logits.expand(rows, vocabulary).contiguous(), _seeds(rows), torch.arange(rows))
    drawn, expected = torch.bincount(tokens, minlength=vocabulary)[places], rows * logits.softmax(0)[places]
    assert int(drawn.sum()) == rows
    # 7 degrees of freedom; the seeds are fixed
    assert float(((drawn - expected) ** 2 / expected).sum()) < 25


def test_a_draw_is_determined_by_seed_and_position(draw: Draw) -> None:
    logits, seeds = torch.zeros(64, 500), _seeds(64)
    first, _ = draw(logits, seeds, torch.arange(64))
    again, _ = draw(logits[:8], seeds[:8], torch.arange(8))
    later, _ = draw(logits, seeds, torch.arange(64) + 1)
    assert torch.equal(first[:8], again)
    assert int((first == later).sum()) < 8


def test_kernels_are_compared_before_they_are_used(interpreted: Callable[..., Any]) -> None:
    assert interpreted(_comparisons) == [True, False, False]


def _comparisons() -> list[bool]:
    from penstock.services.rollout.engines.vllm.decoding import one_pass_sampler

    cpu, right = torch.device("cpu"), one_pass_sampler.draw
    made = [one_pass_sampler.is_right(cpu, 5000)]
    for tokens, nats in ((0, 1e-3), (5000, 0.0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                one_pass_sampler,
                "draw",
                lambda *given, tokens=tokens, nats=nats: tuple(
                    values + more for values, more in zip(right(*given), (tokens, nats), strict=True)
                ),
            )
            made.append(one_pass_sampler.is_right(cpu, 5000))
    return made


class _Sampler:
    """Has the parts of vLLM's sampler that are used, which needs a GPU; its logits processing divides by two."""

    def __init__(self) -> None:
        self.sampling_states = self
        self.seeds = SimpleNamespace(gpu=_seeds(4))
        self.greedy = False
        self.top_k: torch.Tensor | None = None

    def sample(
        self, logits: Any, expanded_idx_mapping: Any, idx_mapping_np: Any, pos: Any, return_logprobs: bool = False
    ) -> None:
        raise AssertionError

    def apply_sampling_params(
        self, logits: Any, expanded_idx_mapping: Any, idx_mapping_np: Any, pos: Any, skip_top_k_top_p: bool = False
    ) -> Any:
        assert skip_top_k_top_p
        return logits / 2

    def any_greedy(self, requests: Any) -> bool:
        return self.greedy

    def get_top_k_top_p(self, request_n: Any, requests: Any) -> tuple[Any, Any]:
        return self.top_k, None


def test_vllm_draws_where_the_distribution_is_not_plain(interpreted: Callable[..., Any]) -> None:
    interpreted(_vllm_draws_where_the_distribution_is_not_plain)


def _vllm_draws_where_the_distribution_is_not_plain() -> None:
    from penstock.services.rollout.engines.vllm.decoding.one_pass_sampler import one_pass

    sampler, rows = _Sampler(), torch.tensor([3, 1])
    sample = one_pass(sampler)
    arguments = (torch.randn(2, 50), rows, rows.numpy(), torch.arange(2))
    drawn = sample(*arguments)
    assert drawn is not None
    tokens, logits, logprobs = drawn
    assert torch.equal(logits, arguments[0] / 2)
    torch.testing.assert_close(logprobs, logits.log_softmax(1).gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-6)
    assert torch.equal(tokens, _draw(logits, sampler.seeds.gpu[rows], torch.arange(2))[0])
    assert sample(*arguments, return_logprobs=True) is None
    sampler.greedy = True
    assert sample(*arguments) is None
    sampler.greedy, sampler.top_k = False, torch.ones(2)
    assert sample(*arguments) is None
