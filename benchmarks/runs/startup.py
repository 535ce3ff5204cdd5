r"""From ``penstock up`` to the first trained step: seconds by process and activity, of two starts after each other.

The first start has empty caches (byte code, torch.compile, Triton, vLLM, DeepSpeed's extensions), the second those of
the first. Each run is stopped after its first step.

    python -m benchmarks.runs.startup                                            # arithmetic example, on a CPU
    python -m benchmarks.runs.startup --rollout.engine=vllm --rollout.replicas=1
    python -m benchmarks.runs.startup --model-shape 0.5b                         # two GPUs; not run yet
    python -m benchmarks.runs.startup --model-shape 0.5b --placement.mode=shared --rollout.gpus=[0] \
        --rollout.vllm.gpu_memory_utilization=0.4                           # one GPU, in turn
    python -m benchmarks.runs.startup --model-shape 0.5b --trainer.gpus=[0] --rollout.gpus=[0] \
        --rollout.vllm.gpu_memory_utilization=0.4                           # one GPU, both at once; not run yet

Other flags go to ``penstock up``. ``processes`` has the seconds of each activity until a process was ready, from the
start of Python on, and its processor time beside them: much less of it is waiting, for storage, other processes or a
busy machine. An engine of vLLM has processes of its own. ``milestones`` has the seconds since ``penstock up``; ``cpu_s``
is processor time of all processes. ``first_step`` has seconds of the step itself. ``--folder`` keeps the model of
``--model-shape`` for later calls; caches are empty in each call.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.peers.pipeline import environment_with
from benchmarks.peers.work import ROOT, Work, arithmetic, long, work_folder
from benchmarks.shapes import SHAPES

CACHES = {
    "PYTHONPYCACHEPREFIX": "bytecode",
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
}
_READY = '"event": "ready"'
_STEPS = 100
_STEP_FIGURES = ("generate_s_mean", "score_s_mean", "phase_wait_s", "phase_forward_backward_s", "step_s")


def start(
    folder: Path, name: str, work: Work, flags: Sequence[str], limit_s: float, kept: Sequence[str] = tuple(CACHES)
) -> dict[str, Any]:
    """Start a run, stop it after its first step, and return its figures."""
    told = {**work.settings, "run": {**work.settings["run"], "id": name, "folder": str(folder), "steps": _STEPS}}
    config = folder / f"{name}.toml"
    config.write_text(tomli_w.dumps(told))
    caches = {variable: str(folder / "caches" / CACHES[variable]) for variable in kept}
    environment = environment_with(caches)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    cpu_s, began_s = _cpu_s(), time.time()
    with (folder / f"{name}.log").open("w") as log:
        up = subprocess.Popen(
            [sys.executable, "-m", "penstock.services.cli", "up", str(config), *flags], cwd=ROOT, env=environment, stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while up.poll() is None and time.time() - began_s < limit_s and not _rows(folder / name / "metrics.jsonl"):
                time.sleep(0.05)
        finally:
            up.terminate()
            up.wait()
    steps = _rows(folder / name / "metrics.jsonl")
    if not steps:
        raise SystemExit(f"{name} made no step in {limit_s:.0f} s:\n{(folder / f'{name}.log').read_text()[-3000:]}")
    ready = ready_of(folder / name)
    milestones = {f"{process} ready": row["at_s"] for process, row in ready.items()}
    milestones |= {event["name"]: event["at_s"] for event in reversed(_rows(folder / name / "events.jsonl"))}
    milestones["first step"] = steps[0]["finished_at_s"]
    since = {milestone: round(at_s - began_s, 2) for milestone, at_s in milestones.items()}
    return {
        "seconds": since["first step"],
        "cpu_s": round(_cpu_s() - cpu_s, 1),
        "milestones": dict(sorted(since.items(), key=lambda pair: pair[1])),
        "processes": {
            process: {activity: [spent_s, row["start_cpu_s"][activity]] for activity, spent_s in row["start_s"].items()}
            for process, row in ready.items()
        },
        "first_step": {figure: round(steps[0][figure], 3) for figure in _STEP_FIGURES if figure in steps[0]},
    }


def _rows(file: Path) -> list[dict[str, Any]]:
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def ready_of(run: Path) -> dict[str, Mapping[str, Any]]:
    """Return what each process of a run logged when it was ready."""
    logs = sorted((run / "logs").glob("*.log"))
    lines = {
        log.stem: [line for line in log.read_text(errors="replace").splitlines() if _READY in line] for log in logs
    }
    return {process: json.loads(ready[0]) for process, ready in lines.items() if ready}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Start twice, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-shape", choices=sorted(SHAPES), help="random weights on GPUs; default: the example")
    parser.add_argument(
        "--installed", action="store_true", help="byte code as installed, not compiled by the first start"
    )
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds of one start")
    parser.add_argument("--folder", type=Path, help="keep the model of --model-shape here, and use it again")
    arguments, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name, work_folder(arguments.folder) as made:
        folder = Path(name)
        work = arithmetic() if arguments.model_shape is None else long(made, arguments.model_shape, "cuda", "auto")
        kept = [variable for variable in CACHES if not (arguments.installed and variable == "PYTHONPYCACHEPREFIX")]
        starts = []
        for number in range(arguments.starts):
            starts.append(start(folder, f"start-{number + 1}", work, flags, arguments.limit_s, kept))
            print(json.dumps(starts[-1]), flush=True)
    cores = os.cpu_count()
    load = round(os.getloadavg()[0], 1)
    print(json.dumps({"work": work.name, "starts": starts, "flags": flags, "cores": cores, "load": load}))


if __name__ == "__main__":
    main()
