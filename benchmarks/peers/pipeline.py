r"""The same work asynchronous, synchronous (``max_lag = 0``) and by TRL, alternately.

The demo's work, or that of ``benchmarks.peers.work``. Rates are samples / seconds between commits of steady steps: after a
third of them, without the last ``max_lag``, in multiples of ``max_lag + 1`` (``penstock.services.plan.measured.steady``); TRL's
after a third.

    python -m benchmarks.peers.pipeline --steps 60 --rounds 3
    python -m benchmarks.peers.pipeline --work long --shape 0.5b --device cuda --steps 15 --rounds 1    # two GPUs
    python -m benchmarks.peers.pipeline --work long --shape 7b --device cuda --steps 6 --rounds 1 --modes async \
        --trainer.gradient_checkpointing=true --trainer.optimizer=adamw_8bit

On GPUs each system trains on one and generates by vLLM on the other. Other flags go to ``penstock up``, such as
``--rollout.engines_per_gpu=auto``. ``trl`` is TRL's GRPOTrainer, ``trl_async`` its AsyncGRPOTrainer
(``benchmarks.peers.trl_async``, on GPUs only). Each work against the latter on two GPUs, Penstock under CUDA MPS with
trainer ranks and replicas on both (``$both``), but at 7B on one each, as TRL::

    call="python -m benchmarks.peers.pipeline --device cuda --rounds 1 --folder /tmp/models"
    both="--rollout.replicas=2 --rollout.gpus=[0,1] --trainer.ranks=2 --trainer.gpus=[0,1] --rollout.engines_per_gpu=2"
    both="$both --rollout.vllm.gpu_memory_utilization=0.35 --algorithm.max_lag=2 --rollout.max_groups=48"
    for work in long tail tool; do
        $call --shape 0.5b --work $work --modes async --steps 15 $both      # tool: --episodes.replicas=4
        $call --shape 0.5b --work $work --modes trl_async --steps 12
    done
    $call --shape 7b --work spread --modes async --steps 10
    $call --shape 7b --work spread --modes trl_async --steps 8

At 7B Penstock's AdamW has 32-bit master weights and moments of 8 bits, TRL's bfloat16 weights and moments alone, which
take less time and about as much memory. TRL recomputes all activations, its default, Penstock those that do not fit.

On one GPU, in turn: ``shared`` is ``placement.mode = "shared"`` with ``max_lag = 1``, ``colocate`` TRL's vLLM in the
trainer's process (``vllm_mode = "colocate"``, without sleep mode, which a small model does not need). With
``colocate_async``, TRL's AsyncGRPOTrainer and vLLM's server use the GPU at the same time, and weights are handed over by
CUDA IPC; start the daemon of CUDA MPS before, so that their kernels run side by side (docs/placement.md)::

    python -m benchmarks.peers.pipeline --work long --shape 0.5b --device cuda --steps 15 --rounds 1 \
        --modes shared colocate colocate_async

Prints seconds per step by phase, the first mode's rate over each other's (``async_over_trl``, ``async_over_sync``;
medians), ``samples_per_s``, ``tokens_per_sample`` of the last run, without which rates of samples of different lengths
say nothing, its ``measured_steps``, GPUs' ``busy`` and ``idle`` share, and what TRL printed (``trl_figures``). A run is ended once its last step is measured, before
its last checkpoint and its export. A system that is not done after ``--limit-s`` is measured by the steps it made, and
the state of each process is printed. After SIGTERM the figures so far are printed, with ``complete`` false and, in
``partial``, those of the run that was ended.

``--results FILE`` collects the rates of several calls on one host, so that each mode can be called alone; Penstock's with
other flags are not mixed. ``--folder`` keeps model and prompts between them, and as vLLM keeps compiled code by the path
of the model, each call but the first has about a minute less. It has a folder for each work, shape and device::

    call="python -m benchmarks.peers.pipeline --work tail --shape 0.5b --device cuda --rounds 1"
    $call --folder /tmp/models --results /tmp/tail.json --modes sync
    $call --folder /tmp/models --results /tmp/tail.json --modes async
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import tomli_w

from benchmarks.gpu_meter import gpu_meter, only
from benchmarks.peers.trl_async import SERVER_SEQUENCES
from benchmarks.peers.work import ROOT, TAIL_TOKENS, Work, arithmetic, long, spread, tool, work_folder
from benchmarks.shapes import SHAPES
from penstock.services.plan.measured import steady
from penstock.shared.settings import SETTINGS_FILE, load

PHASES = ("wait", "forward_backward", "optimizer", "snapshot", "commit", "checkpoint")
_SERVER_S = 240
"""Seconds for vLLM's server to start."""
_STOP_S, _INTERRUPTED_STOP_S = 10.0, 1.0
"""Seconds in which a command ends in order before a second signal, at which a run ends at once."""
_STATUS_S = 30.0
_LEAST_STEPS = 4
"""Of a run that is measured although it did not end."""
_KEEP_EVERY_S = 10.0
_LAGS = {"async": 1, "sync": 0, "shared": 1}
_ONE_GPU_SHARE = 0.4
"""Of one GPU's memory for vLLM, weights included."""
_TRL = ("trl", "colocate", "trl_async", "colocate_async")


def run_penstock(
    folder: Path, work: Work, steps: int, max_lag: int, flags: Sequence[str], limit_s: float, name: str = ""
) -> tuple[float, dict[str, float], dict[str, dict[str, float]]]:
    """Return samples per second, mean seconds by phase, and GPU shares; the run is ended after its last step."""
    name = name or f"lag-{max_lag}"
    config = folder / f"{name}.toml"
    config.write_text(tomli_w.dumps(told(work, folder, name, steps, max_lag)))
    command = [sys.executable, "-m", "penstock.services.cli", "up", str(config), *flags]
    watched = _Run(folder / name, steps)
    with gpu_meter() as meter:
        try:
            _run(command, folder, limit_s, watched=watched)
        except NotDone as late:
            print(f"({late.limit_s:.0f} s are over)  ", end="", flush=True)
            if len(steps_of(folder / name)) < _LEAST_STEPS:
                raise SystemExit(f"{late}\n{logs_of(folder / name)}\n{late.states}") from late
            print(f"\n{late.states}", file=sys.stderr, flush=True)
    rate, phases, (begin_s, end_s) = _measured(*_counted(folder / name, steps))
    return rate, phases, meter.figures(begin_s, end_s)


def told(work: Work, folder: Path, name: str, steps: int, max_lag: int) -> dict[str, Any]:
    """Return the settings of a run of ``work`` in ``folder``."""
    settings = work.settings
    return {
        **settings,
        "run": {**settings.get("run", {}), "id": name, "folder": str(folder), "steps": steps},
        "algorithm": {**settings["algorithm"], "max_lag": max_lag},
        "trainer": {**settings["trainer"], "checkpoint_every_steps": steps},
    }


def _measured(lines: Sequence[dict[str, Any]], max_lag: int) -> tuple[float, dict[str, float], tuple[float, float]]:
    """Return samples per second and mean seconds by phase of the steady steps, and the times between which."""
    measured = _steady(lines, max_lag)
    seconds = measured[-1]["finished_at_s"] - measured[0]["finished_at_s"]
    phases = {phase: _mean(measured[1:], f"phase_{phase}_s") for phase in PHASES}
    phases["generate (each group, in parallel)"] = _mean(measured[1:], "generate_s_mean")
    phases["score (each group, in parallel)"] = _mean(measured[1:], "score_s_mean")
    phases["step"] = seconds / (len(measured) - 1)
    rate = sum(line["samples"] for line in measured[1:]) / seconds
    return rate, phases, (measured[0]["finished_at_s"], measured[-1]["finished_at_s"])


def _steady(lines: Sequence[dict[str, Any]], max_lag: int) -> Sequence[dict[str, Any]]:
    """Return the last step that does not count, and those that do, by the plan's rule; the first two never do."""
    counted = steady(len(lines), max_lag)
    first = max(2, counted.start)
    return lines[first - 1 : counted.stop if counted.stop > first else None]


def _counted(run: Path, steps: int) -> tuple[list[dict[str, Any]], int]:
    """Return a run's lines, and its ``max_lag`` if it made all ``steps``: the last ones of others are like those before."""
    lines = steps_of(run)[:steps]
    return lines, load(run / SETTINGS_FILE, environment={}).algorithm.max_lag if len(lines) == steps else 0


@contextlib.contextmanager
def _kept(run: Path, folder: Path | None) -> Iterator[None]:
    """Copy the run's text files into ``folder`` every ten seconds and at the end, also after a failure."""
    if folder is None:
        yield
        return
    ended, to = threading.Event(), _free_name(folder, run.name)

    def copy_again() -> None:
        while not ended.wait(_KEEP_EVERY_S):
            copy_run(run, to)

    thread = threading.Thread(target=copy_again, name="keep", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        copy_run(run, to)


def _free_name(folder: Path, name: str) -> Path:
    """Return a folder for a run of ``name`` that no earlier one has."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in map(folder.joinpath, names) if not path.exists())


def copy_run(run: Path, folder: Path) -> None:
    """Copy the text files of a run into ``folder``."""
    for file in (*run.glob("*.json*"), *run.glob("*.toml"), *run.glob("logs/*.log")):
        to = folder / file.relative_to(run)
        to.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # coordinator.json is removed at the end
            shutil.copyfile(file, to)


class NotDone(SystemExit):
    """A run did not end in time."""

    limit_s = 0.0
    output = ""
    states = ""
    """Of its processes, when the time was over."""


class _Command:
    """A command that ends by itself."""

    def done(self) -> bool:
        """Return whether it can be ended because all is measured."""
        return False

    def wrong(self) -> str:
        """Return why it has to be ended, or ""."""
        return ""

    def states(self) -> str:
        """Return the state of each of its processes."""
        return ""


class _Run(_Command):
    """``penstock up``, whose last checkpoint and export are not waited for."""

    def __init__(self, run: Path, steps: int) -> None:
        self._run, self._steps = run, steps

    def done(self) -> bool:
        return len(steps_of(self._run)) >= self._steps

    def wrong(self) -> str:
        """Return why a guard paused the run, or ""."""
        events = self._run / "events.jsonl"
        whole = events.read_text().rpartition("\n")[0] if events.exists() else ""
        paused = (event for event in map(json.loads, whole.splitlines()) if event["fields"].get("action") == "pause")
        return next((event["detail"] for event in paused), "")

    def states(self) -> str:
        """Return what ``penstock status`` shows; before there is a coordinator, the processes in ``up.json``."""
        command = [sys.executable, "-m", "penstock.services.cli", "status", "--run", str(self._run)]
        environment = environment_with({"COLUMNS": "160"})
        with contextlib.suppress(subprocess.TimeoutExpired):
            shown = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_STATUS_S, check=False
            )
            if shown.returncode == 0:
                return shown.stdout
        table = self._run / "up.json"
        rows = json.loads(table.read_text())["processes"] if table.exists() else []
        return "\n".join(f"{row['name']}: {row['state']}, {row['restarts']} restarts" for row in rows)


def logs_of(run: Path) -> str:
    """Return the end of each process's log."""
    logs = sorted((run / "logs").glob("*.log"))
    return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's metrics."""
    file = run / "metrics.jsonl"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def _mean(lines: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.fmean(line.get(name, 0.0) for line in lines)


def _shared(work: Work) -> list[str]:
    """Return the flags of a run whose trainer and replica take turns on the first GPU, or on the CPU."""
    gpu = ["--rollout.gpus=[0]", f"--rollout.vllm.gpu_memory_utilization={_ONE_GPU_SHARE}"]
    return ["--placement.mode=shared", *(gpu if work.served else ())]


def run_trl(folder: Path, work: Work, steps: int, limit_s: float, mode: str = "trl") -> dict[str, Any]:
    """Return what TRL printed: ``samples_per_s``, ``tokens_per_sample`` and more.

    Args:
        mode: ``trl`` or ``trl_async`` with a GPU for vLLM's server, or ``colocate`` or ``colocate_async`` on one GPU.
    """
    one_gpu, asynchronous = mode.startswith("colocate"), mode.endswith("_async")
    if asynchronous and not work.served:
        raise SystemExit(f"{mode} needs vLLM's server: use --device cuda, and another --work than arithmetic")
    if "episodes" in work.settings and not asynchronous:
        raise SystemExit(f"{mode} trains single answers: use --modes trl_async or colocate_async with --work tool")
    with contextlib.ExitStack() as around:
        server: VllmServer | None = None
        if work.served and (asynchronous or not one_gpu):
            server = around.enter_context(vllm_server(folder, work.model, work.context_tokens, same_gpu=one_gpu))
        environment = only(0) if work.served or one_gpu else {}
        if asynchronous and server is not None:
            command = [sys.executable, "-m", "benchmarks.peers.trl_async", *work.asynchronous_arguments(steps)]
            if one_gpu:  # vLLM fails if others free memory while it measures its own
                command += ["--vllm-url", server.wait(), "--same-gpu"]
            else:  # TRL waits for the server, and is imported meanwhile
                command += ["--vllm-url", server.url]
                environment |= {"VLLM_HOST_IP": "127.0.0.1"}  # where both meet for NCCL, also without a network
            return _run_trl_async(command, folder, limit_s, environment, server)
        command = [sys.executable, "-m", "benchmarks.peers.trl_grpo", *work.arguments(steps)]
        if one_gpu:
            command += ["--vllm-share", str(_ONE_GPU_SHARE), "--vllm-tokens", str(work.context_tokens)]
        elif server is not None:
            command += ["--vllm-url", server.wait()]
        return _printed(_run(command, folder, limit_s, environment))


def _run_trl_async(
    command: list[str], folder: Path, limit_s: float, environment: Mapping[str, str], server: "VllmServer"
) -> dict[str, Any]:
    """Return the last figures, which it prints after each step, and GPU shares; also of a run that was not done in time."""
    with gpu_meter() as meter:
        try:
            told = _printed(_run(command, folder, limit_s, environment, watched=server))
        except NotDone as late:
            print(f"({late.limit_s:.0f} s are over)  ", end="", flush=True)
            told = _printed(late.output)
            if (steps := told["measured_steps"]) < _LEAST_STEPS:  # fewer are of what was generated before the first
                raise SystemExit(
                    f"expected {_LEAST_STEPS} measured steps of TRL, found {steps} in {late.limit_s:.0f} s: raise --limit-s"
                ) from late
    return {**told, "gpus": meter.figures(told["begin_s"], told["end_s"])}


def _printed(output: str) -> dict[str, Any]:
    """Return the last JSON object of an output, which warnings of libraries may follow as a process ends.

    >>> _printed('{"a": 1}' + chr(10) + "[rank0]: a warning")
    {'a': 1}
    """
    lines = [line for line in output.splitlines() if line.startswith('{"')]
    if not lines:
        raise SystemExit(f"expected a JSON object at the end of the output, found {output[-4000:]}")
    return dict(json.loads(lines[-1]))


class VllmServer(_Command):
    """vLLM's server, for TRL."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self._process, self._log = process, log

    def wait(self) -> str:
        """Return the URL once the server answers."""
        until_s = time.monotonic() + _SERVER_S
        while time.monotonic() < until_s and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return self.url
            time.sleep(0.5)
        end = self._log.read_text()[-3000:]
        raise SystemExit(f"expected vLLM's server at {self.url} in {_SERVER_S} s, found none:\n{end}")

    def wrong(self) -> str:
        """Return how the server ended, if it did: TRL asks on for minutes."""
        code = self._process.poll()
        return "" if code is None else f"vLLM's server ended with {code}:\n{self._log.read_text()[-3000:]}"


@contextlib.contextmanager
def vllm_server(folder: Path, model: str, context_tokens: int, *, same_gpu: bool = False) -> Iterator[VllmServer]:
    """Start a server of ``model`` for TRL, on the second GPU, or with ``same_gpu`` on the first, as TRL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {"--model": model, "--dtype": "bfloat16", "--max-model-len": str(context_tokens)}
    options |= {"--max-num-seqs": str(SERVER_SEQUENCES), "--host": "127.0.0.1", "--port": str(port)}
    options["--weight-transfer-config"] = json.dumps({"backend": "ipc" if same_gpu else "nccl"})
    environment = {**only(0 if same_gpu else 1), "VLLM_SERVER_DEV_MODE": "1"}
    if same_gpu:
        options["--gpu-memory-utilization"] = str(_ONE_GPU_SHARE)
        environment |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **_with_ray(folder)}  # handles arrive pickled
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *itertools.chain(*options.items())]
    log = folder / "vllm-server.log"
    server = subprocess.Popen(
        command, cwd=folder, env=environment_with(environment), stdout=log.open("wb"), stderr=subprocess.STDOUT
    )
    try:
        yield VllmServer(f"http://127.0.0.1:{port}", server, log)
    finally:
        end(server, 30.0)


def _with_ray(folder: Path) -> dict[str, str]:
    """Return where Python finds ray, which vLLM 0.26's IPC engine imports and uses only between actors of ray: an empty
    module if ray is not installed."""
    if importlib.util.find_spec("ray") is not None:
        return {}
    empty = folder / "empty" / "ray.py"
    empty.parent.mkdir(exist_ok=True)
    empty.touch()
    return {"PYTHONPATH": os.pathsep.join((str(empty.parent), environment_with({})["PYTHONPATH"]))}


def _run(
    command: list[str],
    folder: Path,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    watched: _Command | None = None,
) -> str:
    """Return the output of ``command``, which is ended when it is done, wrong, late or interrupted."""
    watched = watched or _Command()
    with tempfile.TemporaryFile("w+") as printed:
        until_s, failure, states, done, late = time.monotonic() + limit_s, "", "", False, False
        process = subprocess.Popen(
            command,
            cwd=_work(folder),
            env=environment_with(environment or {}),
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        patience_s = _INTERRUPTED_STOP_S
        try:
            while process.poll() is None and not (failure or done):
                time.sleep(0.5)
                done = watched.done()
                late = not done and time.monotonic() > until_s
                failure = watched.wrong() or (f"not done in {limit_s:.0f} s: raise --limit-s" if late else "")
            states = watched.states() if late else ""
            patience_s = _STOP_S
        finally:
            code = end(process, patience_s, _STOP_S)
        printed.seek(0)
        output = printed.read()
    if not failure and (code == 0 or done):
        return output
    sentence = f"{' '.join(command)} ended with {code}: {failure}\n{output[-4000:]}"
    if not late:
        raise SystemExit(sentence)
    error = NotDone(sentence)
    error.limit_s, error.output, error.states = limit_s, output, states
    raise error


def end(process: subprocess.Popen[Any], *patience_s: float) -> int:
    """End a process, if it has not ended, with a signal before each wait (`penstock up`: in order, then at once), and
    kill it after the last; return its exit code."""
    for wait_s in patience_s:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
    if process.poll() is None:
        process.kill()
    return process.wait()


def heed_sigterm() -> None:
    """Handle SIGTERM like an interrupt from the keyboard, once: `timeout` sends it twice."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


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
    """Run the modes alternately, and print, also after an interrupt or a failure, what was measured."""
    arguments, flags = _parse()
    heed_sigterm()
    kept = Results(arguments.results)
    report = _Report({mode: [] for mode in arguments.modes})
    with work_folder(arguments.folder) as made:
        work = _work_of(arguments, made)
        complete = False
        try:
            _measure(work, arguments, flags, report, kept)
            complete = True
        except KeyboardInterrupt:
            raise SystemExit("interrupted") from None
        finally:
            report.print(
                kept.rates(work.name, flags),
                {"work": work.name, "flags": flags, "host": kept.host, "complete": complete},
            )


def _work_of(arguments: argparse.Namespace, folder: Path) -> Work:
    given = (folder, arguments.shape, arguments.device, arguments.kernels)
    if arguments.work == "arithmetic":
        return arithmetic()
    if arguments.work in ("spread", "tool"):
        return (spread if arguments.work == "spread" else tool)(*given)
    return long(*given, mean_tokens=TAIL_TOKENS[arguments.device] if arguments.work == "tail" else 0)


def _parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments, and those of ``penstock up``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=("arithmetic", "long", "tail", "spread", "tool"), default="arithmetic")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="tiny", help="of the model, but for --work arithmetic"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="but for --work arithmetic")
    parser.add_argument("--kernels", choices=("torch", "auto"), default="auto", help="trainer.kernels, on GPUs")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=(*_LAGS, *_TRL), default=["async", "sync", "trl"])
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds of one system's run")
    parser.add_argument("--folder", type=Path, help="keep model and prompts here, and use them again")
    parser.add_argument("--keep", type=Path, help="folder for each run's metrics, events, memory and logs")
    parser.add_argument("--results", type=Path, help="file that collects the rates of several calls on this host")
    return parser.parse_known_args()


@dataclasses.dataclass
class _Report:
    """Measured so far, by mode."""

    rates: dict[str, list[float]]
    phases: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    gpus: dict[str, dict[str, dict[str, float]]] = dataclasses.field(default_factory=dict)
    tokens: dict[str, float] = dataclasses.field(default_factory=dict)
    """Per sample."""
    measured_steps: dict[str, int] = dataclasses.field(default_factory=dict)
    trl_figures: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    partial: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)

    def note_partial(self, mode: str, lines: Sequence[dict[str, Any]]) -> None:
        """Keep the rate of a run that was interrupted, if it made enough steps."""
        if len(lines) >= _LEAST_STEPS:
            rate, self.phases[mode], _ = _measured(lines, 0)
            self.note_tokens(mode, lines, 0)
            self.partial[mode] = {"steps": len(lines), "samples_per_s": round(rate, 1)}

    def note_tokens(self, mode: str, lines: Sequence[dict[str, Any]], max_lag: int) -> None:
        """Keep the mean length of the completions of the steps that count, and how many these are."""
        _, *counted = _steady(lines, max_lag)
        self.tokens[mode], self.measured_steps[mode] = round(_mean(counted, "response_tokens_mean"), 1), len(counted)

    def print(self, kept: Mapping[str, list[float]], about: Mapping[str, object]) -> None:
        """Print a table of the phases, and one JSON object with the rates of this call or of all."""
        print(f"\n{'seconds a step':40s}" + "".join(f"{mode:>10s}" for mode in self.phases))
        for phase in next(iter(self.phases.values()), {}):
            print(f"{phase:40s}" + "".join(f"{seconds[phase]:10.4f}" for seconds in self.phases.values()))
        rates = {mode: of_mode for mode, of_mode in (kept or self.rates).items() if of_mode}
        print(
            json.dumps(
                {
                    **about,
                    **(_figures(rates) if rates else {}),
                    "tokens_per_sample": self.tokens,
                    "measured_steps": self.measured_steps,
                    "gpus": self.gpus,
                    "trl_figures": self.trl_figures,
                    "partial": self.partial,
                }
            ),
            flush=True,
        )


def _measure(work: Work, arguments: argparse.Namespace, flags: list[str], report: _Report, kept: "Results") -> None:
    """Run the modes alternately, each in a new folder."""
    for number in range(arguments.rounds):
        print(f"round {number + 1}: ", end="", flush=True)
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
            for mode, of_mode in report.rates.items():
                if mode in _LAGS:
                    rate = _penstock(Path(name), work, mode, arguments, flags, report)
                else:
                    told = run_trl(Path(name), work, arguments.steps, arguments.limit_s, mode)
                    rate, report.trl_figures[mode] = float(told["samples_per_s"]), told
                    report.tokens[mode] = round(told["tokens_per_sample"], 1)
                    report.measured_steps[mode] = told["measured_steps"]
                of_mode.append(rate)
                kept.add(work.name, mode, rate, flags if mode in _LAGS else [])
                print(f"{mode} {rate:,.1f}/s  ", end="", flush=True)
        print()


def _penstock(
    folder: Path, work: Work, mode: str, arguments: argparse.Namespace, flags: Sequence[str], report: _Report
) -> float:
    """Run Penstock in ``mode``; return samples per second."""
    told = [*(_shared(work) if mode == "shared" else ()), *flags]
    with _kept(folder / mode, arguments.keep):
        try:
            rate, report.phases[mode], report.gpus[mode] = run_penstock(
                folder, work, arguments.steps, _LAGS[mode], told, arguments.limit_s, mode
            )
        except KeyboardInterrupt:
            report.note_partial(mode, steps_of(folder / mode))
            raise
        report.note_tokens(mode, *_counted(folder / mode, arguments.steps))
    return rate


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

    def add(self, work: str, mode: str, rate: float, flags: Sequence[str] = ()) -> None:
        """Append a rate of a run with ``flags``."""
        if self._file is not None:
            row = {"host": self.host, "work": work, "mode": mode, "rate": rate, "flags": list(flags)}
            self._rows.append(row)
            with self._file.open("a") as lines:
                lines.write(json.dumps(self._rows[-1]) + "\n")

    def rates(self, work: str, flags: Sequence[str] = ()) -> dict[str, list[float]]:
        """Return the rates of ``work`` by mode, Penstock's with the same ``flags`` alone."""
        rates: dict[str, list[float]] = {}
        for row in self._rows:
            if row["work"] == work and (row["mode"] not in _LAGS or row["flags"] == list(flags)):
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
