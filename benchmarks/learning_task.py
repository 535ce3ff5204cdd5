r"""Wall clock until a policy learns a task: Penstock asynchronous, synchronous (``max_lag = 0``), and TRL, in turn.

The task is to sort digits: ``4071=`` → ``0147``. A random Qwen2 first imitates a careless pupil, who writes the first
two digits in the wrong order half of the time, and likewise the last two. So it writes most right answers sometimes and
few of them mostly, and rewards can teach it; a policy that is stopped early while it learns to sort cannot be taught
so. Then each system trains that policy with the same rewards (1 for the exact answer), groups, learning rate and greedy
evaluations, until an evaluation reaches ``--accuracy``, after ``--steps`` or after ``--limit-s``.

    python -m benchmarks.learning_task                                                    # a toy on a CPU
    python -m benchmarks.learning_task --shape 100m --device cuda --learning-rate 3e-5    # two GPUs; not run yet
    python -m benchmarks.learning_task --shape 100m --device cuda --folder /tmp/task --systems async
    python -m benchmarks.learning_task --shape 100m --device cuda --folder /tmp/task --systems trl

``--folder`` keeps the policy, so that each system can have a call of its own. TRL is started by this module in a
process of its own (``--python``: of another environment); on GPUs beside vLLM's server, as in ``benchmarks.pipeline``.
Prints seconds from the start of training, evaluations included, and those with start-up.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
import torch

from benchmarks.pipeline import vllm_server
from examples.arithmetic.make import Problem, build_tokenizer, encode, greedy_accuracy, write_problems

ROOT = Path(__file__).parent.parent
SHAPES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    "100m": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 10, "num_attention_heads": 12},
    "400m": {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 16, "num_attention_heads": 20},
}
DIGITS = {"tiny": 4, "100m": 12, "400m": 16}
HELD_OUT, TRAINING = 200, 4000
CARELESS = 0.5
WAYS = 4
WARMUP_STEPS = 5
_CONTEXT = 64


def problems(digits: int, count: int, seed: int) -> list[Problem]:
    """Return distinct problems."""
    generator = random.Random(seed)
    asked: dict[str, None] = {}
    while len(asked) < count:
        asked["".join(generator.choices("0123456789", k=digits))] = None
    return [Problem(f"{text}=", "".join(sorted(text))) for text in asked]


def careless(problem: Problem, way: int) -> Problem:
    """Return the problem with the first digits exchanged if ``way & 1``, the last if ``way & 2``.

    >>> careless(Problem("4071=", "0147"), 3).answer
    '1074'
    """
    digits = list(problem.answer)
    if way & 1:
        digits[:2] = digits[1::-1]
    if way & 2:
        digits[-2:] = digits[:-3:-1]
    return Problem(problem.prompt, "".join(digits))


def prepare(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Write problems and the policy unless they are there; return its accuracies."""
    made = folder / "policy.json"
    if made.exists():
        kept: dict[str, float] = json.loads(made.read_text())
        return kept
    every = problems(DIGITS[arguments.shape], TRAINING + HELD_OUT, seed=0)
    held_out, training = every[:HELD_OUT], every[HELD_OUT:]
    write_problems(folder / "train.jsonl", training)
    write_problems(folder / "heldout.jsonl", held_out)
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = build_tokenizer()
    sizes = dict(SHAPES[arguments.shape])
    torch.manual_seed(0)
    if arguments.device == "cpu":
        torch.set_num_threads(1)  # several wait for one another on a busy machine
    config = Qwen2Config(
        **sizes, vocab_size=len(tokenizer), num_key_value_heads=sizes["num_attention_heads"], max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(arguments.device)
    ways = [encode(tokenizer, [careless(problem, way) for problem in training]) for way in range(WAYS)]
    figures = imitate(model, ways, encode(tokenizer, held_out), arguments.start, arguments.limit_s)
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    made.write_text(json.dumps(figures))
    return figures


def imitate(
    model: Any, ways: Sequence[tuple[Any, Any]], held_out: Sequence[Any], start: float, limit_s: float
) -> dict[str, float]:
    """Train on the careless pupil's answers until ``start`` of sampled held-out answers are right."""
    tokens, labels = (torch.stack([way[part] for way in ways]).to(model.device) for part in (0, 1))
    asked, answers = (tensor.to(model.device) for tensor in held_out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if model.config.hidden_size < 512 else 3e-4)
    began_s, step, sampled = time.monotonic(), 0, 0.0
    while time.monotonic() - began_s < limit_s:
        step += 1
        rows = torch.randint(tokens.shape[1], (128,), device=model.device)
        exchanged = torch.rand(2, 128, device=model.device) < CARELESS
        way = exchanged[0] + 2 * exchanged[1]
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            loss = model(tokens[way, rows], labels=labels[way, rows]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 and (sampled := sampled_accuracy(model, asked, answers)) >= start:
            seconds = time.monotonic() - began_s
            return {
                "greedy": round(greedy_accuracy(model, asked, answers), 4), "sampled": round(sampled, 4),
                "steps": step, "seconds": round(seconds, 1),
            }  # fmt: skip
    raise SystemExit(
        f"expected {start} of sampled answers to be right after {limit_s:.0f} s, found {sampled:.3f} in {step} steps: "
        "change --start or --limit-s"
    )


@torch.no_grad()
def sampled_accuracy(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the mean probability of the right answer."""
    logprobs = model(tokens).logits[:, :-1].float().log_softmax(-1)
    right = labels[:, 1:]
    each = logprobs.gather(-1, right.clamp(min=0)[..., None])[..., 0].where(right >= 0, 0.0)
    return float(each.sum(-1).exp().mean())


def settings(folder: Path, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a Penstock run's settings."""
    gpu = arguments.device == "cuda"
    return {
        "run": {"id": name, "folder": str(folder), "steps": arguments.steps, "device": arguments.device, "threads": 0 if gpu else 1},
        "bus": {"url": "embedded"},
        "policy": {"model": str(folder / "policy"), "dtype": "bfloat16" if gpu else "float32"},
        "data": {"path": str(folder / "train.jsonl")},
        "evaluation": {"path": str(folder / "heldout.jsonl"), "every_steps": arguments.evaluate_every, "problems": HELD_OUT},
        "sampling": {"group_size": arguments.samples, "max_new_tokens": new_tokens(arguments.shape), "temperature": 1.0},
        "rollout": {"replicas": 1, **({"gpus": [1], "vllm": {"max_model_len": _CONTEXT}} if gpu else {"engine": "transformers"})},
        "reward": {
            "expression": "answer",
            "scorers": [{"kind": "answer", "name": "answer", "mode": "exact", "extract": "whole", "needs_stop": True}],
        },
        "algorithm": {"groups_per_step": arguments.groups, "max_lag": 0 if name == "sync" else 1},
        "guards": {"pause": []},
        "trainer": {
            "learning_rate": arguments.learning_rate, "warmup_steps": WARMUP_STEPS, "zero_stage": 1,
            "checkpoint_every_steps": arguments.steps, **({"gpus": [0]} if gpu else {}),
        },
    }  # fmt: skip


def new_tokens(shape: str) -> int:
    """Return the tokens of an answer and its end."""
    return DIGITS[shape] + 1


def run_penstock(folder: Path, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run until the accuracy is reached; return the figures."""
    config = folder / f"{name}.toml"
    config.write_text(tomli_w.dumps(settings(folder, name, arguments)))
    shutil.rmtree(folder / name, ignore_errors=True)
    started_s = time.time()
    with (folder / f"{name}.log").open("w") as log:
        up = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "up", str(config)], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"}, start_new_session=True,
        )  # fmt: skip
        try:
            while up.poll() is None and time.time() - started_s < arguments.limit_s:
                if _reached(evaluations(folder / name), arguments.accuracy) is not None:
                    break
                time.sleep(0.1)
        finally:
            up.terminate()
            up.wait()
    rows = evaluations(folder / name)
    if not rows:
        raise SystemExit(f"{name} made no evaluation:\n{(folder / f'{name}.log').read_text()[-3000:]}")
    return figures(rows, rows[0]["at_s"], started_s, arguments.accuracy)


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Return a run's evaluations, with their ends as ``at_s``."""
    file = run / "evaluations.jsonl"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    rows = [json.loads(line) for line in whole.splitlines()]
    return [
        {"step": row["step"], "accuracy": row["accuracy"], "at_s": row["started_at_s"] + row["seconds"]} for row in rows
    ]


def _reached(rows: Sequence[Mapping[str, Any]], accuracy: float) -> Mapping[str, Any] | None:
    return next((row for row in rows if row["accuracy"] >= accuracy), None)


def figures(rows: Sequence[Mapping[str, Any]], trains_s: float, started_s: float, accuracy: float) -> dict[str, Any]:
    """Return seconds to ``accuracy`` (None: not reached), and the curve."""
    reached = _reached(rows, accuracy)
    return {
        "seconds_to_accuracy": None if reached is None else round(reached["at_s"] - trains_s, 2),
        "seconds_with_start": None if reached is None else round(reached["at_s"] - started_s, 2),
        "steps": rows[-1]["step"] if reached is None else reached["step"],
        "curve": [[row["step"], round(row["at_s"] - trains_s, 2), row["accuracy"]] for row in rows],
    }


def run_trl(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run TRL in its own process; return the figures."""
    started_s = time.time()
    answer = folder / "trl.json"
    answer.unlink(missing_ok=True)
    flags = [word for word in sys.argv[1:] if word != "--inside"]
    command = [arguments.python, "-m", "benchmarks.learning_task", *flags, "--inside", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "0"}
    environment |= {"OMP_NUM_THREADS": "1"} if arguments.device == "cpu" else {}
    with contextlib.ExitStack() as around:
        if arguments.device == "cuda":
            command += ["--vllm-url", around.enter_context(vllm_server(folder, str(folder / "policy"), _CONTEXT))]
        left_s = max(1.0, arguments.limit_s - (time.time() - started_s))
        with (folder / "trl.log").open("w") as log, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=left_s, check=False)
    if not answer.exists():
        raise SystemExit(f"TRL made no evaluation:\n{(folder / 'trl.log').read_text()[-3000:]}")
    rows = json.loads(answer.read_text())
    return figures(rows, rows[0]["at_s"], started_s, arguments.accuracy)


def inside_trl(folder: Path, arguments: argparse.Namespace) -> None:
    """Train with GRPOTrainer; write the evaluations."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    def lines(name: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in (folder / name).read_text().splitlines()]

    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    asked, answers = encode(build_tokenizer(), [Problem(**row) for row in lines("heldout.jsonl")])
    rows: list[dict[str, float]] = []

    def evaluate(step: int, model: Any) -> float:
        accuracy = greedy_accuracy(model, asked.to(model.device), answers.to(model.device))
        rows.append({"step": step, "accuracy": accuracy, "at_s": time.time()})
        (folder / "trl.json").write_text(json.dumps(rows))
        return accuracy

    class Evaluate(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, _args: Any, _state: Any, _control: Any, **more: Any) -> None:
            evaluate(0, more["model"])

        def on_step_end(self, _args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step % arguments.evaluate_every == 0:
                control.should_training_stop |= evaluate(state.global_step, more["model"]) >= arguments.accuracy

    def right(completions: list[str], answer: list[str], **_: object) -> list[float]:
        return [float(text == expected) for text, expected in zip(completions, answer, strict=True)]

    gpu = arguments.device == "cuda"
    config = GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=arguments.groups * arguments.samples,
        num_generations=arguments.samples, max_completion_length=new_tokens(arguments.shape), max_steps=arguments.steps,
        save_strategy="no", report_to=[], beta=0.0, learning_rate=arguments.learning_rate, lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARMUP_STEPS, temperature=1.0, bf16=gpu, use_cpu=not gpu, remove_unused_columns=False, gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        **({"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": arguments.vllm_url} if gpu else {}),
    )  # fmt: skip
    GRPOTrainer(
        model=str(folder / "policy"), reward_funcs=right, args=config, train_dataset=Dataset.from_list(lines("train.jsonl")),
        processing_class=tokenizer, callbacks=[Evaluate()],
    ).train()  # fmt: skip


def main() -> None:
    """Run the systems in turn, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--systems", nargs="+", choices=("async", "sync", "trl"), default=["async", "sync", "trl"])
    parser.add_argument("--start", type=float, default=0.25, help="share of right samples at which imitation ends")
    parser.add_argument("--accuracy", type=float, default=0.9, help="held-out accuracy to reach")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--evaluate-every", type=int, default=5)
    parser.add_argument("--groups", type=int, default=32, help="prompts a step")
    parser.add_argument("--samples", type=int, default=8, help="samples a prompt")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of a larger shape: 3e-5")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds of the imitation, and of each system")
    parser.add_argument("--folder", type=Path, help="keep the policy and the runs here")
    parser.add_argument("--python", default=sys.executable, help="interpreter of an environment with trl")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--vllm-url", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        inside_trl(arguments.inside, arguments)
        return
    with contextlib.ExitStack() as around:
        folder = arguments.folder or Path(
            around.enter_context(tempfile.TemporaryDirectory(prefix="penstock-learning-"))
        )
        folder.mkdir(parents=True, exist_ok=True)
        results: dict[str, Any] = {"start": prepare(folder, arguments)}
        print("start", json.dumps(results["start"]), flush=True)
        for system in arguments.systems:
            results[system] = run_trl(folder, arguments) if system == "trl" else run_penstock(folder, system, arguments)
            print(system, json.dumps(results[system]), flush=True)
    shown = {name: vars(arguments)[name] for name in ("shape", "device", "accuracy", "steps", "groups", "samples")}
    print(json.dumps({"benchmark": "learning task", **shown, "cores": os.cpu_count(), **results}))


if __name__ == "__main__":
    main()
