r"""Samples/s of real runs in many layouts, beside what the plan predicts.

    python -m benchmarks.runs.layouts --work one --out /tmp/one.jsonl              # one H100 or H200, about 15 minutes
    python -m benchmarks.runs.layouts --work four --out /tmp/four.jsonl            # four GPUs, 0.5B, about 15 minutes
    python -m benchmarks.runs.layouts --work two-tail --out /tmp/two.jsonl         # completions of very different lengths
    python -m benchmarks.runs.layouts --work four-7b --only turns,separate-2-2 --out /tmp/7b.jsonl    # some, in several calls
    python -m benchmarks.runs.layouts --work eight-7b --out /tmp/8.jsonl           # eight GPUs; also eight-30b-a3b, of 141 GB
    python -m benchmarks.runs.layouts --work four --compare /tmp/four.jsonl        # needs no GPU
    python -m benchmarks.runs.layouts --work eight-7b --check 8xH200,560GiB        # neither; what each run needs by the plan
    python -m benchmarks.runs.layouts --toy --out /tmp/toy.jsonl                   # a tiny shape on the CPU: a smoke test

Each configuration is a run of ``penstock up`` (``benchmarks.peers.pipeline``, random weights, prompts of 64 tokens); a rate is
that of its steady steps (``penstock.services.plan.measured.steady``). The first of a work calibrates, as ``penstock plan --calibrate``
does. By run: ``uncalibrated`` and ``calibrated``, predicted over measured, minus 1; the calibrated bar is 0.15.
``recommended`` is the fastest measured layout by the plan, ``best`` by the runs, and ``ratio`` the rate of the best over the
recommended one's. Results are appended to ``--out`` at once, with all that a prediction needs. Prints one JSON object.

Models are kept in ``--folder``, always at the same path, by which vLLM finds what it compiled in an earlier call. The
first run of each model in a call may compile and has ``--cold-s`` more. Runs with ``mps`` start the daemon of CUDA MPS, if the
host has it, and end it.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import tomli_w

from benchmarks.peers.pipeline import Results, heed_sigterm, run_penstock, told
from benchmarks.peers.work import PROMPT_TOKENS, TAIL_TOKENS, Work, long
from benchmarks.runs import fits
from benchmarks.shapes import ALL_SHAPES
from penstock.services.cli.plan import corrections, layout_of, preferences
from penstock.services.plan.hardware import GIB, GPUS, parse_cluster
from penstock.services.plan.layouts import Planner
from penstock.services.plan.measured import Corrections, Measured, measured
from penstock.services.plan.shapes import from_config
from penstock.services.plan.workload import Lengths, Workload, workload_of
from penstock.shared.errors import SettingsError
from penstock.shared.preflight.node import mps_answers
from penstock.shared.process.gpus import VISIBLE
from penstock.shared.settings import SETTINGS_FILE, Settings, load, loads

BAR = 0.15
"""Deviation."""
_SHARES = {1: 0.25, 2: 0.35, 3: 0.4}
"""Of the GPU's memory for vLLM, by the number of engines, so that the trainer fits beside on 80 GB."""
_OWN_SHARE = 0.5
"""Where replicas have GPUs of their own."""
_START_S, _LOAD_S, _TURNS_S = 75.0, 1.8, 110.0
"""Of a run until its second step, with so much for each GiB of the model, and more of one with turns, whose first switches
allocate pinned memory: as 7B took on two GPUs (benchmarks/results/2026-11-27-layouts-two-7b-turns-h200.json)."""
_WRITE_S = 1.5
"""Of a model, for each GiB (benchmarks/results/2026-11-30-mixture-start-h200.json)."""
_MPS = "nvidia-cuda-mps-control"
_NO_MPS = f"expected the daemon of CUDA MPS, found none: install {_MPS}"
_PACKAGES = ("torch", "vllm", "deepspeed", "transformers")


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A run; on one GPU, if nothing else is said."""

    shape: str = "0.5b"
    mode: Literal["turns", "at once", "separate"] = "turns"
    ranks: int = 1
    """Of the trainer, each on a GPU."""
    replicas: int = 0
    """With GPUs of their own."""
    tensor_parallel: int = 1
    """GPUs of a replica in turn."""
    max_lag: int = 1
    groups: int = 32
    group_size: int = 8
    tokens: int = 512
    mean_tokens: int = 0
    """Of lengths of a geometric distribution, before they are cut; 0: all completions have ``tokens``."""
    engines: int = 1
    mps: bool = False
    steps: int = 9
    micro_batch_tokens: int = 32_768
    share: float = 0.0
    """Of the GPU's memory for vLLM; 0: as others have."""
    more: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Other settings."""

    def flags(self, *, toy: bool) -> list[str]:
        """Return the flags of ``penstock up``."""
        own = self.mode == "separate"
        replicas = self.replicas if own else self.ranks // self.tensor_parallel
        values: dict[str, object] = {
            "algorithm.groups_per_step": self.groups,
            "sampling.group_size": self.group_size,
            "sampling.max_new_tokens": self.tokens,
            "rollout.max_groups": math.ceil(2 * self.groups / replicas),
            "rollout.replicas": replicas,
            "trainer.ranks": self.ranks,
            "trainer.micro_batch_tokens": self.micro_batch_tokens,
        }
        if not toy:
            values["rollout.engines_per_gpu"] = self.engines
            values["rollout.vllm.tensor_parallel_size"] = self.tensor_parallel
            values["rollout.vllm.gpu_memory_utilization"] = self.share or (_OWN_SHARE if own else _SHARES[self.engines])
        if not toy or self.mode == "at once":
            values["trainer.gpus"] = list(range(self.ranks))
            values["rollout.gpus"] = [self.ranks * own + number for number in range(replicas * self.tensor_parallel)]
        if self.mode == "turns":
            values["placement.mode"] = "shared"
        values |= {} if toy else self.more
        return [f"--{name}={value}" for name, value in values.items()]

    @property
    def gpus(self) -> int:
        """Return how many GPUs it needs."""
        return self.ranks + self.replicas * self.tensor_parallel

    @property
    def lengths(self) -> Lengths:
        """Return those of the completions."""
        if not self.mean_tokens:
            return Lengths(float(self.tokens), self.tokens, 0.0)
        return fits.geometric(self.mean_tokens, self.tokens)


_FOUR: Mapping[str, Any] = {"groups": 48, "steps": 13}
_TAIL: Mapping[str, Any] = {"mean_tokens": 800, "tokens": 2048, "max_lag": 2, "steps": 14}
_LARGE: Mapping[str, Any] = {
    "shape": "7b", "steps": 8, "micro_batch_tokens": 8192,
    "more": {"trainer.zero_stage": 3, "trainer.optimizer": "adamw_8bit", "trainer.gradient_checkpointing": "true",
             "weights.snapshots": "sharded"},
}  # fmt: skip
_LARGE_IN_TURN = {
    **_LARGE,
    "more": {
        **_LARGE["more"],
        "trainer.zero_stage": 1,
        "weights.snapshots": "whole",
        "rollout.vllm.gpu_memory_utilization": 0.5,
    },
}


def _mixture(expert_parallel: int, zero_stage: int = 1, *, in_turn: bool = False) -> Mapping[str, Any]:
    """Return a 30B mixture on GPUs of 141 GB. States of 32 bits would not fit on four of them, and offloaded take 512 GiB of
    a host."""
    more = {
        "trainer.zero_stage": zero_stage, "trainer.expert_parallel": expert_parallel, "trainer.optimizer": "adamw_8bit",
        "trainer.gradient_checkpointing": "true", "weights.snapshots": "whole" if in_turn else "sharded",
    }  # fmt: skip
    share = 0.27 if in_turn else 0.5
    return {"shape": "30b-a3b", "steps": 8, "micro_batch_tokens": 8192, "share": share, "more": more}


_ALONE = {**_LARGE, "more": {**_LARGE["more"], "trainer.zero_stage": 1, "weights.snapshots": "whole"}}


WORKS: Mapping[str, Mapping[str, Configuration]] = {
    "one": {
        "turns": Configuration(),
        "turns-lag-0": Configuration(max_lag=0, steps=7),
        "turns-short": Configuration(tokens=128, steps=15),
        "turns-long": Configuration(tokens=1024, steps=7),
        "turns-more-groups": Configuration(groups=64, steps=9),
        "turns-small-groups": Configuration(group_size=4),
        "turns-tail": Configuration(mean_tokens=800, tokens=2048, steps=7),
        "at-once-1": Configuration(mode="at once", mps=True, steps=12, micro_batch_tokens=16_384),
        "at-once-3": Configuration(mode="at once", engines=3, mps=True, steps=12, micro_batch_tokens=16_384),
        "turns-1.5b": Configuration(shape="1.5b", micro_batch_tokens=16_384, steps=11),
    },
    "four": {
        "separate-2-2": Configuration(mode="separate", ranks=2, replicas=2, engines=2, mps=True, **_FOUR),
        "at-once-2-engines": Configuration(
            mode="at once", ranks=4, engines=2, mps=True, micro_batch_tokens=16_384, **_FOUR
        ),
        "turns": Configuration(ranks=4, **_FOUR),
        "separate-1-3": Configuration(mode="separate", ranks=1, replicas=3, engines=2, mps=True, **_FOUR),
        "at-once": Configuration(mode="at once", ranks=4, mps=True, micro_batch_tokens=16_384, **_FOUR),
        "separate-3-1": Configuration(mode="separate", ranks=3, replicas=1, engines=2, mps=True, **_FOUR),
        "turns-2-engines": Configuration(ranks=4, engines=2, mps=True, **_FOUR),
        "separate-2-2-1-engine": Configuration(mode="separate", ranks=2, replicas=2, **_FOUR),
    },
    "two-tail": {
        "separate-1-1": Configuration(mode="separate", replicas=1, **_TAIL),
        "turns": Configuration(ranks=2, **_TAIL),
        "at-once-2-engines": Configuration(
            mode="at once", ranks=2, engines=2, mps=True, micro_batch_tokens=16_384, **_TAIL
        ),
        "separate-1-1-2-engines": Configuration(mode="separate", replicas=1, engines=2, mps=True, **_TAIL),
    },
    "two-7b": {
        "separate-1-1": Configuration(mode="separate", replicas=1, **_ALONE),
        "turns": Configuration(ranks=2, **_LARGE_IN_TURN),
    },
    "four-7b": {
        "separate-2-2": Configuration(mode="separate", ranks=2, replicas=2, **_LARGE),
        "turns": Configuration(ranks=4, **_LARGE_IN_TURN),
        "turns-of-2": Configuration(ranks=4, tensor_parallel=2, **_LARGE_IN_TURN),
    },
    "eight-7b": {
        "separate-4-4": Configuration(mode="separate", ranks=4, replicas=4, **_LARGE),
        "turns": Configuration(ranks=8, **_LARGE_IN_TURN),
        "separate-2-6": Configuration(mode="separate", ranks=2, replicas=6, **_LARGE),
        "separate-6-2": Configuration(mode="separate", ranks=6, replicas=2, **_LARGE),
        "separate-4-2-of-2": Configuration(mode="separate", ranks=4, replicas=2, tensor_parallel=2, **_LARGE),
        "turns-of-2": Configuration(ranks=8, tensor_parallel=2, **_LARGE_IN_TURN),
    },
    "eight-30b-a3b": {
        "separate-4-2-of-2": Configuration(mode="separate", ranks=4, replicas=2, tensor_parallel=2, **_mixture(4)),
        "turns-of-2": Configuration(ranks=8, tensor_parallel=2, **_mixture(8, in_turn=True)),
        "separate-4-4": Configuration(mode="separate", ranks=4, replicas=4, **_mixture(4)),
        "separate-4-2-of-2-undivided": Configuration(
            mode="separate", ranks=4, replicas=2, tensor_parallel=2, **_mixture(1, 3)
        ),
        "separate-6-1-of-2": Configuration(mode="separate", ranks=6, replicas=1, tensor_parallel=2, **_mixture(2, 3)),
    },
}
"""The first of each calibrates; the others in the order of what they tell, as time may end."""


# ---------------------------------------------------------------- runs


class Runs:
    """Real runs on this host, one after the other."""

    def __init__(self, folder: Path, *, toy: bool, limit_s: float, cold_s: float) -> None:
        self._folder, self._toy, self._limit_s, self._cold_s = folder, toy, limit_s, cold_s
        self._works: dict[tuple[str, int], Work] = {}
        self._started: set[tuple[object, ...]] = set()
        self._gpu = ("cpu", 16 * 2.0**30) if toy else _gpu()

    def row(self, name: str, of: Configuration) -> dict[str, Any]:
        """Return a run's settings and steps, or the error with which it ended."""
        began_s, device = time.monotonic(), self._gpu[0]
        about = {"name": name, "device": device, "host": Results(None).host, "shape": of.shape}
        try:
            with _mps(on=of.mps and not self._toy) as mps:
                if of.mps and not (self._toy or mps) and of.engines > 1:
                    raise SystemExit(_NO_MPS)
                made = self._run(name, of)
        except SystemExit as error:
            return {**about, "error": str(error)[-4000:]}
        return {
            **about,
            **made,
            "gpus": _words(device, self._gpu[1], of.gpus),
            "memory_bytes": self._gpu[1],
            "mps": mps,
            "prompt_tokens": PROMPT_TOKENS,
            "lengths": dataclasses.asdict(of.lengths),
            "seconds": round(time.monotonic() - began_s, 1),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
            "versions": {"python": platform.python_version(), **dict(_versions())},
        }

    def _run(self, name: str, of: Configuration) -> dict[str, Any]:
        # vLLM compiles again for engines whose memory can be freed, and for other numbers of ranks
        work, started = self._work(of), (of.shape, of.mean_tokens, of.engines, of.tensor_parallel, of.mode == "turns")
        cold_s = 0.0 if started in self._started else self._cold_s
        self._started.add(started)
        with tempfile.TemporaryDirectory(prefix="penstock-bench-plan-") as made:
            folder = Path(made)
            flags = of.flags(toy=self._toy)
            *_, gpus = run_penstock(folder, work, of.steps, of.max_lag, flags, self._limit_s + cold_s, name)
            lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
            settings = tomllib.loads((folder / name / SETTINGS_FILE).read_text(encoding="utf-8"))
        return {"settings": settings, "steps": [_numbers(line) for line in lines], "gpu": gpus}

    def _work(self, of: Configuration) -> Work:
        """Return model and prompts, written by a process that frees the GPU."""
        key = of.shape, of.mean_tokens
        if key not in self._works:
            where = self._folder, of.shape, "cpu" if self._toy else "cuda", "auto"
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                self._works[key] = pool.submit(long, *where, mean_tokens=of.mean_tokens).result()
        return self._works[key]


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if isinstance(value, int | float)}


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            yield package, version(package)


def _gpu() -> tuple[str, float]:
    """Return the first GPU's name and bytes, by nvidia-smi, which leaves it free."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        first = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise SystemExit(f"expected a GPU, found: {error}: give --toy or --compare") from error
    name, mebibytes = first.rsplit(",", 1)
    return name.strip(), float(mebibytes) * 2**20


def _words(device: str, memory_bytes: float, count: int) -> str:
    """Return ``count`` of the device as --gpus of ``penstock plan`` has them."""
    known = next((name for name in GPUS if name in device.replace("-", " ").split()), "")
    return f"{count}x{known or f'{memory_bytes / 2**30:.1f}GiB'}"


def cluster_words(count: int) -> str:
    """Return ``count`` of this host's GPUs as --gpus of ``penstock plan`` has them."""
    return _words(*_gpu(), count)


@contextlib.contextmanager
def _mps(*, on: bool) -> Iterator[bool]:
    """Yield whether CUDA MPS answers.

    With ``on`` its daemon is started, unless one answers or the host has none; else processes do not find a daemon.
    """
    if on and (mps_answers() or shutil.which(_MPS) is None):
        yield mps_answers()
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder, contextlib.ExitStack() as around:
        paths = {f"CUDA_MPS_{name}_DIRECTORY": f"{folder}/{name.lower()}" for name in ("PIPE", "LOG")}
        for path in paths.values():
            Path(path).mkdir(mode=0o700)
        around.enter_context(_variables(paths))
        if on:
            # it would number the GPUs that it sees anew, and its clients would not find theirs
            every = {name: value for name, value in os.environ.items() if name != VISIBLE}
            subprocess.run([_MPS, "-d"], env=every, timeout=20, check=True, stdout=subprocess.DEVNULL)
            around.callback(_end_mps)
        yield mps_answers()


def _end_mps() -> None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([_MPS], input=b"quit\n", capture_output=True, timeout=30, check=False)


@contextlib.contextmanager
def _variables(more: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables meanwhile."""
    before = {name: os.environ.get(name) for name in more}
    os.environ |= more
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ |= {name: value} if value is not None else {}


# ---------------------------------------------------------------- predictions


def checked(of: Configuration, name: str, folder: Path, machine: fits.Machine) -> dict[str, Any]:
    """Return what a run needs of ``machine`` by the plan, its seconds, and why ``penstock up`` would refuse it."""
    made = long(folder, of.shape, "cuda", "auto", mean_tokens=of.mean_tokens, weights=False)
    config = folder / f"{name}.toml"
    config.write_text(tomli_w.dumps(told(made, folder, name, of.steps, of.max_lag)))
    try:
        settings = load(config, of.flags(toy=False), environment={})
    except SettingsError as error:
        return {"name": name, "refused": str(error)}
    needed = fits.needs(settings, machine, fits.workload(settings, PROMPT_TOKENS, of.lengths))
    return {
        "name": name,
        **needed.as_json(),
        "seconds": round(
            _START_S + _LOAD_S * needed.model_bytes / GIB + _TURNS_S * (of.mode == "turns") + of.steps * needed.step_s
        ),
        "over": needed.over(),
        "refused": fits.certain(settings, machine, needed, made=False),
    }


def compared(rows: Sequence[Mapping[str, Any]], layouts: Mapping[str, Configuration]) -> dict[str, Any]:
    """Return predictions beside measurements; rows of layouts that do not exist any more are skipped."""
    rows = [row for row in rows if row["name"] in layouts]
    done = {row["name"]: row for row in rows if "error" not in row}
    rates = {name: _figures(row).samples_per_s for name, row in done.items()}
    calibrating = next(iter(layouts))
    result: dict[str, Any] = {
        "samples_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "uncalibrated": _deviations(done, rates, Corrections()),
        "failed": {row["name"]: row["error"][-600:] for row in rows if row["name"] not in done},
    }
    if calibrating not in done:
        return result
    corrected = corrections_of(done[calibrating])
    predicted = {name: predict(row, corrected) for name, row in done.items()}
    best = max(rates, key=lambda name: rates[name])
    planned = [name for name in done if layouts[name].mode != "turns" or layouts[name].engines == 1]
    recommended = max(planned, key=lambda name: predicted[name])
    deviations = _deviations(done, rates, corrected)
    return {
        **result,
        "corrections": {name: round(value, 3) for name, value in dataclasses.asdict(corrected).items()},
        "calibrated": deviations,
        "within": sum(abs(deviation) <= BAR for deviation in deviations.values()),
        "recommended": recommended,
        "best": best,
        "ratio": round(rates[best] / rates[recommended], 3),
    }


def _deviations(
    rows: Mapping[str, Mapping[str, Any]], rates: Mapping[str, float], corrected: Corrections
) -> dict[str, float]:
    return {name: round(predict(row, corrected) / rates[name] - 1, 3) for name, row in rows.items()}


def predict(row: Mapping[str, Any], corrected: Corrections) -> float:
    """Return samples/s of a run by its settings and ``corrected`` rates."""
    settings, work = settings_of(row), _workload(row)
    planner = Planner(work, parse_cluster(row["gpus"]), preferences(settings), corrected)
    rung = _figures(row).rung
    return work.samples / planner.as_set(layout_of(settings, rung, mps=row["mps"])).pace.step_s


def corrections_of(row: Mapping[str, Any]) -> Corrections:
    """Return the rates that a run calibrates."""
    return corrections(_figures(row), settings_of(row), _workload(row), parse_cluster(row["gpus"]), mps=row["mps"])


def _figures(row: Mapping[str, Any]) -> Measured:
    return measured(row["steps"], settings_of(row).algorithm.max_lag)


def settings_of(row: Mapping[str, Any]) -> Settings:
    """Return those of a run."""
    return loads(tomli_w.dumps(row["settings"]), row["name"], environment={})


def _workload(row: Mapping[str, Any]) -> Workload:
    lengths = Lengths(**{**row["lengths"], "sample": tuple(row["lengths"]["sample"])})
    shape = from_config(ALL_SHAPES[row["shape"]], row["shape"])
    work = workload_of(settings_of(row), "0.5b")  # whose policy may be elsewhere
    return dataclasses.replace(work, shape=shape, prompt_tokens=row["prompt_tokens"], lengths=lengths)


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Return the rows in a file of JSON lines, or in one of benchmarks/results."""
    text = file.read_text(encoding="utf-8")
    try:
        return list(json.loads(text)["rows"])
    except (ValueError, KeyError):
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def _toy(of: Configuration) -> Configuration:
    """Return a small one, of few steps."""
    less = dataclasses.replace(of, groups=of.groups // 8, group_size=of.group_size // 2, tokens=of.tokens // 64)
    tail = TAIL_TOKENS["cpu"] if of.mean_tokens else 0
    return dataclasses.replace(less, shape="tiny", engines=1, steps=5, micro_batch_tokens=1024, mean_tokens=tail)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=tuple(WORKS), default="one")
    parser.add_argument("--only", default="", help="some layouts, separated by commas")
    parser.add_argument("--out", type=Path, help="results are appended here at once")
    parser.add_argument("--compare", type=Path, help="predict the results in this file again, without a GPU")
    parser.add_argument("--check", default="", metavar="GPUS", help="run nothing; as --gpus of penstock plan")
    parser.add_argument("--disk-gib", type=float, default=0.0, help="free, for --check; default: this machine's")
    parser.add_argument("--limit-s", type=float, default=420.0, help="for one run, its start included")
    parser.add_argument("--cold-s", type=float, default=60.0, help="more, for the first run of a model")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "penstock-layouts",
        help="keep the models here, with which later calls need not compile again",
    )
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU")
    return parser.parse_args()


def main() -> None:
    """Run and print."""
    arguments = _parse()
    heed_sigterm()
    layouts = WORKS[arguments.work]
    if arguments.compare:
        print(json.dumps(compared(rows_of(arguments.compare), layouts)))
        return
    names = arguments.only.split(",") if arguments.only else list(layouts)
    if unknown := set(names) - set(layouts):
        raise SystemExit(f"expected some of {', '.join(layouts)}, found {', '.join(sorted(unknown))}: change --only")
    if arguments.check:
        cluster = parse_cluster(arguments.check)
        machine = fits.Machine(cluster, arguments.disk_gib * GIB or fits.free_bytes(arguments.folder))
        with tempfile.TemporaryDirectory(prefix="penstock-check-") as folder:
            rows = [checked(layouts[name], name, Path(folder), machine) for name in names]
        written_s = _WRITE_S * max(row.get("model_gib", 0.0) for row in rows)
        seconds = sum(row.get("seconds", 0.0) for row in rows) + arguments.cold_s + written_s
        print(json.dumps({"rows": rows, "seconds": round(seconds)}))
        return
    rows = rows_of(arguments.out) if arguments.out and arguments.out.exists() else []
    runs = Runs(arguments.folder, toy=arguments.toy, limit_s=arguments.limit_s, cold_s=arguments.cold_s)
    for name in names:
        of = _toy(layouts[name]) if arguments.toy else layouts[name]
        row = runs.row(name, of)
        rows.append(row)
        rate = row["error"][:300] if "error" in row else f"{_figures(row).samples_per_s:.1f} samples/s"
        print(f"{name}: {rate}", file=sys.stderr, flush=True)
        if arguments.out is not None:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print(json.dumps({"work": arguments.work, **compared(rows, layouts)}))


if __name__ == "__main__":
    main()
