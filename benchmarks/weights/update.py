"""Weight updates during generation: speed, stalls, and cost.

::

    trainer, GPU 0                           replica, GPU 1: the rollout service's engine under load
      fill snapshot, offer ──── pull ────────▶ stage (decoding continues), verify, swap

- ``raw_gb_per_s``: a plain broadcast. ``wire_ratio``: a pull's bytes / seconds from offer to verified weights / that.
- ``stall_ms``: longest wait for a token from the offer until 0.25 s after the swap, minus the median wait.
- ``throughput_ratio``: tokens/s with an update every 2 s / without; median.
- ``publish_to_live_s``: from the first byte copied into the trainer's snapshot to the return of the swap.
- ``bytes_equal``: live parameters equal the received, checksummed bytes; null without a plan (CPU).
- ``all_live_ratio``: seconds until all replicas are live / seconds for one alone.
- ``trainer_ratio``: trainer-like steps per second with updates / without; median.
- ``native_*``: vLLM's packed NCCL transfer behind ``pause_generation(mode="keep")``.

    python -m benchmarks.weights.update                                        two GPUs, Qwen2-7B in bfloat16
    python -m benchmarks.weights.update --replicas 3 --fan-out 1               four GPUs, a chain
    python -m benchmarks.weights.update --device cpu                           gloo, a small shape
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES
from benchmarks.weights.measures import Player, Run
from benchmarks.weights.play import play
from benchmarks.weights.players import Options, environment, gpus


def main() -> None:
    """Run and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="")
    parser.add_argument("--seconds", type=float, default=20.0, help="with updates; as long again without")
    parser.add_argument("--sequences", type=int, default=0, help="decoding; 256, or 32 on the CPU")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--fan-out", type=int, default=2, help="pullers of a source; 1 is a chain")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--shadow", choices=["full", "bucketed"], default="full")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.7)
    parser.add_argument("--max-model-len", type=int, default=0, help="8192, or 512 on the CPU")
    parser.add_argument("--deadline", type=float, default=30.0)
    parser.add_argument("--no-native", action="store_true")
    print(json.dumps(run(parser.parse_args())))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run."""
    on_gpu = args.device == "cuda"
    shape = args.shape or ("7b" if on_gpu else "tiny")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        configure(folder, SHAPES[shape])
        options = Options(
            folder=folder,
            device=args.device,
            dtype="bfloat16" if on_gpu else "float32",
            sequences=args.sequences or (256 if on_gpu else 32),
            tensor_parallel_size=args.tensor_parallel,
            max_model_len=args.max_model_len or (8192 if on_gpu else 512),
            gpu_memory_utilization=args.gpu_memory_utilization,
            bucket_bytes=args.bucket_mib << 20,
            deadline_s=args.deadline,
            shadow=args.shadow,
        )
        trainer = _started(stack, environment(on_gpu, [0]), "trainer", options)
        replicas = [
            _started(stack, environment(on_gpu, gpus(number, args.tensor_parallel)), "replica", options)
            for number in range(args.replicas)
        ]
        head = {"device": args.device, "shape": shape, "sequences": options.sequences, "replicas": args.replicas}
        return {**head, **Run(trainer, replicas, args, on_gpu).figures()}


# ---------------------------------------------------------------- processes


def configure(folder: Path, shape: Mapping[str, Any]) -> None:
    """Write the configuration of a Qwen2."""
    config: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
        **shape,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _started(stack: ExitStack, environment: dict[str, str], player: str, options: Options) -> Player:
    with _surroundings(environment):
        started = Player(play, environment, player, options)
    stack.callback(started.close)
    return started


@contextmanager
def _surroundings(environment: dict[str, str]) -> Iterator[None]:
    """Child processes see ``environment`` before any import."""
    before = dict(os.environ)
    os.environ |= environment
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    main()
