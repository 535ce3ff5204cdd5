"""FP8 rollouts beside bfloat16 on one GPU: tokens/s without and with updates of weights, and how long these stop decoding.

    python -m benchmarks.rollout.quantised                 one GPU, the 7B shape, 256 sequences
    python -m benchmarks.rollout.quantised --device cpu    a small shape; weights are reloaded layer by layer there

::

    trainer's process ──── pull ────▶ replica with FP8, then replica in bfloat16: both are started, one decodes

Random weights; an update every 2 s in every second window of 4 s. ``bytes_equal``: live weights and scales equal what the
received version quantises to (null without a plan). Then as many sequences join. The last line is one JSON object;
``ratios`` are FP8 / bfloat16 tokens/s of both loads, without updates.
"""

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES
from benchmarks.weights.measures import START_S, Player, Run
from benchmarks.weights.players import Options, environment
from benchmarks.weights.update import configure, started

FIGURES = ("tokens_per_s", "usual_wait_ms", "throughput_ratio", "stall_ms", "stall_ms_max")


def measured(trainer: Player, replica: Player, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one engine under load."""
    run = Run(trainer, [replica], args, args.device == "cuda")
    first = run.update()[0]
    replica.call("load", sequences=args.sequences)
    run.update()
    figures, updates = run.windows(args.seconds, run.update)
    equal = replica.call("compare")
    replica.call("load", sequences=args.sequences)
    time.sleep(2.0)
    before = replica.call("seen")
    time.sleep(args.seconds / 2)
    after = replica.call("seen")
    return {
        "path": first["path"],
        "copied_bytes": first["copied_bytes"],
        "updates": len(updates),
        "swap_ms_max": max(1000 * at["swap_s"] for at in updates),
        **{name: figures[name] for name in FIGURES},
        "tokens_per_s_of_twice": (after["tokens"] - before["tokens"]) / (after["at_s"] - before["at_s"]),
        "bytes_equal": None if None in equal else not any(equal),
    }


def main() -> None:
    """Run and print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="")
    parser.add_argument("--seconds", type=float, default=12.0, help="with updates; as long again without")
    parser.add_argument("--sequences", type=int, default=0, help="decoding; 256, or 32 on the CPU")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    args.fan_out, shape = 2, args.shape or ("7b" if on_gpu else "tiny")
    args.sequences = args.sequences or (256 if on_gpu else 32)
    cache: dict[str, Any] = {"kv_cache_memory_bytes": 12 << 30} if on_gpu else {}
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        configure(folder, SHAPES[shape])
        surroundings = environment(on_gpu, [0])

        def options(**arguments: Any) -> Options:
            return Options(
                folder=folder,
                device=args.device,
                dtype="bfloat16",
                sequences=2 * args.sequences,
                tensor_parallel_size=1,
                max_model_len=448 if on_gpu else 512,
                gpu_memory_utilization=0.2,
                bucket_bytes=512 << 20,
                deadline_s=60.0,
                shadow="full",
                arguments={**cache, **arguments},
            )

        trainer = started(stack, surroundings, "trainer", options())
        replicas = {
            "fp8": started(stack, surroundings, "replica", options(quantization="fp8_per_channel")),
            "bfloat16": started(stack, surroundings, "replica", options()),
        }
        for replica in replicas.values():
            replica.ask("describe")
        for replica in replicas.values():
            replica.answer(START_S)
        for name, replica in replicas.items():
            figures[name] = measured(trainer, replica, args)
            print(json.dumps({name: figures[name]}), flush=True)
            replica.close()
    fp8, bfloat16 = figures["fp8"], figures["bfloat16"]
    ratios = [round(fp8[name] / bfloat16[name], 3) for name in ("tokens_per_s", "tokens_per_s_of_twice")]
    print(json.dumps({"device": args.device, "shape": shape, "sequences": args.sequences, "ratios": ratios, **figures}))


if __name__ == "__main__":
    main()
