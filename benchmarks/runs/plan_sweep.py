"""The plan's choice beside the best of all its layouts, simulated.

    python -m benchmarks.runs.plan_sweep                      # 4 GPUs, several models and workloads; no GPU is needed
    python -m benchmarks.runs.plan_sweep --gpus 4xH100 --models 7b

The plan simulates the sixteen layouts that its estimate prefers; the sweep simulates every placement, split of the GPUs,
ZeRO stage, transport, tensor parallelism and number of engines that fits. 8-bit Adam and offloading are in both only
where nothing else fits. ``ratio`` is the step of the choice over the step of the best. Prints one JSON object; the bar
is 1.05.
"""

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

from services.cli.plan import make, settings_of
from services.plan.layouts import Planner

BAR = 1.05
_WORKLOADS = {
    "short": ["--sampling.max_new_tokens", "512"],
    "long": ["--sampling.max_new_tokens", "8192"],
    "synchronous": ["--sampling.max_new_tokens", "2048", "--algorithm.max_lag", "0"],
    "large batch": ["--sampling.max_new_tokens", "2048", "--algorithm.groups_per_step", "128"],
}


def sweep(planner: Planner) -> dict[str, Any]:
    """Return the choice and the best of all layouts, by step time."""
    choices, _ = planner.compare()
    every, _ = dataclasses.replace(planner, exhaustive=True).compare()
    if not every:
        return {"layouts": 0, "ratio": 1.0}
    chosen, best = choices[0], every[0]
    return {
        "layouts": len(every),
        "chosen": f"{chosen.layout.placement}: {chosen.layout.words}",
        "best": f"{best.layout.placement}: {best.layout.words}",
        "ratio": round(chosen.step_s / best.step_s, 4),
    }


def main() -> None:
    """Sweep and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="4xH200")
    parser.add_argument("--models", default="0.5b,7b,14b,32b")
    arguments = parser.parse_args()
    started_s, results = time.process_time(), []
    for model in arguments.models.split(","):
        for name, flags in _WORKLOADS.items():
            planner = make(settings_of(None, flags), arguments.gpus, model).planner
            result = {"model": model, "workload": name, **sweep(planner)}
            results.append(result)
            print(f"{model}, {name}: {result['ratio']}", file=sys.stderr, flush=True)
    worst = max(result["ratio"] for result in results)
    seconds = round(time.process_time() - started_s, 1)
    print(
        json.dumps(
            {"bar_met": worst <= BAR, "worst": worst, "cpu_s": seconds, "gpus": arguments.gpus, "results": results}
        )
    )


if __name__ == "__main__":
    main()
