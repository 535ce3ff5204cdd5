"""Random trees of episodes beside their branches, in every model configuration of the tests, in float64.

    python -m benchmarks.trainer.every_tree --rounds 6

A round has, per configuration, two micro-batches of three trees. Compared are logprobs of sampled tokens and gradients of
all parameters with transformers' unmodified model, branch by branch. Fails where a packed configuration is over ``MOST``; of the others, xlstm has parts in float32.
"""

import argparse
import json
import sys
import time
import warnings

import torch

from tests.support import model_page, trees

MOST = 1e-12
"""Nats, and of the gradient's norm."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("names", nargs="*", help="configurations; none: all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    verdicts, started_s = model_page.verdicts(), time.process_time()
    shapes = [
        (2 * n + seed, prompt, opening) for n in range(arguments.rounds) for seed, prompt, opening in trees.SHAPES
    ]
    worst: dict[str, tuple[float, float]] = {}
    for name in arguments.names or sorted([*verdicts.rows, *verdicts.sequences]):
        gaps = trees.compare(name, "rows" if name in verdicts.rows else "sequences", shapes)
        worst[name] = (max(gap.logprob_nats for gap in gaps), max(gap.gradient for gap in gaps))
        print(name, *(f"{figure:.1e}" for figure in worst[name]), flush=True)
    figures = {
        "benchmark": "every_tree",
        "configurations": len(worst),
        "packed": len(worst.keys() & set(verdicts.rows)),
        "trees": 3 * len(shapes) * len(worst),
        "logprob_nats": max(nats for nats, _ in worst.values()),
        "gradient": max(gradient for _, gradient in worst.values()),
        "over": {name: pair for name, pair in worst.items() if not max(pair) <= MOST},
        "processor_s": time.process_time() - started_s,
    }
    print(json.dumps(figures))
    sys.exit(any(name in verdicts.rows for name, pair in worst.items() if not max(pair) <= MOST))


if __name__ == "__main__":
    main()
