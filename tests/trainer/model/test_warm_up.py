"""Warming up draws no random number, changes no default, and never fails."""

import threading
from typing import Any

import pytest
import torch

from penstock.services.trainer.model import warm_up

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}


@pytest.mark.parametrize("part", [warm_up._product, warm_up._logits, warm_up._attention])
@pytest.mark.parametrize("tokens", warm_up._TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_uses_leave_random_numbers_and_defaults_as_they_are(part: Any, tokens: int, dtype: torch.dtype) -> None:
    before = torch.get_rng_state()
    part(CONFIG, tokens, {"device": torch.device("cpu"), "dtype": dtype})
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


def test_on_a_cpu_nothing_runs_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", None)
    with warm_up.beside({}, "auto", "cpu"):
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_configuration_without_sizes_is_left_out_and_the_block_waits_for_the_thread() -> None:
    with warm_up.beside({}, "auto", "cuda"):
        pass
    assert not any(thread.name == "warm-up" for thread in threading.enumerate())
