"""Whole runs by a policy that calls: each client plays a group, and the example's script. Services, engine and trainer are real."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from transformers import Qwen2ForCausalLM

from examples.guess.make import NUMBERS, build_policy, build_tokenizer
from tests.support import forge
from tests.support.clients import CLIENTS

ROOT = Path(__file__).parents[2]
GROUP = 3
RUN = {
    "run": {"id": "clients", "steps": len(CLIENTS), "device": "cpu", "threads": 1},
    "bus": {"url": "embedded"},
    "policy": {"model": "policy", "dtype": "float32"},
    "data": {"path": "train.jsonl"},
    "episodes": {"agent": "tests.support.clients:play", "max_turns": 4},
    "sampling": {"group_size": GROUP, "max_new_tokens": 3},
    "algorithm": {"groups_per_step": 1, "max_lag": 0},
    "reward": {"scorers": [{"kind": "environment"}]},
    "coordinator": {"sample_every_steps": 1},
}


def write_calling_policy(folder: Path) -> None:
    """Write a policy that calls the tool with any number, then ends its turn, nearly always.

    Its hidden state begins with a constant, which the head reads as a preference for calls, and with whether the last token
    is one, after which it prefers the end.
    """
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = build_policy(tokenizer).config
    config.max_position_embeddings, config.tie_word_embeddings = 4096, False
    model = Qwen2ForCausalLM(config)
    calls = [token for token in tokenizer.get_vocab().values() if token >= len(tokenizer) - len(NUMBERS)]
    with torch.no_grad():
        embedded, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedded[:, :2] = torch.tensor([4.0, 0.0])
        embedded[calls, 1] = 4.0
        head[:, :2] = 0.0
        head[calls, :2] = torch.tensor([1.2, -2.0])
        head[tokenizer.eos_token_id, 1] = 3.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rows_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_every_client_trains_a_step(tmp_path: Path) -> None:
    write_calling_policy(tmp_path / "policy")
    rows = [{"prompt": "?", "answer": client, "client": client, "secret": 7} for client in CLIENTS]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(tomli_w.dumps(RUN))
    folders = {"run.folder": tmp_path, "policy.model": tmp_path / "policy", "data.path": tmp_path / "train.jsonl"}
    words = [f"--{name}={value}" for name, value in folders.items()]
    await forge.up([tmp_path / "run.toml", *words], tmp_path / "up.txt")
    groups = rows_of(tmp_path / "clients")
    assert sorted(group["answer"] for group in groups) == sorted(CLIENTS), "each group is trained by a step of its own"
    for group in groups:
        rewards = [completion["reward"] for completion in group["completions"]]
        assert len(rewards) == GROUP
        assert max(rewards) > 0, f"{group['answer']}: a call of the policy reached the tool"
    steps = [json.loads(line) for line in (tmp_path / "clients" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [*range(1, len(CLIENTS) + 1)]
    assert all(step["logprob_gap"] < 1e-3 for step in steps)  # float32 on both sides, other kernels


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_example_trains_what_a_script_asks_that_knows_of_no_training(tmp_path: Path) -> None:
    write_calling_policy(tmp_path / "policy")
    rows = [{"prompt": "?", "secret": number} for number in NUMBERS]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "run.folder": tmp_path, "run.id": "run", "run.steps": 2, "policy.model": tmp_path / "policy",
        "data.path": tmp_path / "train.jsonl", "sampling.group_size": 3, "algorithm.groups_per_step": 2,
        "coordinator.sample_every_steps": 1,
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in flags.items()]
    await forge.up([ROOT / "examples" / "agent" / "run.toml", *words], tmp_path / "up.txt")
    groups = rows_of(tmp_path / "run")
    assert len(groups) == 2
    completions = [each for group in groups for each in group["completions"]]
    assert {each["reward"] for each in completions} <= {0.0, 1.0}
    assert max(each["tokens"] for each in completions) >= 3, "a guess is a token: the script asked again after a hint"
