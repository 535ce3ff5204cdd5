"""Time of the trainer's self-test (``penstock.services.trainer.self_test.self_test``), and the policy's deviation from the
unmodified model.

    python -m benchmarks.self_test                                    # a toy on a CPU
    python -m benchmarks.self_test --device cuda --shape 7b           # one GPU

Uses a random Qwen2; the first of ``--rounds`` includes kernel compilation.
"""

import argparse
import json
import sys
from typing import Any

import torch

from benchmarks.shapes import SHAPES
from benchmarks.trainer_shapes import random_model
from penstock.services.trainer.model import warm_up
from penstock.services.trainer.model.engine import place
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.rank_group import start_ranks
from penstock.services.trainer.self_test import self_test
from penstock.shared.settings import Settings


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the result."""
    trainer = {"gradient_checkpointing": arguments.gradient_checkpointing}
    settings = Settings.model_validate({"run": {"device": arguments.device}, "trainer": trainer})
    start_ranks(arguments.device)
    with warm_up.beside(SHAPES[arguments.shape], settings.trainer.kernels, arguments.device):
        model = random_model(SHAPES[arguments.shape], settings, arguments.device)
    policy = Policy(model).train()
    place(policy, settings, arguments.device)
    results = [self_test.run(policy, "rows", seed) for seed in range(arguments.rounds)]
    return {
        "shape": arguments.shape,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "seconds": [round(result.seconds, 3) for result in results],
        "gap": [result.figures for result in results],
        "limit": results[-1].limit.gradient,
        "packing": results[-1].packing,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if arguments.device == "cuda" else None,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--gradient-checkpointing", choices=("auto", "true", "false"), default="auto")
    print(json.dumps(run(parser.parse_args())))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
