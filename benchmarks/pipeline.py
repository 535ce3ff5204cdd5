r"""The same work asynchronous, synchronous (``max_lag = 0``) and by TRL's GRPOTrainer, alternately.

The demo's work or long answers (``pipeline_work``). Rates are samples / seconds between commits, after a third of the
steps.

    python -m benchmarks.pipeline --steps 60 --rounds 3
    python -m benchmarks.pipeline --work long --shape 0.5b --device cuda --steps 15 --rounds 1    # two GPUs
    python -m benchmarks.pipeline --work long --shape 7b --device cuda --steps 6 --rounds 1 --modes async \
        --trainer.gradient_checkpointing=true --trainer.optimizer=adamw_8bit

On GPUs each system trains on one and generates by vLLM on the other. Other flags go to ``penstock up``, such as
``--rollout.engines_per_gpu=auto``. ``--work tail`` has completions of very different lengths.

On one GPU, in turn: ``shared`` is ``placement.mode = "shared"`` with ``max_lag = 1``, ``colocate`` TRL's vLLM in the
trainer's process (``vllm_mode = "colocate"``, without sleep mode, which a small model does not need)::

    python -m benchmarks.pipeline --work long --shape 0.5b --device cuda --steps 15 --rounds 1 --modes shared colocate

Prints seconds per step by phase, the first mode's rate over each other's (``async_over_trl``, ``async_over_sync``;
medians), ``samples_per_s``, and GPUs' ``busy`` and ``idle`` share. A system that is not done after ``--limit-s`` is measured by the steps it made.

``--results FILE`` collects the rates of several calls on one host, so that each mode can be called alone. ``--folder``
keeps model and prompts between them, and with the same path vLLM's compiled code, which otherwise costs each call about a
minute::

    call="python -m benchmarks.pipeline --work tail --shape 0.5b --device cuda --rounds 1"
    $call --folder /tmp/tail --results /tmp/tail.json --modes sync
    $call --folder /tmp/tail --results /tmp/tail.json --modes async
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.gpu_meter import gpu_meter
from benchmarks.pipeline_work import MODEL_TOKENS, ROOT, Work, arithmetic, long
from benchmarks.shapes import SHAPES

PHASES = ("wait", "forward_backward", "optimizer", "snapshot", "commit", "checkpoint")
_SERVER_S = 240
"""Seconds for vLLM's server to start."""
_LAGS = {"async": 1, "sync": 0, "shared": 1}
_ONE_GPU_SHARE = 0.4
"""Of one GPU's memory for vLLM, weights included."""


def run_penstock(
    folder: Path, work: Work, steps: int, max_lag: int, flags: Sequence[str], limit_s: float, name: str = ""
) -> tuple[float, dict[str, float], dict[str, dict[str, float]]]:
    """Return samples per second, mean seconds by phase, and GPU shares."""
    name, settings = name or f"lag-{max_lag}", work.settings
    told = {
        "run": {**settings.get("run", {}), "id": name, "folder": str(folder), "steps": steps},
        "algorithm": {**settings["algorithm"], "max_lag": max_lag},
        "trainer": {**settings["trainer"], "checkpoint_every_steps": steps},
    }
    config = folder / f"{name}.toml"
    config.write_text(tomli_w.dumps({**settings, **told}))
    command = [sys.executable, "-m", "services.cli", "up", str(config), *flags]
    with gpu_meter() as meter:
        try:
            _run(command, folder, limit_s, wrong=lambda: _guard(folder / name))
        except NotDone as late:
            print(f"({late.limit_s:.0f} s are over)  ", end="", flush=True)
            if len(_steps(folder / name)) < 4:
                raise SystemExit(f"{late}\n{logs_of(folder / name)}") from late
    lines = _steps(folder / name)
    steps = min(steps, len(lines))
    measured = lines[max(2, steps // 3) - 1 :]
    seconds = measured[-1]["finished_at_s"] - measured[0]["finished_at_s"]
    phases = {phase: _mean(measured[1:], f"phase_{phase}_s") for phase in PHASES}
    phases["generate (each group, in parallel)"] = _mean(measured[1:], "generate_s_mean")
    phases["score (each group, in parallel)"] = _mean(measured[1:], "score_s_mean")
    phases["step"] = seconds / (len(measured) - 1)
    gpus = meter.figures(measured[0]["finished_at_s"], measured[-1]["finished_at_s"])
    return sum(line["samples"] for line in measured[1:]) / seconds, phases, gpus


@contextlib.contextmanager
def _kept(run: Path, folder: Path | None) -> Iterator[None]:
    """Copy the run's text files into ``folder``, also after a failure."""
    try:
        yield
    finally:
        if folder is not None:
            for file in (*run.glob("*.json*"), *run.glob("*.toml"), *run.glob("logs/*.log")):
                to = folder / run.name / file.relative_to(run)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, to)


class NotDone(SystemExit):
    """A run did not end in time."""

    limit_s = 0.0


def logs_of(run: Path) -> str:
    """Return the end of each process's log."""
    logs = sorted((run / "logs").glob("*.log"))
    return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def _steps(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def _mean(lines: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.fmean(line.get(name, 0.0) for line in lines)


def _shared(work: Work) -> list[str]:
    """Return the flags of a run whose trainer and replica take turns on the first GPU, or on the CPU."""
    gpu = ["--rollout.gpus=[0]", f"--rollout.vllm.gpu_memory_utilization={_ONE_GPU_SHARE}"]
    return ["--placement.mode=shared", *(gpu if work.served else ())]


def run_trl(folder: Path, work: Work, steps: int, limit_s: float, *, colocate: bool = False) -> float:
    """Return the baseline's samples per second; with ``colocate``, vLLM generates in the trainer's process."""
    command = [sys.executable, "-m", "benchmarks.trl_grpo", *work.arguments(steps)]
    with contextlib.ExitStack() as around:
        environment = {}
        if colocate:
            command += ["--vllm-share", str(_ONE_GPU_SHARE), "--vllm-tokens", str(MODEL_TOKENS)]
            environment["CUDA_VISIBLE_DEVICES"] = "0"
        elif work.served:
            command += ["--vllm-url", around.enter_context(vllm_server(folder, work.model, MODEL_TOKENS))]
            environment["CUDA_VISIBLE_DEVICES"] = "0"
        output = _run(command, folder, limit_s, environment)
    return float(json.loads(output.strip().splitlines()[-1])["samples_per_s"])


@contextlib.contextmanager
def vllm_server(folder: Path, model: str, context_tokens: int) -> Iterator[str]:
    """Serve ``model`` on the second GPU for TRL; yield the URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {"--model": model, "--dtype": "bfloat16", "--max-model-len": str(context_tokens), "--max-num-seqs": "512"}
    options |= {"--weight-transfer-config": '{"backend":"nccl"}', "--host": "127.0.0.1", "--port": str(port)}
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *(w for pair in options.items() for w in pair),
    ]
    environment = environment_with({"CUDA_VISIBLE_DEVICES": "1", "VLLM_SERVER_DEV_MODE": "1"})
    log = folder / "vllm-server.log"
    server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log.open("wb"), stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(server, f"{url}/health", log)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_for(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until_s = time.monotonic() + _SERVER_S
    while time.monotonic() < until_s and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    raise SystemExit(f"expected vLLM's server at {url} in {_SERVER_S} s, found none:\n{log.read_text()[-3000:]}")


def _guard(run: Path) -> str:
    events = run / "events.jsonl"
    whole = events.read_text().rpartition("\n")[0] if events.exists() else ""
    paused = (event for event in map(json.loads, whole.splitlines()) if event["fields"].get("action") == "pause")
    return next((event["detail"] for event in paused), "")


def _run(
    command: list[str],
    folder: Path,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    wrong: Callable[[], str] = str,
) -> str:
    """Return the output of ``command``; end it if ``wrong`` returns a message."""
    with tempfile.TemporaryFile("w+") as printed:
        until_s, failure, late = time.monotonic() + limit_s, "", False
        process = subprocess.Popen(
            command,
            cwd=_work(folder),
            env=environment_with(environment or {}),
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None and not failure:
                time.sleep(0.5)
                late = time.monotonic() > until_s
                failure = wrong() or (f"not done in {limit_s:.0f} s: raise --limit-s" if late else "")
        except KeyboardInterrupt:
            failure = "interrupted"
        if failure:
            process.terminate()
        code = process.wait(60)
        printed.seek(0)
        output = printed.read()
    if code != 0 or failure:
        sentence = f"{' '.join(command)} ended with {code}: {failure}\n{output[-4000:]}"
        if not late:
            raise SystemExit(sentence)
        error = NotDone(sentence)
        error.limit_s = limit_s
        raise error
    return output


def environment_with(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that imports this repository, and ``more``."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **more}


def _work(folder: Path) -> Path:
    for name in ("examples", "config"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    return folder


def main() -> None:
    """Run the three alternately, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=("arithmetic", "long", "tail"), default="arithmetic")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="tiny", help="of the model, with --work long or tail"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="with --work long or tail")
    parser.add_argument("--kernels", choices=("torch", "auto"), default="auto", help="trainer.kernels, on GPUs")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=(*_LAGS, "trl", "colocate"), default=["async", "sync", "trl"])
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds of one system's run")
    parser.add_argument("--keep", type=Path, help="folder for each run's metrics, events, memory and logs")
    parser.add_argument("--results", type=Path, help="file that collects the rates of several calls on this host")
    parser.add_argument("--folder", type=Path, help="keeps model and prompts of --work long or tail for later calls")
    arguments, flags = parser.parse_known_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the run, and keeps its files
    rates: dict[str, list[float]] = {mode: [] for mode in arguments.modes}
    kept = Results(arguments.results)
    phases: dict[str, dict[str, float]] = {}
    gpus: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-work-") as made:
        work = arithmetic()
        if arguments.work != "arithmetic":
            tail = arguments.work == "tail"
            place = arguments.folder or Path(made)
            place.mkdir(parents=True, exist_ok=True)
            work = long(place.resolve(), arguments.shape, arguments.device, arguments.kernels, tail=tail)
        for number in range(arguments.rounds):
            print(f"round {number + 1}: ", end="", flush=True)
            with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
                for mode, of_mode in rates.items():
                    if mode in _LAGS:
                        told = [*(_shared(work) if mode == "shared" else ()), *flags]
                        with _kept(Path(name) / mode, arguments.keep):
                            rate, phases[mode], gpus[mode] = run_penstock(
                                Path(name), work, arguments.steps, _LAGS[mode], told, arguments.limit_s, mode
                            )
                    else:
                        colocate = mode == "colocate"
                        rate = run_trl(Path(name), work, arguments.steps, arguments.limit_s, colocate=colocate)
                    of_mode.append(rate)
                    kept.add(work.name, mode, rate)
                    print(f"{mode} {rate:,.1f}/s  ", end="", flush=True)
            print()
    print(f"\n{'seconds a step':40s}" + "".join(f"{mode:>10s}" for mode in phases))
    for phase in next(iter(phases.values()), {}):
        print(f"{phase:40s}" + "".join(f"{seconds[phase]:10.4f}" for seconds in phases.values()))
    print(
        json.dumps(
            {
                "work": work.name,
                **_figures(kept.rates(work.name) or rates),
                "gpus": gpus,
                "flags": flags,
                "host": kept.host,
            }
        )
    )


class Results:
    """Rates of several calls on one host, in a file; without a file nothing is kept."""

    def __init__(self, file: Path | None) -> None:
        self.host = f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
        self._file = file
        self._rows: list[dict[str, Any]] = []
        if file is not None and file.exists():
            self._rows = [json.loads(line) for line in file.read_text().splitlines()]
        if any(row["host"] != self.host for row in self._rows):
            raise SystemExit(f"expected rates of this host in {file}, found another's: change --results")

    def add(self, work: str, mode: str, rate: float) -> None:
        """Append a rate."""
        if self._file is not None:
            self._rows.append({"host": self.host, "work": work, "mode": mode, "rate": rate})
            with self._file.open("a") as lines:
                lines.write(json.dumps(self._rows[-1]) + "\n")

    def rates(self, work: str) -> dict[str, list[float]]:
        """Return the rates of ``work``, by mode."""
        rates: dict[str, list[float]] = {}
        for row in self._rows:
            if row["work"] == work:
                rates.setdefault(row["mode"], []).append(row["rate"])
        return rates


def _figures(rates: dict[str, list[float]]) -> dict[str, object]:
    first = next(mode for mode in (*_LAGS, *rates) if mode in rates)
    ratios = {
        f"{first}_over_{over}": round(statistics.median(a / b for a, b in zip(rates[first], of_mode, strict=False)), 3)
        for over, of_mode in rates.items()
        if over != first
    }
    return {
        **ratios,
        "samples_per_s": {mode: round(statistics.median(of_mode), 1) for mode, of_mode in rates.items()},
        "rounds": len(next(iter(rates.values()))),
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
