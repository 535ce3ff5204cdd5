"""Seconds to write and to load a checkpoint, beside torch's own way with the same files.

    python -m benchmarks.trainer.checkpoint                                   # 250 million weights, on a CPU; 4 GB in the folder
    python -m benchmarks.trainer.checkpoint --shape 1.5b --device cuda --zero-stage 1 --folder /mnt/disk

``written`` and ``loaded`` are by the trainer (``penstock.services.trainer.model.engine``), with digests; ``plain`` is ``torch.save``
with a SHA-256 of the whole file, and ``torch.load``, from and to the host's memory. ``step`` is a step alone,
``step_beside`` one beside a checkpoint that is being written, which training waits for while it is ``copied`` only and
which takes ``written_beside``. Medians of ``--rounds``, in turn.
Prints one JSON object: seconds, the rates of writing and loading in GB/s, and ``beside_ratio``: step_beside to step.
"""

import argparse
import functools
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.shapes import SHAPES
from benchmarks.trainer.models import random_model
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.loop import give_way
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.model.saving.writer import Written
from penstock.services.trainer.rank_group import start_ranks
from penstock.shared.bus.messages import FinishReason, Sample
from penstock.shared.settings import Settings

_SHAPE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 8192, "tie_word_embeddings": True,
}  # fmt: skip


def trained_engine(arguments: argparse.Namespace) -> TrainingEngine:
    """Return an engine with optimizer states."""
    device = arguments.device
    told = {
        "run": {"device": device},
        "policy": {"dtype": "bfloat16"},
        "trainer": {"zero_stage": arguments.zero_stage, "learning_rate": 1e-6},
    }
    settings = Settings.model_validate(told)
    shape = SHAPES[arguments.shape] if arguments.shape else _SHAPE
    model = random_model(shape, settings, device).requires_grad_(True)
    engine = TrainingEngine(Policy(model).train(), settings, device)
    step(engine, 32)
    return engine


def step(engine: TrainingEngine, tokens: int) -> None:
    """Make a step from one sequence."""
    ids = np.arange(2, 2 + tokens, dtype=np.int32)
    sample = Sample(ids, np.zeros(len(ids), np.float32), np.zeros((1, 2), np.int32), FinishReason.STOP, "")
    out = engine.forward(micro_batch([PackedRow(ids, (sample,), (0,))]))
    engine.backward(out.policy_logprobs_N.mean(), last=True)
    engine.step(1e-6)


def seconds(action: Callable[[], object]) -> float:
    """Return how long ``action`` takes."""
    began_s = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began_s


def write_plainly(content: Any, path: Path) -> None:
    """Write ``content`` and read it again for its digest."""
    torch.save(content, path)
    with path.open("rb") as file:
        hashlib.file_digest(file, "sha256")


def measure(engine: TrainingEngine, folder: Path) -> dict[str, float]:
    """Return the seconds of one round, and the checkpoint's bytes."""

    def write() -> None:
        if error := engine.save(folder / "own")().error:
            raise SystemExit(error)

    written_s = seconds(write)
    files = sorted((folder / "own").rglob("*.pt"))
    nbytes = sum(path.stat().st_size for path in files)
    loaded_s = seconds(lambda: engine.load(folder / "own"))
    plain_written_s = plain_loaded_s = 0.0
    for path in files:
        content = torch.load(path, map_location="cpu", weights_only=True)
        plain_written_s += seconds(functools.partial(write_plainly, content, folder / "plain.pt"))
        del content
        load = functools.partial(torch.load, folder / "plain.pt", map_location="cpu", weights_only=True)
        plain_loaded_s += seconds(load)
        (folder / "plain.pt").unlink()
    shutil.rmtree(folder / "own")
    return {
        "bytes": nbytes, "written_s": written_s, "loaded_s": loaded_s,
        "plain_written_s": plain_written_s, "plain_loaded_s": plain_loaded_s,
    }  # fmt: skip


def measure_beside(engine: TrainingEngine, folder: Path, tokens: int, steps: int) -> dict[str, float]:
    """Return the seconds of steps alone, and of those beside a checkpoint that is being written."""
    make = functools.partial(step, engine, tokens)
    alone = [seconds(make) for _ in range(steps)]
    saved: list[Callable[[], Written]] = []
    copied_s = seconds(lambda: saved.append(engine.save(folder / "beside")))
    written: list[float] = []

    def write() -> None:
        give_way()
        written.append(seconds(saved[0]))

    thread, beside = threading.Thread(target=write), []
    thread.start()
    while thread.is_alive():
        beside.append(seconds(make))
    thread.join()
    shutil.rmtree(folder / "beside")
    return {
        "step_s": statistics.median(alone), "copied_s": copied_s, "step_beside_s": statistics.median(beside),
        "steps_beside": len(beside), "written_beside_s": written[0],
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="default: 250 million weights")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--zero-stage", type=int, choices=(1, 2, 3), default=1)
    parser.add_argument("--step-tokens", type=int, default=256, help="tokens of a step beside the writing")
    parser.add_argument("--steps", type=int, default=5, help="steps alone, of each round")
    parser.add_argument("--threads", type=int, default=0, help="of training; default: as torch chooses")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where files are written; default: the temporary folder")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    start_ranks(arguments.device)
    engine = trained_engine(arguments)
    rows = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-checkpoint-", dir=arguments.folder) as name:
        for number in range(arguments.rounds):
            beside = measure_beside(engine, Path(name), arguments.step_tokens, arguments.steps)
            rows.append({**measure(engine, Path(name)), **beside})
            print(f"round {number + 1}: {rows[-1]}", file=sys.stderr, flush=True)
    figures = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    timed = ("written_s", "loaded_s", "plain_written_s", "plain_loaded_s")
    rates = {key.replace("_s", "_gb_per_s"): figures["bytes"] / 1e9 / figures[key] for key in timed}
    figures["beside_ratio"] = statistics.median(row["step_beside_s"] / row["step_s"] for row in rows)
    shown = {"benchmark": "checkpoint", "device": arguments.device, "cores": os.cpu_count(), "rounds": arguments.rounds}
    print(json.dumps({**shown, **{key: round(value, 3) for key, value in {**figures, **rates}.items()}}))


if __name__ == "__main__":
    main()
