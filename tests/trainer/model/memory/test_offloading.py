"""Inputs of layers in the host's memory change no bit of a gradient, and are not on the device meanwhile."""

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.services.trainer.batch.packing import MicroBatch, micro_batch
from penstock.services.trainer.model import adapter
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.memory import offloading, recomputation
from penstock.services.trainer.model.memory.recomputation import Kept, Recomputation
from penstock.services.trainer.model.policy import Policy, load_model
from penstock.shared.process import memory_timeline
from penstock.shared.settings import PolicySettings
from tests.support import model_zoo, tiny, trees
from tests.support.packed import rows
from tests.trainer.model.test_engine import Stepper, settings

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.filterwarnings("ignore::FutureWarning")]
CPU = torch.device("cpu")
FAMILIES = ("qwen3", "lfm2", "gemma3", "qwen3_moe", "zamba2")
"""Plain, with state, with two kinds of layers, with experts, with layers inside others."""
ALWAYS, NEVER = 0.0, float("inf")


class Passes:
    """Forward and backward passes of a policy whose layers compute again."""

    def __init__(self, policy: Policy, device: torch.device = CPU, kept: int = 0) -> None:
        recomputation.enable(policy.model, True, "cpu")
        self.policy = policy.to(device).train()  # which modules are trained without noise depends on it
        self.recomputation = Recomputation(policy, 64, device, sharded=False, automatic=False)
        self.recomputation.keep(Kept(kept))
        self.inputs = self.recomputation.inputs

    def forward(self, batch: MicroBatch, least_bytes: float) -> Tensor:
        self.inputs.least_bytes = least_bytes
        with self.recomputation.watching(batch.tokens):
            logprobs: Tensor = self.policy(batch).policy_logprobs_N
        if least_bytes in (ALWAYS, NEVER):
            assert (self.inputs._newest is None) == (least_bytes == NEVER)
        return logprobs

    def gradients(self, batch: MicroBatch, least_bytes: float, seed: int = 0) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        self.policy.zero_grad()
        (
            self.forward(batch, least_bytes) * torch.arange(len(batch.targets_N), device=self.inputs._device)
        ).sum().backward()
        named = self.policy.named_parameters()
        return {name: weight.grad.clone() for name, weight in named if weight.grad is not None}


def deep(layers: int = 6) -> Policy:
    model = tiny.model(0)
    config = model.config
    config.num_hidden_layers, config.layer_types = layers, None
    torch.manual_seed(0)
    return Policy(type(model)(type(config)(**{**config.to_dict(), "layer_types": None})))


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some) and bool(some)


def batches() -> list[MicroBatch]:
    """Rows of several lengths, with shared prompts, one token, and trees."""
    shared = [micro_batch(rows(seed, shape)) for seed, shape in enumerate((((5, (4, 1)),), ((40, (30, 3, 70)), (1, (3,))), ((1, (1,)),)))]  # fmt: skip
    return [*shared, micro_batch([trees.group(0, tiny.VOCABULARY, segments=12)])]


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_with_inputs_on_the_host_are_those_without_bit_for_bit(tmp_path: Path, name: str) -> None:
    model_zoo.save(name, tmp_path)
    passes = Passes(Policy(load_model(PolicySettings(model=str(tmp_path)), torch.float32)))
    for batch in (micro_batch(rows(0)), micro_batch(rows(1, ((7, (9, 2)),)))):
        assert same(passes.gradients(batch, ALWAYS), passes.gradients(batch, NEVER))


@pytest.mark.parametrize("kept", [0, 2])
def test_rows_of_all_lengths_shared_prompts_and_trees_have_equal_gradients(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "_CHUNK_BYTES", 1000)  # a row of 2,000 bytes and more takes several
    passes = Passes(deep(), kept=kept)
    expected = [passes.gradients(batch, NEVER) for batch in batches()]
    assert all(map(same, [passes.gradients(batch, ALWAYS) for batch in batches()], expected))


def test_adapters_with_dropout_draw_the_same_noise_again() -> None:
    of = PolicySettings.model_validate({"lora": {"rank": 2, "dropout": 0.5}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of a model without a name
        passes = Passes(Policy(adapter.add(tiny.model(0), of, 0)))
    batch = micro_batch(rows(0))
    first = passes.gradients(batch, ALWAYS)
    assert same(first, passes.gradients(batch, NEVER))
    assert not same(first, passes.gradients(batch, NEVER, seed=1))


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_steps_of_every_zero_stage_are_equal(zero_stage: int) -> None:
    collected = []
    for least_bytes in (ALWAYS, NEVER):
        stepper = Stepper(settings(zero_stage, gradient_checkpointing=True))
        stepper.engine._recomputation.inputs.least_bytes = least_bytes
        reports = [stepper.step(number) for number in (1, 2)]
        collected.append(([(report["loss"], report["grad_norm"]) for report in reports], stepper.weights()))
    assert collected[0][0] == collected[1][0]
    assert same(collected[0][1], collected[1][1])


def watched(policy: Policy) -> list[StorageWeakRef]:
    """Return what will refer to the memory of each layer's input."""
    seen: list[StorageWeakRef] = []

    def note(layer: nn.Module, inputs: Sequence[Tensor]) -> None:
        seen.append(StorageWeakRef(inputs[0].untyped_storage()))

    for layer in recomputation.checkpointable(policy):
        layer.register_forward_pre_hook(note)
    return seen


@pytest.mark.parametrize(("least_bytes", "present"), [(NEVER, 6), (ALWAYS, 2)])
def test_only_the_inputs_that_are_being_copied_stay_on_the_device(least_bytes: float, present: int) -> None:
    passes = Passes(deep())
    seen = watched(passes.policy)
    logprobs = passes.forward(micro_batch(rows(0)), least_bytes)
    assert [not each.expired() for each in seen] == [False] * (6 - present) + [True] * present
    logprobs.sum().backward()
    del logprobs
    assert not passes.inputs._moving


def test_a_short_row_stays_on_the_device_beside_a_long_one() -> None:
    passes = Passes(deep())
    seen = watched(passes.policy)
    short, long = micro_batch(rows(0, ((3, (4,)),))), micro_batch(rows(0))
    least_bytes = 6 * 32 * 4 * (short.tokens + 1)  # layers × width × bytes × tokens
    for batch, present in ((short, 6), (long, 2)):
        seen.clear()
        logprobs = passes.forward(batch, least_bytes)
        assert sum(not each.expired() for each in seen) == present
        del logprobs


def test_a_pass_that_fails_midway_leaves_nothing_behind_for_the_next() -> None:
    passes = Passes(deep())
    batch, layers = micro_batch(rows(0)), recomputation.checkpointable(passes.policy)
    expected = passes.gradients(batch, NEVER)
    calls = list[int]()

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) in (4, 4 + 6 + 3):  # in the forward pass, and as the fourth layer from the end computes again
            raise torch.OutOfMemoryError("made up")

    hooks = [layer.register_forward_pre_hook(fail) for layer in layers]
    with pytest.raises(torch.OutOfMemoryError):
        passes.gradients(batch, ALWAYS)
    with pytest.raises(torch.OutOfMemoryError):
        passes.gradients(batch, ALWAYS)
    assert len(calls) == 13
    for each in hooks:
        each.remove()
    passes.inputs.begin()
    assert not passes.inputs._moving
    assert same(passes.gradients(batch, ALWAYS), expected)


def test_a_backward_pass_may_be_repeated() -> None:
    passes = Passes(deep())
    batch = micro_batch(rows(0))
    logprobs = passes.forward(batch, ALWAYS)
    weights = list(passes.policy.parameters())
    first, second = (torch.autograd.grad(logprobs.sum(), weights, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_inputs_stay_on_the_device_where_the_host_is_short_of_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    passes = Passes(deep())
    batch, seen = micro_batch(rows(0)), watched(passes.policy)
    answers = [1e9, 0.0, 1e9, 0.0, 0.0, 0.0]
    monkeypatch.setattr(memory_timeline, "host_bytes", lambda: (0.0, answers.pop(0)))
    with caplog.at_level(logging.WARNING):
        logprobs = passes.forward(batch, ALWAYS)
    assert [not each.expired() for each in seen] == [True] * 6  # of which the host has two that are being copied
    logprobs.sum().backward()
    assert [record.getMessage() for record in caplog.records] == ["inputs of layers stay on the GPU"]
    monkeypatch.undo()
    passes.policy.zero_grad()
    assert same(passes.gradients(batch, ALWAYS), passes.gradients(batch, NEVER))


@pytest.mark.parametrize(("ranks", "has_room"), [(1, True), (2, False)])
def test_a_tenth_of_the_hosts_memory_is_left_by_all_of_its_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: int, has_room: bool
) -> None:
    monkeypatch.setattr(offloading, "_CHUNK_BYTES", 1_500_000)
    monkeypatch.setattr(memory_timeline, "host_bytes", lambda: (80e6, 10e6))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert Passes(deep()).inputs._add(1) == has_room


def test_rows_of_all_lengths_use_the_same_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "_CHUNK_BYTES", 1000)
    passes = Passes(deep())
    for _ in range(2):
        for batch in batches():
            passes.gradients(batch, ALWAYS)
    longest = max(batch.tokens for batch in batches())
    assert len(passes.inputs._spare) == 6 * -(-longest * 32 * 4 // 1000)  # layers × chunks of an input


def test_an_input_that_is_changed_in_place_is_refused() -> None:
    passes = Passes(deep())
    first, *others = recomputation.checkpointable(passes.policy)
    kept = list[Tensor]()
    first.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    others[0].register_forward_pre_hook(lambda *_: kept[0].detach().add_(1))
    with pytest.raises(RuntimeError, match="changed in place"):
        passes.forward(micro_batch(rows(0)), ALWAYS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_gradients_are_equal_and_the_peak_is_lower_by_the_inputs() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    passes = Passes(deep(12), device)
    batch = micro_batch(rows(0, ((2000, (60_000,)),)))
    peaks, gradients = list[int](), list[dict[str, Any]]()
    for least_bytes in (NEVER, ALWAYS):
        torch.cuda.reset_peak_memory_stats()
        logprobs = passes.forward(batch, least_bytes)
        peaks.append(torch.cuda.memory_allocated())
        del logprobs
        gradients.append(passes.gradients(batch, least_bytes))
    assert same(*gradients)
    assert (peaks[0] - peaks[1]) / (batch.tokens * 32 * 4) == pytest.approx(12 - 2, abs=0.1)


def test_no_engine_on_a_cpu_offloads() -> None:
    engine = TrainingEngine(Policy(tiny.model(0).requires_grad_(True)).train(), settings(1), "cpu")
    assert engine._recomputation.inputs.least_bytes == NEVER
