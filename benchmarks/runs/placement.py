"""Switches between training and generation on one device, rung by rung (docs/placement.md).

    python -m benchmarks.runs.placement                                                    # a toy, on a CPU
    python -m benchmarks.runs.placement --device cuda --shape 7b --trained-layers 4 --rungs 0 1 2
    python -m benchmarks.runs.placement --device cuda --shape 7b --zero-stage 3 --rungs 3 4
    python -m benchmarks.runs.placement --device cuda --kv-cache-gb 2 --rungs 4 --switches 500 --generate-s 0.02

One process trains, another is vLLM's; the weights cross by CUDA IPC (by gloo on a CPU). A switch pair is::

    train ─▶ publish ─▶ free (3, 4) ─▶ resume, refill (2) ─▶ generate ─▶ suspend ─▶ restore (3, 4) ─▶ train
                        └────── to_generate_s ─────┘                     └───── to_train_s ─────┘

Requests are in progress at each switch and continue after it. Weights change in each step.

- ``switch_s``: both, median without the first ``WARM_UPS`` pairs, which allocate pinned memory.
- ``step_s``: a training step, with the wait for reloaded optimizer states.
- ``growth``: used device memory after the last switch vs. after the warm-ups; on a CPU, of the trainer's process.
- ``bytes_equal``: the live weights equal the trainer's snapshot at the end; null without a copy plan (CPU).
- ``used_train_bytes``, ``used_generate_bytes``: of the device, in each phase; ``trainer_memory`` and ``engine_memory`` are
  components when resident.

A rung that fails is reported in ``error`` and the next continues. Lines of progress go to stderr; the last line of stdout
is one JSON object.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.runs.placement_players import RUNGS, Player, configure
from benchmarks.shapes import SHAPES

_STARTED_S = time.perf_counter()


def main() -> None:
    """Measure in a child process, and print what it reported even if it died."""
    arguments = _parse()
    if arguments.child:
        asyncio.run(_measure(arguments, Path(arguments.child)))
        return
    with tempfile.TemporaryDirectory() as folder:
        configure(Path(folder), SHAPES[arguments.shape])
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.runs.placement", *sys.argv[1:], "--child", folder],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        report: dict[str, Any] = {
            "rungs": {},
            **{k: v for k, v in vars(arguments).items() if k not in ("child", "rungs")},
        }
        for line in child.stdout:
            if line.startswith(b'{"placement"'):
                _add(report, json.loads(line)["placement"])
        report["exit_status"] = child.wait()
    for rung in arguments.rungs:
        report["rungs"].setdefault(str(rung), {"error": "the process ended before this rung"})
    report["seconds"] = time.perf_counter() - _STARTED_S
    print(json.dumps(report), flush=True)


def _add(report: dict[str, Any], part: dict[str, Any]) -> None:
    rung = part.pop("rung", None)
    if rung is None:
        report |= part
    else:
        report["rungs"][str(rung)] = part


async def _measure(arguments: argparse.Namespace, folder: Path) -> None:
    player = Player(arguments, folder, _log)
    try:
        _tell(await player.start())
        for rung in arguments.rungs:
            try:
                _tell({"rung": rung, **await player.measure(rung)})
            except Exception as error:  # noqa: BLE001 (the next rung may succeed)
                traceback.print_exc()
                _tell({"rung": rung, "error": f"{type(error).__name__}: {error}".splitlines()[0]})
                if player.is_dead:
                    return
    except Exception as error:  # noqa: BLE001 (reported)
        traceback.print_exc()
        _tell({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
    finally:
        await player.close()


def _tell(part: dict[str, Any]) -> None:
    print(json.dumps({"placement": part}), flush=True)


def _log(text: str) -> None:
    print(f"{time.perf_counter() - _STARTED_S:6.1f} s  {text}", file=sys.stderr, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rungs", "--rung", type=int, nargs="+", choices=RUNGS, default=list(RUNGS))
    parser.add_argument("--switches", type=int, default=10, help="pairs per rung")
    parser.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), default=1)
    parser.add_argument("--optimizer", choices=("adamw", "adamw_8bit"), default="adamw")
    parser.add_argument("--deepspeed", default="{}", help="more of DeepSpeed's settings, as JSON")
    parser.add_argument("--trained-layers", type=int, default=0, help="train only the last layers; 0: everything")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3, help="of vLLM, weights included")
    parser.add_argument("--kv-cache-gb", type=float, default=0.0, help="of vLLM's cache; 0: measured by vLLM")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--generate-s", type=float, default=0.3, help="decoding between two switches")
    parser.add_argument("--train-tokens", type=int, default=4096, help="of a training step")
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation and CUDA graphs")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return arguments


if __name__ == "__main__":
    main()
