"""Laws of what is said before a run on GPUs starts: the runs that wait for eight GPUs fit on eight H200s."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import random_weights
from benchmarks.peers.work import PROMPT_TOKENS, long
from benchmarks.runs import fits, layouts, whole_run
from benchmarks.shapes import ALL_SHAPES
from penstock.services.plan.hardware import GIB, parse_cluster
from penstock.shared.settings import Settings, loads

H200S = ["--check", "8xH200,560GiB", "--disk-gib", "215"]
MIXTURE = "--shape 30b-a3b --gpus 8 --tensor-parallel 2 --trainer.zero_stage=1 --trainer.expert_parallel=4 --trainer.router_replay=true"
EIGHT = [(work, name) for work in ("eight-7b", "eight-30b-a3b") for name in layouts.WORKS[work]]


def checked(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["whole_run", *H200S, *words.split()])
    with pytest.raises(SystemExit):
        whole_run.main()
    answer: dict[str, Any] = json.loads(capsys.readouterr().err.splitlines()[-1])
    return answer


@pytest.mark.parametrize(
    ("words", "checkpoints"),
    [
        (MIXTURE, {"trainer.checkpoint_every_steps": 1_000_000}),
        ("--shape 70b --layers 36 --gpus 8 --tensor-parallel 4 --kills", {"trainer.checkpoint_every_steps": 1_000_000}),
        ("--ranks 2 --gpus 8 --turns 6 --kills --mean-tokens 128 --sampling.max_new_tokens=512", {}),
    ],
)
def test_the_runs_on_eight_gpus_fit_with_the_checkpoints_that_the_disk_holds(
    words: str, checkpoints: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = checked(words, monkeypatch, capsys)
    assert (answer["refused"], answer["over"]) == ("", [])
    assert answer["flags"].pop("rollout.vllm.gpu_memory_utilization") < 0.85  # a version has room beside it
    assert answer["flags"] == checkpoints


def test_states_that_fill_the_host_and_models_that_fill_the_disk_are_said_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offloaded = checked(f"{MIXTURE} --trainer.optimizer=adamw --trainer.offload=optimizer", monkeypatch, capsys)
    assert offloaded["over"] == ["what is offloaded in the host's memory needs 511.8 of 476.0 GiB"]
    small = checked(f"{MIXTURE} --disk-gib 60", monkeypatch, capsys)
    assert small["refused"].startswith("expected room for a model of 56.9 GiB, found 60.0 GiB free")


@pytest.mark.parametrize(("work", "name"), EIGHT)
def test_the_layouts_on_eight_gpus_fit(work: str, name: str, tmp_path: Path) -> None:
    machine = fits.Machine(parse_cluster("8xH200,560GiB"), 215 * GIB)
    row = layouts.checked(layouts.WORKS[work][name], name, tmp_path, machine)
    assert (row["refused"], row["over"]) == ("", [])


def settings_of(model: str) -> Settings:
    trainer = 'ranks = 2\nzero_stage = 3\noptimizer = "adamw_8bit"'
    text = f'[run]\ndevice = "cuda"\n[policy]\nmodel = "{model}"\n[trainer]\n{trainer}\n[rollout]\nengine = "vllm"\n'
    return loads(text, "test", environment={})


def test_as_many_checkpoints_are_kept_as_the_disk_holds(tmp_path: Path) -> None:
    settings = settings_of(long(tmp_path, "7b", "cuda", "auto", weights=False).model)
    work = fits.workload(settings, PROMPT_TOKENS, fits.geometric(100, 512))

    def flags(gib: float, *, made: bool = False) -> dict[str, object]:
        machine = fits.Machine(parse_cluster("4xH200,500GiB"), gib * GIB)
        return fits.lighter(settings, machine, fits.needs(settings, machine, work), made=made)

    assert flags(151) == flags(136, made=True) == {}  # a model of 14.2, 8 aside, three checkpoints of 42.6 GiB
    assert flags(149) == flags(108) == flags(66) == {"trainer.keep_last": 1}
    assert flags(64) == {"trainer.checkpoint_every_steps": 1_000_000}


def test_random_routers_send_tokens_to_all_experts_alike(tmp_path: Path) -> None:
    shape = ALL_SHAPES["tiny-mixture"]
    random_weights.write(tmp_path, shape, torch.float32, "cpu", mean_tokens=12, eos_token_id=0)
    weights = load_file(tmp_path / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    normed = embeddings / embeddings.square().mean(1, keepdim=True).sqrt()
    for layer in range(shape["num_hidden_layers"]):
        scores = normed @ weights[f"model.layers.{layer}.mlp.gate.weight"].T
        counts = torch.bincount(scores.topk(2).indices.flatten(), minlength=8).double()
        assert counts.max() < 1.5 * counts.mean()
