"""Recomputation of activations changes no bit, and follows from memory."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from penstock.services.trainer.batch.packing import micro_batch
from penstock.services.trainer.model.memory.recomputation import Kept, MemoryUsage, Recomputation
from tests.support.packed import rows
from tests.trainer.model.test_engine import Stepper, settings

pytestmark = pytest.mark.usefixtures("one_rank")
GIB = 1 << 30


def keeping(count: int, zero_stage: int, chunk: int = 0, **trainer: Any) -> tuple[Stepper, Recomputation]:
    """Return an engine whose last ``count`` of two layers keep activations; with both, also logits."""
    stepper = Stepper(settings(zero_stage, gradient_checkpointing=True, logits_chunk_tokens=chunk, **trainer))
    engine = stepper.engine
    recomputation = Recomputation(engine.policy, 64, engine.device, sharded=zero_stage == 3, automatic=True)
    recomputation.keep(Kept(count, logits=count > 1))
    engine._recomputation = recomputation
    return stepper, recomputation


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's, about what DeepSpeed calls
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_which_layers_compute_again_changes_no_bit_of_a_step(zero_stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)  # as before any engine in this process
    collected = []
    for count in (0, 1, 2):
        stepper, _ = keeping(count, zero_stage, chunk=5)
        measured = [stepper.step(number) for number in (1, 2)]
        collected.append(([(report["loss"], report["grad_norm"]) for report in measured], stepper.weights()))
    for numbers, weights in collected[1:]:
        assert numbers == collected[0][0]
        assert all(torch.equal(tensor, weights[name]) for name, tensor in collected[0][1].items())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_layer_that_keeps_its_activations_computes_nothing_again(
    zero_stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
    batch, operations = micro_batch(rows(0)), []
    for count in (0, 1, 2):
        stepper, _ = keeping(count, zero_stage)
        with FlopCounterMode(display=False) as counter, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stepper.engine.backward(stepper.engine.forward(batch).policy_logprobs_N.mean(), last=True)
        products = counter.get_flop_counts()["Global"].items()
        operations.append(sum(number for name, number in products if "bmm" not in str(name)))
    layers, sizes = 2, stepper.engine.sizes
    again = 2 * batch.tokens * (sizes.linear_weights // layers - 32 * 64)  # all but the last product
    assert operations == [operations[2] + 2 * again, operations[2] + again, operations[2]]
    assert operations[2] == 6 * (batch.tokens * sizes.linear_weights + len(batch.targets_N) * sizes.output_weights)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_layer_that_keeps_its_activations_keeps_no_whole_weight_where_ranks_have_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
    stepper, _ = keeping(2, 3, deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0}})
    out = stepper.engine.forward(micro_batch(rows(0))).policy_logprobs_N
    kept = [node for node in _graph(out.grad_fn) if type(node).__name__ in ("MmBackward0", "AddmmBackward0")]
    refused = 0
    for node in kept:
        try:
            _ = node._saved_mat2
        except RuntimeError as error:  # the weight is away until the backward pass
            refused += "out of bounds for storage of size 0" in str(error)
    assert (len(kept), refused) == (15, 14)  # seven matrices a layer, without the output layer
    stepper.engine.backward(out.mean(), last=True)


def _graph(node: Any) -> Iterator[Any]:
    seen, waiting = set[Any](), [node]
    while waiting:
        if (first := waiting.pop()) is None or first in seen:
            continue
        seen.add(first)
        yield first
        waiting += [following for following, _ in first.next_functions]


def test_the_forecast_is_of_the_largest_forward_pass_that_settings_allow() -> None:
    # 60 GiB lasting; 16,384 tokens took 16, so 32,768 take 32; 0.85 of 140 GiB may be used
    used = MemoryUsage(lasting=60 * GIB, peak=76 * GIB, tokens=16_384, available=140 * GIB)
    assert (used.free(16_384), used.free(32_768)) == (43 * GIB, 27 * GIB)
    assert MemoryUsage(60 * GIB, 130 * GIB, 32_768, 140 * GIB).free(32_768) == -11 * GIB


def test_what_is_free_goes_to_the_logits_and_to_at_most_four_times_as_many_layers() -> None:
    assert Kept(1).next(free=50, layers=28, layer_bytes=2, logits_bytes=10) == Kept(4, logits=True)
    assert Kept(4, logits=True).next(free=14, layers=28, layer_bytes=2, logits_bytes=10) == Kept(11, logits=True)
    assert Kept(16, logits=True).next(free=99, layers=28, layer_bytes=2, logits_bytes=10) == Kept(28, logits=True)
    assert Kept(1).next(free=9, layers=28, layer_bytes=2, logits_bytes=10) == Kept(4)
    assert Kept(1).next(free=50, layers=28, layer_bytes=0, logits_bytes=10) == Kept(1)  # not measured yet


def test_what_is_lacking_is_taken_from_layers_first() -> None:
    assert Kept(11, logits=True).next(free=-5, layers=28, layer_bytes=2, logits_bytes=10) == Kept(8, logits=True)
    assert Kept(2, logits=True).next(free=-9, layers=28, layer_bytes=2, logits_bytes=10) == Kept(1, logits=True)
    assert Kept(1, logits=True).next(free=-1, layers=28, layer_bytes=2, logits_bytes=10) == Kept(1)


@pytest.mark.parametrize(("setting", "kept"), [("auto", 1), (True, 0)])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_first_step_on_a_gpu_keeps_the_activations_of_the_last_layer_alone(setting: str | bool, kept: int) -> None:
    from penstock.services.trainer.model.engine import TrainingEngine
    from penstock.services.trainer.model.policy import Policy
    from tests.support import tiny

    of = settings(1, gradient_checkpointing=setting, device="cuda")
    engine = TrainingEngine(Policy(tiny.model(0).requires_grad_(True)).train(), of, "cuda")
    assert engine._recomputation.kept == Kept(kept)
