"""Peak memory of training steps, predicted by the plan and measured, over thirteen configurations.

    python -m benchmarks.runs.plan_memory --gpus 2 --out results.jsonl             # all of them on two GPUs
    python -m benchmarks.runs.plan_memory --only 7b-zero3,1.5b-lora --gpus 2
    python -m benchmarks.runs.plan_memory --toy                                    # on a CPU: tensors only, no activations
    python -m benchmarks.runs.plan_memory --stored benchmarks/results/2026-11-23-plan-memory-h200.json      # today's plan

Each configuration is a process of its own with random weights, full micro-batches, and real optimizer, adapter, critic
and snapshots; those of one rank run beside each other, one on each GPU. The failure or the time limit of one does not
touch the others, and each result is appended to ``--out`` at once. Prints one JSON object at the end; the bar is a
deviation of 7 % of rank 0's peak, and components are compared at the measured peak's phase. Logs go to stderr.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.gpu_meter import only
from benchmarks.shapes import SHAPES
from penstock.services.plan.hardware import GIB
from penstock.services.plan.memory import Table, TrainerOptions, peak, total, trainer_table
from penstock.services.plan.shapes import from_config
from penstock.services.plan.workload import Lengths, Workload

BAR = 0.07
_ROOT = Path(__file__).parents[2]
_PREFIX = "RESULT "
_ROWS, _SAMPLES, _PROMPT, _PASSES = 4, 8, 64, 2
"""Groups of a micro-batch, samples of a group, tokens of its prompt, and micro-batches of a rank's step."""
_TENSORS = ("weights", "gradients", "master weights", "moments", "critic", "snapshots")
_FOLDED = dict.fromkeys(("logits", "reduction"), "activations")
"""The plan's components that one measurement covers: DeepSpeed frees its bucket before the phase ends."""
_CONTEXT = 1 << 30
_H200 = 140.4 * GIB
"""For results that do not name their GPU's memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Configuration:
    """One trainer."""

    shape: str
    ranks: int = 1
    zero_stage: int = 1
    checkpointing: bool | str = False
    optimizer: str = "adamw"
    dtype: str = "bfloat16"
    lora: int = 0
    critic: bool = False
    snapshots: bool = False
    sharded: bool = False
    """The snapshots."""
    cap: int = 16_384
    steps: int = 2
    bucket: int = 0
    """Gradients; 0: the trainer's choice."""

    @property
    def held_snapshots(self) -> int:
        """Of the steps before the measured one."""
        return min(2, self.steps - 1) if self.snapshots else 0


CONFIGURATIONS: Mapping[str, Configuration] = {
    "0.5b-zero0-float32": Configuration("0.5b", zero_stage=0, dtype="float32"),
    "0.5b-zero1": Configuration("0.5b"),
    "0.5b-critic": Configuration("0.5b", critic=True, checkpointing=True),
    "1.5b-auto": Configuration("1.5b", checkpointing="auto", steps=6),
    "1.5b-checkpointing-snapshots": Configuration("1.5b", checkpointing=True, snapshots=True, steps=3),
    "1.5b-8bit": Configuration("1.5b", optimizer="adamw_8bit", checkpointing=True),
    "1.5b-lora": Configuration("1.5b", lora=16, checkpointing=True),
    "7b-lora": Configuration("7b", lora=16, checkpointing=True),
    "1.5b-zero2": Configuration("1.5b", ranks=2, zero_stage=2),
    "7b-zero2-8bit": Configuration("7b", ranks=2, zero_stage=2, optimizer="adamw_8bit", checkpointing=True),
    "7b-zero3": Configuration("7b", ranks=2, zero_stage=3, checkpointing=True),
    "7b-zero3-snapshots": Configuration("7b", ranks=2, zero_stage=3, checkpointing=True, snapshots=True, steps=3),
    "7b-zero3-sharded": Configuration(
        "7b", ranks=2, zero_stage=3, checkpointing=True, snapshots=True, sharded=True, steps=3
    ),
}


# ---------------------------------------------------------------- predicted


def predicted(of: Configuration, limit_bytes: float) -> Table:
    """Return rank 0's memory by phase, without the context, which is not the allocator's."""
    shape = from_config(SHAPES[of.shape], of.shape)
    work = Workload(
        shape=shape, weight_bytes=2 if of.dtype == "bfloat16" else 4, groups=_ROWS * _PASSES * of.ranks,
        group_size=_SAMPLES, prompt_tokens=_PROMPT, lengths=Lengths(512, 512, 0.0), max_lag=1, steps=2, passes=1.0,
        critic=shape if of.critic else None, reference=False, lora_rank=of.lora,
    )  # fmt: skip
    checkpointing: Any = of.checkpointing
    options = TrainerOptions(
        of.ranks,
        of.zero_stage,
        of.optimizer,
        micro_batch_tokens=of.cap,
        checkpointing=checkpointing,
        snapshots=of.held_snapshots,
        sharded=of.sharded,
        bucket=of.bucket,
    )
    table, _ = trainer_table(work, options, limit_bytes)
    return {phase: [part for part in parts if part.name != "context"] for phase, parts in table.items()}


# ---------------------------------------------------------------- measured, in a process of its own


def measured(of: Configuration, device: str) -> dict[str, Any]:
    """Return this rank's last step: peak bytes and components of each phase."""
    import torch

    from penstock.services.trainer.rank_group import start_ranks

    torch.manual_seed(0)
    rank, _ = start_ranks(device)
    with tempfile.TemporaryDirectory(prefix="penstock-plan-memory-") as folder:
        trainer = _Trainer(of, device, Path(folder))
        for _ in range(of.steps):
            samples = trainer.step(rank)
        trainer.close()
    phases = {sample.phase: {"bytes": sample.total_bytes, **sample.components} for sample in samples}
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    capacity = samples[0].capacity_bytes
    return {"rank": rank, "device": name, "capacity_bytes": capacity, "phases": phases, "torch": torch.__version__}


class _Trainer:
    def __init__(self, of: Configuration, device: str, folder: Path) -> None:
        import torch
        import torch.distributed as dist

        from benchmarks.trainer.models import random_model
        from penstock.services.trainer.batch.assignment import plan
        from penstock.services.trainer.model import adapter
        from penstock.services.trainer.model import held_tensors as memory
        from penstock.services.trainer.model.critic import Critic
        from penstock.services.trainer.model.engine import TrainingEngine
        from penstock.services.trainer.model.layers import attention, kernels
        from penstock.services.trainer.model.policy import Policy
        from penstock.services.trainer.phases import Phases
        from penstock.services.trainer.rank0.publication import Publication

        settings = _settings(of, device, folder)
        self._tell("building")
        model = adapter.add(random_model(SHAPES[of.shape], settings, device), settings.policy, of.zero_stage)
        fused = kernels.fuses_logits(settings.trainer.kernels)
        chunk = settings.internal.logits_chunk_tokens
        policy = Policy(model, chunk_tokens=chunk, fused_logits=fused).train()
        self._engine = TrainingEngine(policy, settings, device)
        self._critic = None
        if of.critic:
            trunk = attention.decoder_of(random_model(SHAPES[of.shape], settings, device))
            width = SHAPES[of.shape]["hidden_size"]
            self._critic = TrainingEngine(Critic(trunk, width).train(), settings, device)
        rows = _rows(of, self._engine.vocabulary)
        self._batches = plan(rows, of.cap, of.ranks, sizes=policy.sizes)[dist.get_rank()]
        self._publication = Publication(settings, "127.0.0.1", bytes) if of.snapshots else None
        held: Callable[[], dict[str, float]] = lambda: memory.components(  # noqa: E731
            self._engine, self._critic, snapshots=self._publication.buckets if self._publication else ()
        )
        self._phases = Phases(torch.device(device), held)
        self._version = 0

    def step(self, rank: int) -> Any:
        """Make one step; return its samples."""
        self._version += 1
        tokens = [len(batch.targets_N) for batch in self._batches]
        self._tell(f"step {self._version}: {len(self._batches)} passes of {self._batches[0].tokens} tokens")
        self._phases.take_samples()
        self._phases.take_memory()
        with self._phases.measure("forward_backward"):
            self._pass(self._engine, lambda batch: self._engine.forward(batch).policy_logprobs_N.sum() / sum(tokens))
        with self._phases.measure("optimizer"):
            self._engine.step(1e-6)
        if (critic := self._critic) is not None:
            with self._phases.measure("critic"):
                self._pass(critic, lambda batch: critic.forward(batch).square().sum() / sum(tokens))
                critic.step(1e-6)
        with self._phases.measure("snapshot"):
            if self._publication is not None and rank == 0:
                self._publication.publish(self._engine, self._version, self._version)  # type: ignore[arg-type]
            elif self._publication is not None:
                self._publication.take_part(self._engine, self._version, self._version)  # type: ignore[arg-type]
        return self._phases.take_samples()

    def _pass(self, engine: Any, loss: Callable[[Any], Any]) -> None:
        for number, batch in enumerate(self._batches, start=1):
            engine.backward(loss(batch), last=number == len(self._batches))

    def close(self) -> None:
        """Leave the process group."""
        import torch.distributed as dist

        if self._publication is not None:
            self._publication.close()
        dist.destroy_process_group()

    def _tell(self, message: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def _settings(of: Configuration, device: str, folder: Path) -> Any:
    from penstock.shared.settings import Settings

    return Settings.model_validate(
        {
            "run": {"device": device, "id": "plan-memory", "folder": str(folder)},
            "policy": {"dtype": of.dtype if device == "cuda" else "float32", "lora": {"rank": of.lora}},
            "trainer": {
                "ranks": of.ranks, "zero_stage": of.zero_stage, "micro_batch_tokens": of.cap,
                "optimizer": of.optimizer, "gradient_checkpointing": of.checkpointing,
                "deepspeed": {"zero_optimization": {"reduce_bucket_size": of.bucket}} if of.bucket else {},
            },
            "weights": {"snapshots": "sharded" if of.sharded else "whole"},
        }
    )  # fmt: skip


def _rows(of: Configuration, vocabulary: int) -> list[Any]:
    """Return groups that fill micro-batches to the last token."""
    import numpy as np

    from penstock.services.trainer.batch.packing import PackedRow
    from penstock.shared.bus.messages import FinishReason, Sample

    lot, tokens = np.random.default_rng(0), (of.cap // _ROWS - _PROMPT) // _SAMPLES + 1

    def ids(count: int) -> Any:
        return lot.integers(0, vocabulary, count).astype(np.int32)

    def sample() -> Sample:
        return Sample(ids(tokens), np.zeros(tokens, np.float32), np.zeros((1, 2), np.int32), FinishReason.STOP, "")

    return [
        PackedRow(ids(_PROMPT), tuple(sample() for _ in range(_SAMPLES)), tuple(range(_SAMPLES)))
        for _ in range(_ROWS * _PASSES * of.ranks)
    ]


# ---------------------------------------------------------------- all of them


def compare(of: Configuration, measured: Mapping[str, Any], *, tensors_alone: bool) -> dict[str, Any]:
    """Return predicted beside measured; of tensors alone where the allocator is not measured."""
    capacity_bytes = measured["capacity_bytes"]
    table = predicted(of, capacity_bytes - _CONTEXT)
    phase = max(measured["phases"], key=lambda name: float(measured["phases"][name]["bytes"]))
    seen = _folded((name, nbytes) for name, nbytes in measured["phases"][phase].items() if name != "bytes")
    expected = _folded((part.name, part.nbytes) for part in max(table.values(), key=total))
    if tensors_alone:
        seen, expected = ({name: each[name] for name in _TENSORS if each.get(name)} for each in (seen, expected))
    predicted_bytes, measured_bytes = sum(expected.values()), sum(seen.values())
    deviation = predicted_bytes / measured_bytes - 1
    return {
        "predicted_bytes": round(predicted_bytes),
        "measured_bytes": round(measured_bytes),
        "deviation": round(deviation, 4),
        "bar_met": abs(deviation) <= BAR,
        "capacity_bytes": capacity_bytes,
        "phase": phase,
        "components": {
            name: [round(expected.get(name, 0.0)), round(seen.get(name, 0.0))]
            for name in dict.fromkeys([*expected, *seen])
        },
        "phases": {name: round(parts["bytes"]) for name, parts in measured["phases"].items()},
    }


def _folded(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    folded: dict[str, float] = {}
    for name, nbytes in parts:
        folded[_FOLDED.get(name, name)] = folded.get(_FOLDED.get(name, name), 0.0) + nbytes
    return folded


def recompared(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored result's deviation from today's plan, and from the plan when it was measured."""
    names = {field.name for field in dataclasses.fields(Configuration)}
    of = Configuration(
        **{"bucket": 500_000_000} | {name: stored[name] for name in names & stored.keys()}
    )  # older: DeepSpeed's
    table = predicted(of, stored.get("capacity_bytes", _H200) - _CONTEXT)
    predicted_bytes, measured_bytes = peak(table), stored["measured_bytes"]
    deviation = predicted_bytes / measured_bytes - 1
    return {
        "name": stored["name"],
        "predicted_bytes": round(predicted_bytes),
        "measured_bytes": measured_bytes,
        "deviation": round(deviation, 4),
        "deviation_when_measured": stored["deviation"],
        "bar_met": abs(deviation) <= BAR,
    }


def run_one(name: str, of: Configuration, gpus: Sequence[int], arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one configuration in a process group of its own."""
    command = [sys.executable, "-m", "benchmarks.runs.plan_memory", "--child", json.dumps(dataclasses.asdict(of))]
    command += ["--toy"] if arguments.toy else []
    environment = {**os.environ, **only(*gpus)}
    started_s = time.monotonic()
    process = subprocess.Popen(
        command, cwd=_ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=arguments.limit_s)
    except subprocess.TimeoutExpired:
        stdout, stderr = _killed(process)
        stderr += f"\nended after {arguments.limit_s:g} s"
    lines = [line for line in stdout.splitlines() if line.startswith(_PREFIX)]
    result: dict[str, Any] = {"name": name, **dataclasses.asdict(of)}
    try:
        result |= compare(of, json.loads(lines[0].removeprefix(_PREFIX)), tensors_alone=arguments.toy)
    except (IndexError, ValueError, KeyError) as error:
        result |= {"error": f"{error!r}; exit status {process.returncode}: {stderr[-1500:]}"}
    return result | {"seconds": round(time.monotonic() - started_s, 1)}


def _killed(process: "subprocess.Popen[str]") -> tuple[str, str]:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()


def run_all(chosen: Mapping[str, Configuration], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield each result as it is there: one rank on each GPU first, then several ranks."""
    free: SimpleQueue[int] = SimpleQueue()
    for gpu in range(arguments.gpus):
        free.put(gpu)

    def alone(item: tuple[str, Configuration]) -> dict[str, Any]:
        gpu = free.get()
        try:
            return run_one(*item, [gpu], arguments)
        finally:
            free.put(gpu)

    single = {name: of for name, of in chosen.items() if of.ranks == 1}
    with ThreadPoolExecutor(arguments.gpus) as pool:
        for done in as_completed([pool.submit(alone, item) for item in single.items()]):
            yield done.result()
    for name, of in chosen.items():
        if of.ranks > arguments.gpus:
            yield {"name": name, "error": f"expected {of.ranks} GPUs, --gpus is {arguments.gpus}"}
        elif of.ranks > 1:
            yield run_one(name, of, range(of.ranks), arguments)


def _child(arguments: argparse.Namespace) -> None:
    from penstock.services.trainer.launcher import launch
    from penstock.shared.settings import TrainerSettings

    of = Configuration(**json.loads(arguments.child))
    if of.ranks > 1 and "RANK" not in os.environ:
        command = [sys.executable, "-m", "benchmarks.runs.plan_memory", *sys.argv[1:]]
        sys.exit(launch(command, TrainerSettings(ranks=of.ranks), drain_s=0.0))
    result = measured(of, "cpu" if arguments.toy else "cuda")
    if result["rank"] == 0:
        print(_PREFIX + json.dumps(result), flush=True)


def _toy(of: Configuration) -> Configuration:
    return dataclasses.replace(of, shape="tiny", cap=1024, dtype="float32")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"some of {', '.join(CONFIGURATIONS)}")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=120.0, help="for one configuration")
    parser.add_argument("--out", type=Path, help="results are appended here at once")
    parser.add_argument(
        "--stored", type=Path, help="a file of benchmarks/results: compare it with today's plan, without a GPU"
    )
    parser.add_argument("--toy", action="store_true", help="a tiny shape on a CPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run and print."""
    arguments = _parse()
    if arguments.child:
        _child(arguments)
        return
    if arguments.stored:
        _finish(
            [recompared(each) for each in json.loads(arguments.stored.read_text())["result"] if "error" not in each]
        )
        return
    names = arguments.only.split(",") if arguments.only else list(CONFIGURATIONS)
    chosen = {name: CONFIGURATIONS[name] for name in names}
    if arguments.toy:
        chosen = {name: _toy(of) for name, of in chosen.items() if of.optimizer == "adamw"}  # 8 bits need a GPU
    results = []
    for result in run_all(chosen, arguments):
        results.append(result)
        about = result.get("error") or f"{result['predicted_bytes'] / 1e9:.2f} predicted, {result['measured_bytes'] / 1e9:.2f} GB measured, {result['deviation']:+.1%}"  # fmt: skip
        print(f"{result['name']}: {about}", file=sys.stderr, flush=True)
        if arguments.out is not None:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    _finish(results)


def _finish(results: Sequence[Mapping[str, Any]]) -> None:
    met = sum(bool(result.get("bar_met")) for result in results)
    print(json.dumps({"bar_met": met == len(results), "within": met, "of": len(results), "results": results}))


if __name__ == "__main__":
    main()
