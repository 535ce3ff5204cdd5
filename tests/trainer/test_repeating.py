"""Bitwise repeatability on every device, and float32 logits in the real engine."""

import json
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from penstock.services.trainer.algorithm.update import Learner
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.layers.gather import copies, gather_rows
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.phases import Phases
from penstock.shared.model.logits_projection import LogitsType
from penstock.shared.settings import Settings
from tests.support import tiny
from tests.support.interpreted import interpreted
from tests.trainer.algorithm import test_update

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_the_gradient_of_copied_rows_is_their_sum_and_always_the_same(device: str) -> None:
    torch.manual_seed(0)
    rows = torch.randn(50, 3, 8, device=device, requires_grad=True)
    places, weights = torch.randint(0, 50, (4000,), device=device), torch.randn(4000, 3, 8, device=device)
    expected = torch.zeros(50, 3, 8, dtype=torch.float64).index_add_(0, places.cpu(), weights.double().cpu())
    for chosen in (places, copies(places.cpu().numpy(), 50, rows.device)):
        assert torch.equal(gather_rows(rows, chosen), rows[places])
        first, second = (torch.autograd.grad((gather_rows(rows, chosen) * weights).sum(), rows)[0] for _ in range(2))
        assert torch.allclose(first.double().cpu(), expected, atol=1e-4)  # about 80 copies each, summed in float32
        assert torch.equal(first, second)


def test_the_kernel_that_sums_copies_adds_each_rows_in_their_order_and_gives_zero_where_there_are_none() -> None:
    """In Triton's interpreter; rows wider than a block, and float16."""
    assert interpreted(_SUMS) == ["torch.float32 True", "torch.float16 True"]


_SUMS = """
import numpy as np
from penstock.services.trainer.model.layers.gather import copies
from penstock.services.trainer.model.layers.triton_kernels.gather import sum_copies
torch.manual_seed(0)
places = np.random.default_rng(0).integers(0, 20, 90)
places[places == 7] = 8
for dtype in (torch.float32, torch.float16):
    gradient = torch.randn(90, 3, 500).to(dtype)
    expected = torch.zeros(20, 3, 500).index_add_(0, torch.from_numpy(places), gradient.float()).to(dtype)
    known = copies(places, 20, torch.device("cpu"))
    print(dtype, torch.equal(sum_copies(gradient, known.order, known.ends, expected.shape), expected))
"""


@NEEDS_GPU
def test_a_replay_on_a_gpu_repeats_a_step_to_the_bit_with_dropout_and_short_of_memory() -> None:
    command = [sys.executable, "-m", "benchmarks.trainer.replay", "--device", "cuda", "--lora", "--short-of-memory"]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # an earlier test may have made this process a rank
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    data = json.loads(done.stdout.splitlines()[-1])
    assert data["on"]["misfits"] == 1
    assert data["on"]["equal"], data


def _step(zero_stage: int, logits: LogitsType, chunk_tokens: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Return gradient norm and weights of a bfloat16 step."""
    trainer = {"learning_rate": 1e-3, "zero_stage": zero_stage}
    of = Settings.model_validate(
        {"policy": {"dtype": "bfloat16"}, "sampling": {"max_new_tokens": 8}, "trainer": trainer}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = tiny.model(0).to(torch.bfloat16).requires_grad_(True)
        engine = TrainingEngine(Policy(model, chunk_tokens=chunk_tokens, logits=logits).train(), of, "cpu")
        data = test_update.batch()
        measured = Learner(engine, of, Phases()).learn(data, test_update.lags(data), 1)
    return measured["grad_norm"], {name: tensor.float().clone() for name, tensor in engine.tensors()}


@pytest.mark.usefixtures("one_rank")
def test_a_step_with_float32_logits_is_the_same_with_weights_in_parts_and_in_chunks() -> None:
    norm, weights = _step(1, "float32", 0)
    for zero_stage, chunk_tokens in ((3, 0), (3, 5), (1, 5)):
        other_norm, other = _step(zero_stage, "float32", chunk_tokens)
        assert other_norm == pytest.approx(norm, rel=1e-2)  # gradients are summed in bfloat16, chunk by chunk
        # AdamW's first step is ± the learning rate, rounded to 8 bits
        assert max(float((weights[name] - other[name]).abs().max()) for name in weights) <= 2.1e-3 + 2**-8
    assert _step(1, "model", 0)[0] != norm
