"""Memory and seconds of a trainer's start, beside those of its steps.

    python -m benchmarks.trainer.start                                   # a toy, one CPU
    python -m benchmarks.trainer.start --shape 7b --device cuda          # 15 GB of weights in the folder
    python -m benchmarks.trainer.start --shape 30b-a3b --layers 8 --device cuda --folder /dev/shm    # 11 GB, a mixture

Random weights are written as a Hugging Face folder first. Then the trainer starts as in a run: it loads them, tests
itself layer by layer and divides them at ZeRO stage 3 (``penstock.services.trainer.training``). Prints one JSON object:

``host_ratio``      what the process held in the host's memory at most, beyond what it held before, over the policy's bytes;
                    mapped files do not count, as the kernel may drop them
``device_ratio``    the GPU's peak while starting over its peak in a step
"""

import argparse
import json
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks import random_weights
from benchmarks.shapes import ALL_SHAPES
from benchmarks.trainer.checkpoint import seconds, step
from penstock.services.trainer.model.engine import numbered
from penstock.services.trainer.phases import memory_bytes
from penstock.services.trainer.rank0.mailbox.queues import NoMailbox
from penstock.services.trainer.rank_group import start_ranks
from penstock.services.trainer.training import Loading
from penstock.shared.settings import Settings

MOST_HOST, MOST_DEVICE = 1.2, 1.0
"""Bars of the two ratios."""
_INTERVAL_S = 0.01


class _Phases(NoMailbox):
    """Logs what the trainer reports while it starts, with the seconds since it was made."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()

    def send(self, result: Any) -> None:
        print(f"{time.perf_counter() - self._began_s:6.1f} s  {result}", file=sys.stderr, flush=True)


@contextmanager
def host_peak() -> Iterator[list[int]]:
    """Sample the process's memory within the block; the list gets its peak beyond that at the begin, in bytes."""
    process, ended, peak = psutil.Process(), threading.Event(), [0]

    def held() -> int:
        memory = process.memory_info()
        return int(memory.rss - memory.shared)

    before = held()

    def sample() -> None:
        while not ended.wait(_INTERVAL_S):
            peak[0] = max(peak[0], held() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write the model, start, and make steps."""
    shape = dict(ALL_SHAPES[arguments.shape])
    shape["num_hidden_layers"] = arguments.layers or shape["num_hidden_layers"]
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    written_s = seconds(lambda: random_weights.write(folder, shape, dtype, arguments.device))
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
    settings = Settings.model_validate(
        {
            "run": {"device": arguments.device},
            "policy": {"model": str(folder), "dtype": "bfloat16" if arguments.device == "cuda" else "float32"},
            "trainer": {"zero_stage": 3, "learning_rate": 1e-6, "micro_batch_tokens": 2 * arguments.step_tokens},
            "sampling": {"max_new_tokens": 256},
        }
    )
    start_ranks(arguments.device)
    device = numbered(arguments.device)
    memory_bytes(device)
    began_s = time.perf_counter()
    with host_peak() as peak:
        engine = Loading(settings, arguments.device, _Phases()).policy()
    policy_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    figures: dict[str, Any] = {
        "benchmark": "start", "shape": arguments.shape, "layers": shape["num_hidden_layers"],
        "step_tokens": arguments.step_tokens, "policy_bytes": policy_bytes, "written_s": round(written_s, 1),
        "started_s": round(time.perf_counter() - began_s, 1), "host_peak_bytes": peak[0],
        "host_ratio": round(peak[0] / policy_bytes, 3), "start_peak_bytes": memory_bytes(device),
    }  # fmt: skip
    print(json.dumps(figures), file=sys.stderr, flush=True)  # a step may not fit
    figures["steps_s"] = [round(seconds(lambda: step(engine, arguments.step_tokens)), 2) for _ in range(2)]
    step_bytes = memory_bytes(device)
    device_ratio = figures["start_peak_bytes"] / step_bytes
    return {
        **figures, "step_peak_bytes": step_bytes, "device_ratio": round(device_ratio, 3),
        "bars_met": figures["host_ratio"] <= MOST_HOST and device_ratio <= MOST_DEVICE,
        "device_name": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__,
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="tiny")
    parser.add_argument("--layers", type=int, default=0, help="decoder layers; 0: all of the shape")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--step-tokens", type=int, default=2048, help="prompt, and completion, of a step's one sequence"
    )
    parser.add_argument("--folder", type=Path, help="where the weights are written; default: the temporary folder")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-start-", dir=arguments.folder) as name:
        print(json.dumps(run(arguments, Path(name))), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
