r"""Wall clock until a policy learns a task: Penstock asynchronous, synchronous (``max_lag = 0``), and TRL's trainers, in turn.

The task is to sort characters in ascending and then in descending order: ``4071=`` → ``01477410``. A random Qwen2 first
imitates a careless pupil, who exchanges the first two characters of the answer often if the first of the prompt is even,
else seldom, and the last two by the second of the prompt. So the policy can sort, but a quarter of its samples and of
its greedy answers are right, and rewards can teach it the rest. Then each system trains that policy with the same
rewards (1 for the exact answer), groups, learning rate and greedy evaluations, until an evaluation reaches
``--accuracy``, after ``--steps`` or after ``--limit-s``.

::

    tiny   1 million parameters sort 4 digits: 9 new tokens a sample
    100m   94 million parameters sort 48 of 62 letters and digits: 97 new tokens a sample

    python -m benchmarks.peers.learning_task                                          # tiny on a CPU, 100m on a GPU
    python -m benchmarks.peers.learning_task --folder /tmp/task --systems             # the policy alone
    python -m benchmarks.peers.learning_task --folder /tmp/task --systems async --rollout.engines_per_gpu=3
    python -m benchmarks.peers.learning_task --folder /tmp/task --systems trl
    python -m benchmarks.peers.learning_task --folder /tmp/task --systems sync        # prints all three

    call="python -m benchmarks.peers.learning_task --gpus 2 --folder /tmp/task --learning-rate 5e-6 --evaluate-every 2"
    $call --systems async --rollout.engines_per_gpu=6                    # two GPUs, with TRL's asynchronous trainer
    $call --systems trl_async

``--folder`` keeps the policy and each system's figures, so that each can have a call of its own. Other flags go to
``penstock up``. With ``--gpus 1`` trainer and replica use the same GPU at the same time (start the daemon of CUDA MPS
before; docs/placement.md). With ``--gpus 2`` the replica has the second one.

TRL is started by this module in a process of its own (``--python``: of another environment). With one GPU vLLM is in
that process (``vllm_mode = "colocate"``, without sleep mode, which a small model does not need), with two it has a
server on the second. As TRL documents for such work: float32 weights, its default, under bf16 autocast, as Penstock's
master weights are float32 too; the whole step in one batch per device (``--trl-micro-batch`` splits it); no
gradient checkpointing; fused AdamW; Liger's kernels where they are installed (``--no-liger``), as in Penstock. The
importance sampling correction for vLLM's logprobs keeps its default, which is on. vLLM generates in bf16 in both.

``trl_async``: its AsyncGRPOTrainer on two GPUs, as in ``benchmarks.peers.trl_async``, with float32 weights under bf16
autocast. It has no Liger kernels. A step has as many samples, in one batch, at most four weight updates old, its default.
It is measured from the end of the first evaluation, beside which it already generates.

Prints seconds from the time at which all processes are ready, or at the latest from the end of the first evaluation
(TRL: from its end), later evaluations included, and those with start-up.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import random
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch

from benchmarks.gpu_meter import only
from benchmarks.peers import trl_async
from benchmarks.peers.pipeline import end, heed_sigterm, logs_of, vllm_server
from benchmarks.runs.startup import ready_of
from examples.arithmetic.make import (
    IGNORED_LABEL,
    Problem,
    build_tokenizer,
    encode,
    greedy_accuracy,
    write_problems,
)

ROOT = Path(__file__).parents[2]
SYSTEMS = ("async", "sync", "trl", "trl_async")
HELD_OUT = 200
OFTEN = 0.7
"""Share of pairs that the careless pupil exchanges where the character of the prompt is even; elsewhere it is the rest."""
WARMUP_STEPS = 5
_ONE_GPU_SHARE = 0.2
"""Of one GPU's memory for vLLM, weights included, in both systems."""
_STOP_S = 60.0


@dataclass(frozen=True)
class Task:
    """A policy, what it sorts, and how it is trained."""

    sizes: Mapping[str, int]
    alphabet: str
    characters: int
    problems: int
    imitation_rows: int
    imitation_rate: float
    groups: int
    learning_rate: float

    @property
    def new_tokens(self) -> int:
        """Tokens of an answer and its end."""
        return 2 * self.characters + 1

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer, as a multiple of 32."""
        return -(-(self.characters + len("=") + self.new_tokens) // 32) * 32


TASKS: Mapping[str, Task] = {
    "tiny": Task(
        {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
        alphabet=string.digits, characters=4, problems=4000, imitation_rows=128, imitation_rate=2e-3,
        groups=32, learning_rate=3e-4,
    ),
    "100m": Task(
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 10, "num_attention_heads": 12},
        alphabet=string.digits + string.ascii_letters, characters=48, problems=20_000, imitation_rows=256,
        imitation_rate=6e-4, groups=64, learning_rate=2e-5,
    ),
}  # fmt: skip


def problems(task: Task, seed: int) -> list[Problem]:
    """Return distinct problems, the held-out ones first."""
    generator = random.Random(seed)
    asked: dict[str, None] = {}
    while len(asked) < HELD_OUT + task.problems:
        asked["".join(generator.sample(task.alphabet, k=task.characters))] = None
    return [Problem(f"{text}=", answer(text)) for text in asked]


def answer(text: str) -> str:
    """Return the characters in ascending and then in descending order.

    >>> answer("4071")
    '01477410'
    """
    ascending = sorted(text)
    return "".join(ascending + ascending[::-1])


def careless(tokens: torch.Tensor, prompt_tokens: int, draws: torch.Tensor) -> torch.Tensor:
    """Exchange the first two and the last two tokens of each answer if the draw is below the pupil's habit.

    >>> row = torch.tensor([[8, 7, 9, 4, 5, 6, 5, 4, 1]])  # a prompt of three tokens, the answer, the end
    >>> careless(row, 3, torch.tensor([[0.5], [0.5]])).tolist()  # 8 is even, 7 is odd
    [[8, 7, 9, 5, 4, 6, 5, 4, 1]]
    """
    told = tokens.clone()
    for asked, place in enumerate((prompt_tokens, tokens.shape[1] - 3)):
        pair = tokens[:, place : place + 2]
        habit = torch.where(tokens[:, asked] % 2 == 0, OFTEN, 1 - OFTEN)
        told[:, place : place + 2] = torch.where((draws[asked] < habit)[:, None], pair.flip(1), pair)
    return told


def prepare(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Write problems and the policy unless they are there; return its accuracies."""
    made = folder / "policy.json"
    if made.exists():
        kept: dict[str, Any] = json.loads(made.read_text())
        if kept["shape"] != arguments.shape:
            raise SystemExit(f"{folder} has a policy of shape {kept['shape']}: change --folder or --shape")
        return kept
    task = TASKS[arguments.shape]
    every = problems(task, seed=0)
    held_out, training = every[:HELD_OUT], every[HELD_OUT:]
    write_problems(folder / "train.jsonl", training)
    write_problems(folder / "heldout.jsonl", held_out)
    tokenizer = build_tokenizer(task.context)
    gpu = arguments.device == "cuda"
    torch.manual_seed(0)
    if not gpu:
        torch.set_num_threads(1)  # several wait for one another on a busy machine
    model = build_model(task, tokenizer).to(arguments.device)
    rows, held_out_rows = (encode(tokenizer, part) for part in (training, held_out))
    figures = imitate(model, task, rows, held_out_rows, arguments, folder / "imitation.pt")
    asked, answers = (tensor.to(model.device) for tensor in held_out_rows)
    figures = {"shape": arguments.shape, **figures, "greedy": round(greedy_accuracy(model, asked, answers), 4)}
    if gpu:
        model.to(torch.bfloat16)  # engines read the type from the files
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    made.write_text(json.dumps(figures))
    del model, asked, answers
    if gpu:
        torch.cuda.empty_cache()  # for the systems, which are other processes
    return figures


def build_model(task: Task, tokenizer: Any) -> Any:
    """Return a Qwen2 with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        **task.sizes, vocab_size=len(tokenizer), num_key_value_heads=task.sizes["num_attention_heads"],
        max_position_embeddings=task.context, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def imitate(
    model: Any, task: Task, training: Sequence[Any], held_out: Sequence[Any], arguments: argparse.Namespace, state: Path
) -> dict[str, float]:
    """Train on the careless pupil's answers until ``--start`` of sampled held-out answers are right.

    After ``--imitation-s`` the state is saved, with which the next call continues.
    """
    device = model.device
    (tokens, labels), (asked, answers) = ([part.to(device) for part in pair] for pair in (training, held_out))
    prompt_tokens, is_prompt = task.characters + len("="), labels[0] == IGNORED_LABEL
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda")
    step, sampled, spent_s = _continued(state, model, optimizer)
    torch.manual_seed(step)
    began_s = time.monotonic()
    while (seconds := time.monotonic() - began_s) < arguments.imitation_s:
        step += 1
        optimizer.param_groups[0]["lr"] = task.imitation_rate * min(step / 100, math.sqrt(100 / step))
        rows = torch.randint(len(tokens), (task.imitation_rows,), device=device)
        told = careless(tokens[rows], prompt_tokens, torch.rand(2, task.imitation_rows, device=device))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(told, labels=told.masked_fill(is_prompt, IGNORED_LABEL)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            sampled, seconds = sampled_accuracy(model, asked, answers), time.monotonic() - began_s
            progress = f"step {step}, {spent_s + seconds:.1f} s, loss {float(loss.detach()):.3f}, sampled {sampled:.3f}"
            print(f"imitation: {progress}", flush=True)
            if sampled >= arguments.start:
                return {"sampled": round(sampled, 4), "steps": step, "seconds": round(spent_s + seconds, 1)}
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": (step, sampled, spent_s + seconds),
    }
    torch.save(saved, state)
    raise SystemExit(
        f"after {spent_s + seconds:.0f} s and {step} steps {sampled:.3f} of sampled answers are right, fewer than "
        f"{arguments.start}: call again to continue, or change --start"
    )


def _continued(state: Path, model: Any, optimizer: torch.optim.Optimizer) -> tuple[int, float, float]:
    """Restore an earlier call's imitation, if there is one; return its steps, last accuracy and seconds."""
    if not state.exists():
        return 0, 0.0, 0.0
    saved = torch.load(state, map_location=model.device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step, sampled, spent_s = saved["progress"]
    return step, sampled, spent_s


@torch.no_grad()
def sampled_accuracy(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the mean probability of the right answer."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
        logits = model(tokens).logits[:, :-1]
    right = labels[:, 1:]
    logprobs = logits.float().log_softmax(-1)
    each = logprobs.gather(-1, right.clamp(min=0)[..., None])[..., 0].where(right >= 0, 0.0)
    return float(each.sum(-1).exp().mean())


def settings(folder: Path, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a Penstock run's settings."""
    gpu, task = arguments.device == "cuda", TASKS[arguments.shape]
    rollout: dict[str, Any] = {"replicas": 1, "max_groups": arguments.groups * (1 if name == "sync" else 2)}
    if gpu:
        rollout |= {"engine": "vllm", "gpus": [arguments.gpus - 1], "vllm": {"max_model_len": task.context}}
        rollout["vllm"] |= {"gpu_memory_utilization": _ONE_GPU_SHARE} if arguments.gpus == 1 else {}
    return {
        "run": {"id": name, "folder": str(folder), "steps": arguments.steps, "device": arguments.device, "threads": 0 if gpu else 1},
        "bus": {"url": "embedded"},
        "policy": {"model": str(folder / "policy"), "dtype": "bfloat16" if gpu else "float32"},
        "data": {"path": str(folder / "train.jsonl")},
        "evaluation": {"path": str(folder / "heldout.jsonl"), "every_steps": arguments.evaluate_every, "problems": HELD_OUT},
        "sampling": {"group_size": arguments.samples, "max_new_tokens": task.new_tokens, "temperature": 1.0},
        "rollout": rollout if gpu else {**rollout, "engine": "transformers"},
        "reward": {
            "expression": "answer",
            "scorers": [{"kind": "answer", "name": "answer", "mode": "exact", "extract": "whole", "needs_stop": True}],
        },
        "algorithm": {"groups_per_step": arguments.groups, "max_lag": 0 if name == "sync" else 1},
        "guards": {"pause": []},
        "trainer": {
            "learning_rate": arguments.learning_rate, "warmup_steps": WARMUP_STEPS, "zero_stage": 1,
            "checkpoint_every_steps": arguments.steps, **({"gpus": [0], "micro_batch_tokens": 32_768} if gpu else {}),
        },
    }  # fmt: skip


def run_penstock(folder: Path, arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Run until the accuracy is reached; return the figures."""
    config = folder / f"{name}.toml"
    config.write_text(tomli_w.dumps(settings(folder, name, arguments)))
    shutil.rmtree(folder / name, ignore_errors=True)
    command = [sys.executable, "-m", "penstock.services.cli", "up", str(config), *arguments.penstock]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    started_s = time.time()
    rows = watch(folder, name, command, environment, lambda: evaluations(folder / name), arguments)
    ready_s = max([rows[0]["started_at_s"], *(ready["at_s"] for ready in ready_of(folder / name).values())])
    return figures(rows, min(ready_s, rows[0]["at_s"]), started_s, arguments.accuracy)


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Return a run's evaluations, with their starts and ends as ``started_at_s`` and ``at_s``."""
    file = run / "evaluations.jsonl"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    rows = [json.loads(line) for line in whole.splitlines()]
    return [
        {
            **{key: row[key] for key in ("step", "accuracy", "started_at_s")},
            "at_s": row["started_at_s"] + row["seconds"],
        }
        for row in rows
    ]


def watch(
    folder: Path,
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    read: Callable[[], list[dict[str, Any]]],
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Run ``command`` until an evaluation reaches the accuracy; print evaluations as they come, and return them."""
    log, until_s, shown = folder / f"{name}.log", time.monotonic() + arguments.limit_s, 0
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        while True:
            ended = process.poll() is not None  # before the last look
            rows = read()
            for row in rows[shown:]:
                after_s = row["at_s"] - rows[0]["at_s"]
                print(f"{name}: step {row['step']}, accuracy {row['accuracy']:.3f}, {after_s:.2f} s", flush=True)
            shown = len(rows)
            if ended or time.monotonic() > until_s or _reached(rows, arguments.accuracy) is not None:
                break
            time.sleep(0.1)
    finally:
        stop(process)
    if not rows:
        raise SystemExit(f"{name} made no evaluation:\n{log.read_text()[-3000:]}\n{logs_of(folder / name)}")
    return rows


def stop(process: subprocess.Popen[Any]) -> None:
    """End a process and its group, at the latest after a minute and a half."""
    end(process, _STOP_S, _STOP_S / 2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _reached(rows: Sequence[Mapping[str, Any]], accuracy: float) -> Mapping[str, Any] | None:
    return next((row for row in rows if row["accuracy"] >= accuracy), None)


def figures(rows: Sequence[Mapping[str, Any]], trains_s: float, started_s: float, accuracy: float) -> dict[str, Any]:
    """Return seconds to ``accuracy`` (None: not reached), and the curve.

    >>> rows = [{"step": 0, "accuracy": 0.3, "at_s": 101.0}, {"step": 5, "accuracy": 0.9, "at_s": 104.0}]
    >>> figures(rows, trains_s=100.0, started_s=90.0, accuracy=0.9)["seconds_to_accuracy"]
    4.0
    >>> figures(rows, trains_s=100.0, started_s=90.0, accuracy=0.95)["seconds_to_accuracy"] is None
    True
    """
    reached = _reached(rows, accuracy)
    return {
        "seconds_to_accuracy": None if reached is None else round(reached["at_s"] - trains_s, 2),
        "seconds_with_start": None if reached is None else round(reached["at_s"] - started_s, 2),
        "steps": rows[-1]["step"] if reached is None else reached["step"],
        "curve": [[row["step"], round(row["at_s"] - trains_s, 2), row["accuracy"]] for row in rows],
    }


def ratios(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of ``async`` over those of the others that reached the accuracy.

    >>> ratios({name: {"seconds_to_accuracy": s, "seconds_with_start": 60 + s} for name, s in (("async", 6), ("trl", 20))})
    {'async_over_trl': 0.3, 'async_over_trl_with_start': 0.825}
    """
    figures = {"": "seconds_to_accuracy", "_with_start": "seconds_with_start"}
    return {
        f"async_over_{other}{suffix}": round(results["async"][figure] / results[other][figure], 3)
        for other in SYSTEMS[1:]
        for suffix, figure in figures.items()
        if all(results.get(name, {}).get(figure) is not None for name in ("async", other))
    }


def run_trl(folder: Path, arguments: argparse.Namespace, system: str) -> dict[str, Any]:
    """Run one of TRL's trainers in its own process; return the figures."""
    evaluated, task = folder / f"{system}-evaluations.json", TASKS[arguments.shape]
    if system == "trl_async" and arguments.gpus != 2:
        raise SystemExit(f"trl_async needs a GPU for vLLM's server: expected --gpus 2, found {arguments.gpus}")
    evaluated.unlink(missing_ok=True)
    command = [arguments.python, "-m", "benchmarks.peers.learning_task", *sys.argv[1:]]
    command += ["--inside", str(folder), "--systems", system]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    environment |= {"OMP_NUM_THREADS": "1"} if arguments.device == "cpu" else only(0)
    started_s = time.time()

    def rows() -> list[dict[str, Any]]:
        return list(json.loads(evaluated.read_text())) if evaluated.exists() else []

    with contextlib.ExitStack() as around:
        if arguments.gpus == 2:
            server = around.enter_context(vllm_server(folder, str(folder / "policy"), task.context))
            command += ["--vllm-url", server.url if system == "trl_async" else server.wait()]
        every = watch(folder, system, command, environment, rows, arguments)
    return figures(every, every[0]["at_s"], started_s, arguments.accuracy)


def inside_trl(folder: Path, arguments: argparse.Namespace) -> None:
    """Train with one of TRL's trainers; write the evaluations."""
    from transformers import AutoTokenizer, TrainerCallback

    (system,) = arguments.systems
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    asked, answers = encode(tokenizer, [Problem(**row) for row in _lines(folder / "heldout.jsonl")])
    rows: list[dict[str, float]] = []

    def evaluate(step: int, model: Any) -> float:
        with _usual_attention(model, system):
            accuracy = round(greedy_accuracy(model, asked.to(model.device), answers.to(model.device)), 4)
        rows.append({"step": step, "accuracy": accuracy, "at_s": time.time()})
        (folder / f"{system}-evaluations.tmp").write_text(json.dumps(rows))
        (folder / f"{system}-evaluations.tmp").replace(folder / f"{system}-evaluations.json")
        return accuracy

    class Evaluate(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, _args: Any, _state: Any, _control: Any, **more: Any) -> None:
            evaluate(0, more["model"])

        def on_step_end(self, _args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step % arguments.evaluate_every == 0:
                control.should_training_stop |= evaluate(state.global_step, more["model"]) >= arguments.accuracy

    trainer = (_asynchronous if system == "trl_async" else _synchronous)(folder, arguments)
    trainer.add_callback(Evaluate())  # the last one, after those that wait for the server and start the rollouts
    trainer.train()


def _lines(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _synchronous(folder: Path, arguments: argparse.Namespace) -> Any:
    """Return TRL's GRPOTrainer."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        model=str(folder / "policy"), reward_funcs=right, args=GRPOConfig(**trl_arguments(folder, arguments)),
        train_dataset=Dataset.from_list(_lines(folder / "train.jsonl")),
    )  # fmt: skip


def _asynchronous(folder: Path, arguments: argparse.Namespace) -> Any:
    """Return TRL's AsyncGRPOTrainer."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing

    packing._flash_attn = lambda: trl_async.Attention
    rows = _lines(folder / "train.jsonl")
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    return AsyncGRPOTrainer(
        model=str(folder / "policy"), reward_funcs=right, args=AsyncGRPOConfig(**async_arguments(folder, arguments)),
        train_dataset=Dataset.from_list(chats), processing_class=trl_async.tokenizer_of(str(folder / "policy")),
    )  # fmt: skip


def right(completions: list[Any], answer: list[str], **_: object) -> list[float]:
    """Return 1 for each completion, as text or as messages, that is the answer."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(text == expected) for text, expected in zip(texts, answer, strict=True)]


@contextlib.contextmanager
def _usual_attention(model: Any, system: str) -> Iterator[None]:
    """Let a model of the asynchronous trainer, whose attention knows packed rows alone, read padded ones."""
    if system != "trl_async":
        yield
        return
    packed = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(packed)


def trl_arguments(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of GRPOConfig."""
    gpu, task = arguments.device == "cuda", TASKS[arguments.shape]
    vllm: dict[str, Any] = {}
    if gpu and arguments.vllm_url:
        vllm = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": arguments.vllm_url}
    elif gpu:
        vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": _ONE_GPU_SHARE}
        vllm["vllm_max_model_length"] = task.context
    liger = gpu and arguments.liger and importlib.util.find_spec("liger_kernel") is not None
    return {
        **_common_arguments(folder, arguments), "beta": 0.0, "remove_unused_columns": False, "use_liger_kernel": liger,
        "model_init_kwargs": {"dtype": "float32"}, **vllm,
    }  # fmt: skip


def async_arguments(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of AsyncGRPOConfig."""
    samples = arguments.groups * arguments.samples
    return {
        **_common_arguments(folder, arguments), "vllm_server_base_url": arguments.vllm_url, "token_budget": 0,
        "max_inflight_tasks": trl_async.in_flight(samples), "queue_maxsize": samples,
    }  # fmt: skip


def _common_arguments(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    gpu, samples = arguments.device == "cuda", arguments.groups * arguments.samples
    micro_batch = arguments.trl_micro_batch or samples
    return {
        "output_dir": str(folder / "trl"), "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": samples // micro_batch, "num_generations": arguments.samples,
        "max_completion_length": TASKS[arguments.shape].new_tokens, "max_steps": arguments.steps, "save_strategy": "no",
        "report_to": [], "learning_rate": arguments.learning_rate, "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": WARMUP_STEPS, "temperature": 1.0, "bf16": gpu, "use_cpu": not gpu, "gradient_checkpointing": False,
    }  # fmt: skip


def parse() -> argparse.Namespace:
    """Return the arguments, with the shape's defaults; those of ``penstock up`` in ``penstock``."""
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpus else "cpu")
    parser.add_argument("--shape", choices=sorted(TASKS), help="default: 100m on GPUs, tiny on a CPU")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=min(2, max(1, gpus)))
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS[:3]))
    parser.add_argument("--start", type=float, default=0.2, help="share of right samples at which imitation ends")
    parser.add_argument("--accuracy", type=float, default=0.9, help="held-out accuracy to reach")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--evaluate-every", type=int, default=5)
    parser.add_argument("--groups", type=int, help="prompts a step; default: 64 with 100m, 32 with tiny")
    parser.add_argument("--samples", type=int, default=8, help="samples a prompt")
    parser.add_argument("--learning-rate", type=float, help="default: 2e-5 with 100m, 3e-4 with tiny")
    parser.add_argument("--imitation-s", type=float, default=300.0, help="seconds of the imitation")
    parser.add_argument("--limit-s", type=float, default=420.0, help="seconds of each system, start-up included")
    parser.add_argument("--folder", type=Path, help="keep the policy, the runs and the figures here")
    parser.add_argument("--trl-micro-batch", type=int, default=0, help="samples a forward pass of TRL; 0: the step's")
    parser.add_argument("--no-liger", dest="liger", action="store_false", help="TRL without Liger's kernels")
    parser.add_argument("--python", default=sys.executable, help="interpreter of an environment with trl")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--vllm-url", default="", help=argparse.SUPPRESS)
    arguments, arguments_of_up = parser.parse_known_args()
    arguments.penstock = arguments_of_up
    arguments.shape = arguments.shape or ("100m" if arguments.device == "cuda" else "tiny")
    arguments.groups = arguments.groups or TASKS[arguments.shape].groups
    arguments.learning_rate = arguments.learning_rate or TASKS[arguments.shape].learning_rate
    arguments.gpus = arguments.gpus if arguments.device == "cuda" else 0
    return arguments


def kept(folder: Path, work: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of earlier calls; refuse those of other work."""
    files = {name: folder / f"{name}-figures.json" for name in SYSTEMS}
    earlier = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    for name, row in earlier.items():
        if row["work"] != work:
            raise SystemExit(f"{files[name]} has figures of {row['work']}, not of {dict(work)}: change --folder")
    return earlier


def main() -> None:
    """Run the systems in turn, and print."""
    arguments = parse()
    if arguments.inside is not None:
        inside_trl(arguments.inside, arguments)
        return
    heed_sigterm()  # to end the runs
    named = ("shape", "device", "gpus", "accuracy", "evaluate_every", "groups", "samples", "learning_rate")
    work = {name: vars(arguments)[name] for name in named}
    with contextlib.ExitStack() as around:
        folder = arguments.folder or Path(
            around.enter_context(tempfile.TemporaryDirectory(prefix="penstock-learning-"))
        )
        folder = folder.absolute()  # the systems have other working directories
        folder.mkdir(parents=True, exist_ok=True)
        kept(folder, work)
        start = prepare(folder, arguments)
        print("start", json.dumps(start), flush=True)
        for system in arguments.systems:
            is_trl = system.startswith("trl")
            result = (run_trl if is_trl else run_penstock)(folder, arguments, system)
            of_trl = [f"--trl-micro-batch={arguments.trl_micro_batch}", *([] if arguments.liger else ["--no-liger"])]
            result |= {"work": work, "flags": of_trl if is_trl else arguments.penstock}
            (folder / f"{system}-figures.json").write_text(json.dumps(result))
            print(system, json.dumps(result), flush=True)
        results = kept(folder, work)
    systems = {name: {key: value for key, value in row.items() if key != "work"} for name, row in results.items()}
    hardware = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{os.cpu_count()} cores"
    said = {"benchmark": "learning task", **work, "hardware": hardware, "start": start}
    print(json.dumps({**said, **systems, **ratios(results)}))


if __name__ == "__main__":
    main()
