"""The example that moves a TRL script to Penstock."""

import ast
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from examples.guess.make import NUMBERS, build_policy, build_tokenizer
from tests.support import forge
from tests.support.trackers import READERS

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "trl"
RUN = tomllib.loads((EXAMPLE / "run.toml").read_text())


def keywords(function: str, script: str = (EXAMPLE / "train.py").read_text()) -> dict[str, Any]:
    """Return the arguments of ``function`` in a TRL script; names stay names."""
    calls = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    call = next(call for call in calls if getattr(call.func, "id", "") == function)
    return {str(word.arg): _literal(word.value) for word in call.keywords}


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    return node.id if isinstance(node, ast.Name) else node.value if isinstance(node, ast.Constant) else None


def test_the_run_has_ten_settings_that_say_what_the_script_says() -> None:
    (scorer,) = RUN["reward"]["scorers"]
    trainer, config = keywords("GRPOTrainer"), keywords("GRPOConfig")
    assert {
        "run": {"steps": config["max_steps"]},
        "policy": {"model": trainer["model"]},
        "data": {"path": keywords("load_dataset")["data_files"]},
        "sampling": {"group_size": config["num_generations"], "max_new_tokens": config["max_completion_length"]},
        "algorithm": {"groups_per_step": config["per_device_train_batch_size"] // config["num_generations"]},
        "trainer": {"learning_rate": config["learning_rate"]},
        "reward": {"scorers": [scorer]},
    } == RUN
    assert scorer == {
        "kind": "trl",
        "functions": [f"rewards:{name}" for name in trainer["reward_funcs"]],
        "weights": config["reward_weights"],
    }
    lines = [line for line in (EXAMPLE / "run.toml").read_text().splitlines() if " = " in line and line[0] != "#"]
    assert len(lines) == 10


def test_the_page_shows_the_example() -> None:
    assert tomllib.loads(shown("toml")[0]) == RUN


def shown(language: str) -> list[str]:
    """The blocks of the page."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / "from-trl.md").read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_script_with_an_environment_becomes_a_run_of_eight_settings(tmp_path: Path) -> None:
    script, settings = shown("python")[1], tomllib.loads(shown("toml")[1])
    trainer, config = keywords("GRPOTrainer", script), keywords("GRPOConfig", script)
    assert {
        "run": {"steps": config["max_steps"]},
        "policy": {"model": trainer["model"]},
        "data": {"path": keywords("load_dataset", script)["data_files"]},
        "episodes": {
            "environment": f"examples.guess.guess:{trainer['environment_factory']}",
            "max_turns": config["max_tool_calling_iterations"] + 1,
        },
        "sampling": {"group_size": config["num_generations"]},
        "algorithm": {"groups_per_step": config["per_device_train_batch_size"] // config["num_generations"]},
        "reward": {"scorers": [{"kind": "environment"}]},
    } == settings
    tokenizer = build_tokenizer()
    build_policy(tokenizer).save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "?", "secret": {number}}}\n' for number in NUMBERS))
    (tmp_path / "run.toml").write_text(shown("toml")[1])
    flags = (
        *(f"--policy.model={tmp_path / 'policy'}", f"--data.path={tmp_path / 'train.jsonl'}", "--policy.dtype=float32"),
        *("--run.steps=2", "--run.id=trl", f"--run.folder={tmp_path}", "--run.device=cpu", "--run.threads=1"),
        *("--coordinator.sample_every_steps=1", "--bus.url=embedded", "--sampling.max_new_tokens=1"),
    )
    await forge.up([tmp_path / "run.toml", *flags], tmp_path / "up.txt")
    groups = [json.loads(line) for line in (tmp_path / "trl" / "rollouts.jsonl").read_text().splitlines()]
    assert len(groups) == 2
    rewards = [completion["reward"] for group in groups for completion in group["completions"]]
    assert set(rewards) <= {0.0, 1.0}
    assert len(rewards) == 16


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_run_trains_on_the_rewards_that_the_functions_give_and_a_tracker_shows_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    sinks = '--tracking.sinks=["tensorboard"]'
    flags = (
        sinks,
        "--run.steps=2",
        "--run.id=trl",
        f"--run.folder={tmp_path}",
        "--run.device=cpu",
        "--policy.dtype=float32",
    )
    await forge.up(["examples/trl/run.toml", *flags, "--coordinator.sample_every_steps=1"], tmp_path / "up.txt")
    groups = [json.loads(line) for line in (tmp_path / "trl" / "rollouts.jsonl").read_text().splitlines()]
    assert groups
    monkeypatch.syspath_prepend(EXAMPLE)
    import rewards

    for group in groups:
        texts = [completion["text"] for completion in group["completions"]]
        answers = [group["answer"]] * len(texts)
        right, length = rewards.right(texts, answers), rewards.length(texts, answers)
        expected = [value + 0.1 * (other or 0.0) for value, other in zip(right, length, strict=True)]
        assert [completion["reward"] for completion in group["completions"]] == pytest.approx(expected, abs=1e-6)
        shown = [completion["scores"]["trl.right"]["value"] for completion in group["completions"]]
        assert shown == right
    del sys.modules["rewards"]
    assert [step for step, _ in READERS["tensorboard"](tmp_path / "trl", "trl", "train/reward")] == [1, 2]
    steps = [json.loads(line) for line in (tmp_path / "trl" / "metrics.jsonl").read_text().splitlines()]
    for step in steps:
        parts = [step["scorer_mean_trl.right"], step["scorer_mean_trl.length"]]
        assert step["scorer_mean_trl"] == pytest.approx(parts[0] + 0.1 * parts[1], abs=0.02)  # some have no length
    logged = READERS["tensorboard"](tmp_path / "trl", "trl", "train/rewards/trl.right/mean")
    assert [value for _, value in logged] == pytest.approx([step["scorer_mean_trl.right"] for step in steps])
    assert "trl.right" in (tmp_path / "trl" / "report.html").read_text()
