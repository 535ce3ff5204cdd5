"""Laws of the benchmark's task and figures."""

import argparse
import dataclasses
import doctest
import json
from pathlib import Path

import pytest
import torch

from benchmarks.peers import learning_task
from benchmarks.peers.learning_task import (
    HELD_OUT,
    OFTEN,
    TASKS,
    async_arguments,
    careless,
    kept,
    problems,
    right,
    run_trl,
    settings,
    trl_arguments,
)
from examples.arithmetic.make import build_tokenizer, encode
from penstock.shared.settings.root import Settings


def test_the_examples_in_its_docstrings_hold() -> None:
    results = doctest.testmod(learning_task)
    assert results.attempted >= 4
    assert results.failed == 0


@pytest.mark.parametrize("shape", TASKS)
def test_problems_are_distinct_and_fit_the_context(shape: str) -> None:
    task = TASKS[shape]
    few = problems(task, seed=0)[: HELD_OUT + 50]
    assert len({problem.prompt for problem in few}) == len(few)
    tokens, labels = encode(build_tokenizer(task.context), few)
    assert (labels >= 0).sum(-1).unique().tolist() == [task.new_tokens]
    assert tokens.shape[1] == task.characters + 1 + task.new_tokens <= task.context


def test_the_pupil_errs_in_two_places_only_and_is_right_a_quarter_of_the_time() -> None:
    task = TASKS["100m"]
    tokens, _ = encode(build_tokenizer(task.context), problems(task, seed=0)[:2000])
    draws = torch.rand(2, len(tokens), generator=torch.Generator().manual_seed(0))
    told = careless(tokens, task.characters + 1, draws)
    places = (told != tokens).any(0).nonzero()[:, 0].tolist()
    first, last = task.characters + 1, tokens.shape[1] - 3
    assert places == [first, first + 1, last, last + 1]
    right = float((told == tokens).all(-1).float().mean())
    assert right == pytest.approx(0.25, abs=0.05)  # five deviations of 2000 draws
    usual = careless(tokens, task.characters + 1, torch.full_like(draws, 0.5))
    assert 1 - OFTEN < 0.5 < OFTEN
    assert float((usual == tokens).all(-1).float().mean()) == pytest.approx(0.25, abs=0.05)


def _arguments(**changes: object) -> argparse.Namespace:
    flags = {
        "shape": "100m",
        "device": "cuda",
        "gpus": 1,
        "steps": 100,
        "evaluate_every": 5,
        "groups": 64,
        "samples": 8,
    }
    more = {"learning_rate": 3e-5, "trl_micro_batch": 0, "liger": False, "vllm_url": ""}
    return argparse.Namespace(**{**flags, **more, **changes})


@pytest.mark.parametrize(("gpus", "replica"), [(1, 0), (2, 1)])
def test_trainer_and_replica_share_a_gpu_only_if_there_is_one(tmp_path: Path, gpus: int, replica: int) -> None:
    told = Settings.model_validate(settings(tmp_path, "async", _arguments(gpus=gpus)))
    assert (told.trainer.gpus, told.rollout.gpus) == ((0,), (replica,))
    assert (told.rollout.vllm.gpu_memory_utilization <= 0.4) == (gpus == 1)
    assert Settings.model_validate(settings(tmp_path, "sync", _arguments(gpus=gpus))).algorithm.max_lag == 0


def test_trl_trains_a_step_of_the_same_samples_in_batches_as_asked(tmp_path: Path) -> None:
    whole, split = (trl_arguments(tmp_path, _arguments(trl_micro_batch=batch)) for batch in (0, 128))
    assert (whole["per_device_train_batch_size"], whole["gradient_accumulation_steps"]) == (512, 1)
    assert (split["per_device_train_batch_size"], split["gradient_accumulation_steps"]) == (128, 4)
    assert whole["vllm_mode"] == "colocate"
    served = trl_arguments(tmp_path, _arguments(vllm_url="http://127.0.0.1:1"))
    assert served["vllm_mode"] == "server"
    assert "use_vllm" not in trl_arguments(tmp_path, _arguments(device="cpu", shape="tiny"))


def test_trls_asynchronous_trainer_trains_a_step_of_the_same_samples(tmp_path: Path) -> None:
    config = pytest.importorskip("trl.experimental.async_grpo.async_grpo_config").AsyncGRPOConfig
    told = async_arguments(tmp_path, _arguments(gpus=2, vllm_url="http://127.0.0.1:1"))
    assert (told["per_device_train_batch_size"], told["gradient_accumulation_steps"], told["token_budget"]) == (
        512,
        1,
        0,
    )
    assert {*told} <= {field.name for field in dataclasses.fields(config)}


def test_trls_asynchronous_trainer_is_refused_on_one_gpu(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected --gpus 2, found 1"):
        run_trl(tmp_path, _arguments(gpus=1), "trl_async")


def test_a_right_answer_is_one_in_both_of_trls_trainers() -> None:
    assert right(["ab", "a"], answer=["ab", "ab"]) == [1.0, 0.0]
    messages = [[{"role": "assistant", "content": text}] for text in ("ab", "a")]
    assert right(messages, answer=["ab", "ab"]) == [1.0, 0.0]


def test_figures_of_other_work_are_refused(tmp_path: Path) -> None:
    (tmp_path / "trl-figures.json").write_text(json.dumps({"work": {"groups": 32}}))
    assert list(kept(tmp_path, {"groups": 32})) == ["trl"]
    with pytest.raises(SystemExit, match="change --folder"):
        kept(tmp_path, {"groups": 64})
