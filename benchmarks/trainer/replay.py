"""Whether a replay repeats a step bit by bit, and its cost.

    python -m benchmarks.trainer.replay                                       # a toy on a CPU
    python -m benchmarks.trainer.replay --device cuda --shape 0.5b            # run.deterministic = "steps", off and on

Repeats the same steps from the same weights in separate processes: packed groups, ``--lora`` with dropout, and with
``--short-of-memory`` a first run whose second forward pass is out of memory. Prints whether all weights are
bit-identical, the largest difference, and a step's median seconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.shapes import SHAPES
from benchmarks.trainer.models import random_model
from penstock.services.trainer.algorithm.update import Learner
from penstock.services.trainer.model import adapter
from penstock.services.trainer.model.engine import TrainingEngine, make_deterministic
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.phases import Phases
from penstock.services.trainer.rank_group import start_ranks
from penstock.shared.bus.messages import (
    Experience,
    FinishReason,
    GroupId,
    PolicyVersion,
    Prompt,
    RolloutGroup,
    Sample,
    Sampling,
    StepPlan,
)
from penstock.shared.process.service import leave
from penstock.shared.settings import Settings

STEPS, TIMES = 3, 3
_RUN_S = 900


def settings(arguments: argparse.Namespace) -> Settings:
    """Return the trainer's settings."""
    trainer = {"zero_stage": 1, "learning_rate": 1e-4, "micro_batch_tokens": arguments.cap}
    dtype = "bfloat16" if arguments.device == "cuda" else "float32"
    lora = {"rank": 16, "dropout": 0.1} if arguments.lora else {}
    return Settings.model_validate(
        {"run": {"device": arguments.device}, "policy": {"dtype": dtype, "lora": lora}, "trainer": trainer}
    )


def batch(arguments: argparse.Namespace, vocabulary: int) -> list[Experience]:
    """Return random groups of eight samples, with rewards 0 and 1."""
    generator = np.random.default_rng(0)
    return [_group(generator, number, arguments, vocabulary) for number in range(arguments.groups)]


def _group(generator: np.random.Generator, number: int, arguments: argparse.Namespace, vocabulary: int) -> Experience:
    def ids(most: int) -> Any:
        return generator.integers(2, vocabulary, int(generator.integers(most // 2, most))).astype(np.int32)

    samples = tuple(_sample(ids(arguments.completion)) for _ in range(8))
    prompt = Prompt(GroupId(number), "random:1", Sampling(8, arguments.completion, 1.0))
    group = RolloutGroup(prompt, ids(arguments.prompt), samples, "random", 0.0, 0.0)
    return Experience(group, generator.integers(0, 2, 8).astype(np.float32), (), 0.0, 0.0)


def _sample(token_ids: Any) -> Sample:
    logprobs = np.full(len(token_ids), -float(np.log(token_ids.max())), dtype=np.float32)
    return Sample(token_ids, logprobs, np.array([[0, PolicyVersion(0)]], dtype=np.int32), FinishReason.STOP, "")


def repeat(arguments: argparse.Namespace) -> dict[str, Any]:
    """Repeat the steps; return the comparison."""
    of = settings(arguments)
    if arguments.deterministic:
        make_deterministic(arguments.device)
    if arguments.device == "cpu":
        torch.set_num_threads(1)  # several wait for one another on a busy machine
    start_ranks(arguments.device)
    weights, seconds = [], []
    plans: list[StepPlan | None] = [None] * STEPS
    for number in range(TIMES):
        torch.manual_seed(0)
        model = adapter.add(random_model(SHAPES[arguments.shape], of, arguments.device), of.policy)
        policy = Policy(model, chunk_tokens=of.internal.logits_chunk_tokens).train()
        engine = TrainingEngine(policy, of, arguments.device)
        learner = Learner(engine, of, Phases(engine.device))
        if arguments.short_of_memory and not number:
            _fail_second_pass(policy)
        data = batch(arguments, engine.vocabulary)
        for step in range(STEPS):
            started_s = time.perf_counter()
            learner.learn(data, {PolicyVersion(0): 1}, step + 1, repeated=plans[step])
            plans[step] = learner.plan
            if engine.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started_s)
        weights.append({name: tensor.detach().cpu().clone() for name, tensor in engine.tensors()})
        del model, policy, engine, learner
    misfits = sum(len(plan.misfits) for plan in plans if plan is not None)
    return {**_compare(weights), "seconds": statistics.median(seconds[1:]), "misfits": misfits}


def _fail_second_pass(policy: Any) -> None:
    forward, calls = policy.forward, iter(range(1 << 30))

    def short(batch: Any) -> Any:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("as a device says it")
        return forward(batch)

    policy.forward = short


def _compare(weights: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    first, *others = weights
    differences = [float((first[name] - weights[name]).abs().max()) for weights in others for name in first]
    equal = all(torch.equal(first[name], weights[name]) for weights in others for name in first)
    return {"equal": equal, "largest_difference": max(differences)}


def _apart(*, deterministic: bool) -> dict[str, Any]:
    """In a separate process: torch's mode is process-wide."""
    flags = ["--one", *(["--deterministic"] if deterministic else [])]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.trainer.replay", *sys.argv[1:], *flags, "--answer", str(answer)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=_RUN_S)
        result: dict[str, Any] = json.loads(answer.read_text())
    return result


def main() -> None:
    """Compare both modes, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=60)
    parser.add_argument("--completion", type=int, default=40)
    parser.add_argument("--cap", type=int, default=256)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--short-of-memory", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deterministic", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        warnings.simplefilter("ignore")
        try:
            arguments.answer.write_text(json.dumps(repeat(arguments)))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        leave(0)  # without waiting for threads and worker processes of libraries
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    off, on = _apart(deterministic=False), _apart(deterministic=True)
    shown = {name: vars(arguments)[name] for name in ("shape", "device", "groups", "lora", "short_of_memory")}
    print(json.dumps({"off": off, "on": on, "time_ratio": on["seconds"] / off["seconds"], **shown}))


if __name__ == "__main__":
    main()
