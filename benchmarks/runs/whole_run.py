r"""A run of a large policy with everything on, whose processes are killed, and its audit.

    python -m benchmarks.runs.whole_run --out /tmp/whole                             # 7B, four GPUs of 80 GB or more
    python -m benchmarks.runs.whole_run --shape tiny --device cpu --steps 14 --out /tmp/whole        # a smoke test
    python -m benchmarks.runs.whole_run --shape 30b-a3b --gpus 8 --tensor-parallel 2 --out /tmp/mixture \
        --trainer.zero_stage=1 --trainer.expert_parallel=4 --trainer.router_replay=true            # eight H200s
    python -m benchmarks.runs.whole_run --shape 70b --layers 36 --gpus 8 --tensor-parallel 4 --kills --out /tmp/70b
    python -m benchmarks.runs.whole_run --shape tiny-mixture --device cpu --ranks 4 --out /tmp/whole \
        --trainer.zero_stage=1 --trainer.expert_parallel=2 --trainer.router_replay=true --weights.snapshots=sharded

    for replicas in 1 2 3; do python -m benchmarks.runs.whole_run --ranks 5 --gpus $((5 + replicas)) --turns 6 --kills \
        --steps 12 --models /tmp/models --mean-tokens 128 --sampling.max_new_tokens=512 \
        --rollout.vllm.max_model_len=8192; done    # agents on replicas; with two ranks training bounds from three on

Completions have very different lengths (``benchmarks.peers.work``: 800 tokens on average, 2,048 at most). Of the GPUs
``--ranks``, by default half, train with ZeRO 3, and each ``--tensor-parallel`` of the others have a replica (vLLM: prefix
caching, new weights during generation). There are evaluations and checkpoints, kill -9 of a rank, the trainer, a replica,
the reward service and the coordinator, and an interruption after which the run is resumed, at given steps. At the end the
run is stopped, and the audit of the fault tests says whether each admitted group ended once.

With ``--turns`` each sample is an episode of that many turns with an agent (``tool_loop``).

With ``--check 8xH200,560GiB --disk-gib 235`` nothing is run: the settings go through what ``penstock up`` refuses, and what
the run needs by the plan is printed (``fits``). The same is looked at before each run on GPUs, of this machine: where the
disk does not hold ``trainer.keep_last`` checkpoints and another, fewer are kept or none, and kills replay more steps.

Prints each kill as it recovers, and at the end one JSON object: the audit's counts; samples/s and tokens/s of the steps
without a kill, and tokens/s of a GPU and of a replica; seconds from each kill to the next commit; of the replicas' updates the seconds of
transfer (``pull_s``) and of stopped decoding (``swap_s``); evaluations; and ``plan``: seconds of a step and the trainer's
largest peak of memory, measured over planned. ``--out`` gets the run's metrics, events, memory and logs. ``--steps`` counts
trained steps at the end: those after the newest checkpoint are trained twice, with the same numbers. Other flags go to
``penstock up``. ``--models`` keeps models for later calls, which then need not compile for vLLM again.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from benchmarks.peers.pipeline import Results, copy_run, steps_of
from benchmarks.peers.work import PROMPT_TOKENS, TAIL_TOKENS, Work, is_made, long
from benchmarks.runs import fits
from benchmarks.runs.layouts import cluster_words
from benchmarks.runs.tool_loop import CHAT_TEMPLATE
from benchmarks.shapes import ALL_SHAPES
from penstock.services.cli.plan import as_measured, layout_of, preferences, work_of
from penstock.services.cli.reports.memory import phases, predicted
from penstock.services.coordinator.records import jsonl
from penstock.services.coordinator.records.memory import MEMORY_FILE
from penstock.services.plan import measured as runs
from penstock.services.plan.hardware import GIB, parse_cluster
from penstock.services.plan.layouts import Planner
from penstock.services.plan.workload import Workload, with_turns
from penstock.shared.bus.bus import Bus
from penstock.shared.settings import Settings, load, load_run
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import FLAGS, Run, left_behind, running

_POLL_S, _COPY_S = 0.5, 15.0
_HELD_OUT = 32
_FLAGS: Mapping[str, object] = {
    "algorithm.max_lag": 2,
    "algorithm.groups_per_step": 16,
    "sampling.group_size": 8,
    "rollout.replicas": 2,
    "rollout.max_groups": 24,
    "trainer.zero_stage": 3,
    "trainer.checkpoint_every_steps": 6,
    "trainer.keep_last": 2,
    "evaluation.every_steps": 10,
    "evaluation.path": None,
    "evaluation.problems": _HELD_OUT,
    "evaluation.temperature": 1.0,
    "internal.claim_after_s": 30,
    "internal.heartbeat_s": 1.0,
    "bus.drain_s": 20,
    "run.steps": 100_000,
}
"""All that ``tests.chaos.run`` changes is here as it is by default."""
_GPU: Mapping[str, object] = {
    "trainer.micro_batch_tokens": 16_384,
    "trainer.optimizer": "adamw_8bit",
    "weights.snapshots": "sharded",
}
"""So that a rank fits into 80 GB, and a checkpoint is of 46 GB."""
_RANK, _RESUME = "rank", "resume"
KILLS = (f"{_RANK}:4", "trainer-0:8", "reward-0:11", "rollout-1:13", "coordinator-0:16", f"{_RESUME}:18")
"""A process, or one of the trainer's ranks, or the whole run, which is interrupted and resumed; and the step."""


async def _until(run: Run, condition: Callable[[], bool], until_s: float) -> None:
    while not condition():
        run.check()
        if time.monotonic() > until_s:
            raise AssertionError(f"not done in time: raise --limit-s\n{run.report()}")
        await asyncio.sleep(_POLL_S)


async def _reaches(run: Run, step: int, until_s: float) -> None:
    await _until(run, lambda: len(steps_of(run.folder)) >= step, until_s)


async def _kill(run: Run, name: str, until_s: float) -> dict[str, Any]:
    """Kill a process once a commit is there; return the seconds to its next start and to the commit after it."""
    service = "trainer-0" if name == _RANK else name
    pid = run.pid(service)
    assert pid is not None, name
    killed_s = time.time()
    os.kill(psutil.Process(pid).children()[-1].pid if name == _RANK else pid, signal.SIGKILL)
    await _until(run, lambda: run.pid(service) not in (None, pid), until_s)
    return await _recovered(run, name, killed_s, until_s)


async def _recovered(run: Run, name: str, killed_s: float, until_s: float) -> dict[str, Any]:
    started_s = time.time()
    await _until(run, lambda: steps_of(run.folder)[-1]["finished_at_s"] > killed_s, until_s)
    figures = {
        "name": name,
        "at_step": len(steps_of(run.folder)),
        "killed_at_s": killed_s,
        "started_s": round(started_s - killed_s, 1),
        "next_commit_s": round(steps_of(run.folder)[-1]["finished_at_s"] - killed_s, 1),
    }
    print(json.dumps(figures), file=sys.stderr, flush=True)
    return figures


@contextlib.asynccontextmanager
async def _resumed(run: Run, scratch: Path, until_s: float) -> AsyncIterator[Run]:
    """Interrupt the run as Ctrl-C does, and continue it."""
    run.process.terminate()
    code = await asyncio.to_thread(run.process.wait, max(1.0, until_s - time.monotonic()))
    if code != 128 + signal.SIGTERM:
        raise AssertionError(f"expected that `penstock up` ends as a signal ends it, found {code}\n{run.report()}")
    async with running(
        scratch, flags=dict.fromkeys((*FLAGS, "run.folder")), config=f"--resume={run.folder}", forked=False
    ) as continued:
        await _until(continued, lambda: continued.table().get("pid") == continued.process.pid, until_s)
        yield continued


async def _whole(
    scratch: Path, config: Path, flags: Mapping[str, object], arguments: argparse.Namespace
) -> tuple[Path, dict[str, Any]]:
    """Return the run's folder and its figures."""
    began_s, until_s = time.time(), time.monotonic() + arguments.limit_s
    kills = sorted((int(step), name) for name, step in (kill.split(":") for kill in arguments.kills))
    done: list[dict[str, Any]] = []
    async with contextlib.AsyncExitStack() as runs:
        run = await runs.enter_async_context(running(scratch, flags=flags, config=str(config), forked=False))
        copying = asyncio.create_task(_copy(run.folder, arguments.out))
        try:
            for step, name in kills:
                await _reaches(run, step, until_s)
                if name == _RESUME:
                    killed_s = time.time()
                    run = await runs.enter_async_context(_resumed(run, scratch, until_s))
                    done.append(await _recovered(run, name, killed_s, until_s))
                else:
                    done.append(await _kill(run, name, until_s))
            await _reaches(run, arguments.steps, until_s)
            await run.stop()
        finally:
            copying.cancel()
            if arguments.out is not None:
                copy_run(run.folder, arguments.out)
    async with left_behind(run) as bus:
        return run.folder, {
            **(await _audited(bus)),
            **figures(steps_of(run.folder), done, began_s),
            "updates": _updates(run.folder),
            "evaluations": _evaluations(run),
        }


async def _audited(bus: Bus) -> dict[str, Any]:
    try:
        counts = await audit_groups(bus)
        await audit_versions(bus)
    except AssertionError as error:
        return {"audit_exact": False, "audit": str(error)[:2000]}
    return {"audit_exact": True, "groups": counts}


async def _copy(run: Path, folder: Path | None) -> None:
    while folder is not None:
        await asyncio.sleep(_COPY_S)
        await asyncio.to_thread(copy_run, run, folder)


def figures(lines: Sequence[Mapping[str, Any]], kills: Sequence[Mapping[str, Any]], began_s: float) -> dict[str, Any]:
    """Return the rates of steps before which nothing was killed, and the kills.

    >>> made = [{"finished_at_s": at_s, "samples": 10, "response_tokens_mean": 8.0} for at_s in (5.0, 6.0, 7.0, 17.0, 18.0)]
    >>> rates = figures(made, [{"name": "trainer-0", "killed_at_s": 7.5}], 0.0)
    >>> rates["samples_per_s"], rates["tokens_per_sample"], rates["first_step_s"], rates["steps"]
    (10.0, 8.0, 5.0, 5)
    >>> rates["tokens_per_s"], rates["step_s"]
    (80.0, 1.0)
    """
    times = [kill["killed_at_s"] for kill in kills]
    pairs = [
        (after, after["finished_at_s"] - before["finished_at_s"])
        for before, after in itertools.pairwise(lines)
        if not any(before["finished_at_s"] <= at_s < after["finished_at_s"] for at_s in times)
    ]
    seconds = sum(seconds for _, seconds in pairs)
    samples = sum(line["samples"] for line, _ in pairs)
    tokens = statistics.fmean(line["response_tokens_mean"] for line, _ in pairs)
    of_mixtures = ("expert_imbalance", "replayed_fraction", "routed_live")
    return {
        "steps": len(lines),
        "first_step_s": round(lines[0]["finished_at_s"] - began_s, 1),
        "step_s": round(statistics.median(seconds for _, seconds in pairs), 2),
        "samples_per_s": round(samples / seconds, 2),
        "tokens_per_sample": round(tokens, 1),
        "tokens_per_s": round(samples * tokens / seconds, 1),
        **{name: round(statistics.fmean(line[name] for line in lines), 3) for name in of_mixtures if name in lines[-1]},
        "kills": list(kills),
    }


def _updates(run: Path) -> dict[str, Any]:
    """Return the replicas' updates by their logs."""
    lines = [
        line for log in (run / "logs").glob("rollout-*.log") for line in log.read_text(errors="replace").splitlines()
    ]
    updates = [json.loads(line) for line in lines if '"event": "policy version live"' in line]
    return {
        "count": len(updates),
        **{
            name: {"median": round(statistics.median(times), 4), "most": round(max(times), 4)}
            for name in ("pull_s", "swap_s")
            if (times := [update[name] for update in updates if name in update])
        },
    }


def planned(run: Path, step_s: float, gpus: str) -> dict[str, Any]:
    """Return the seconds of a step and the trainer's peak of memory that are planned for a run, and measured over planned.

    ``gpus`` as ``penstock plan`` has them.
    """
    settings, read = load_run(run), runs.read_run(run)
    cluster, work = parse_cluster(gpus), as_measured(work_of(settings), settings, read[0], 0.0)
    expected = Planner(work, cluster, preferences(settings)).as_set(layout_of(settings, 0, mps=False)).pace.step_s
    held = [of for of in phases(jsonl.read(run / MEMORY_FILE)) if of.replica == "trainer-0"]
    peaks = [(of, sum(predicted(settings, of).values())) for of in held]
    return {
        "step_s": round(expected, 2),
        "step": round(step_s / expected, 3),
        "memory": {of.phase: round(of.peak_bytes / nbytes, 3) for of, nbytes in peaks if nbytes},
    }


def _evaluations(run: Run) -> list[dict[str, Any]]:
    file = run.folder / "evaluations.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _work(folder: Path, arguments: argparse.Namespace, *, weights: bool = True) -> tuple[Work, Path]:
    """Return the work, and its configuration with held-out problems; without ``weights`` it can be planned alone."""
    tokens, models = arguments.mean_tokens or TAIL_TOKENS[arguments.device], arguments.models or folder
    of_model = {"mean_tokens": tokens, "layers": arguments.layers, "weights": weights}
    work = long(models, arguments.shape, arguments.device, "auto", **of_model)
    prompts = Path(work.settings["data"]["path"])
    held_out, rest = folder / "held-out.jsonl", folder / "train.jsonl"
    lines = prompts.read_text().splitlines(keepends=True)
    lines = [f"{json.dumps(json.loads(line) | {'turns': arguments.turns})}\n" for line in lines]
    held_out.write_text("".join(lines[:_HELD_OUT]))
    rest.write_text("".join(lines[_HELD_OUT:]))
    settings = {**work.settings, "data": {"path": str(rest)}, "evaluation": {"path": str(held_out)}}
    if arguments.turns:
        (Path(work.model) / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        settings["episodes"] = {"agent": "benchmarks.runs.tool_loop:agent", "max_turns": arguments.turns}
        settings["reward"] = {"scorers": [{"kind": "environment"}]}
    config = folder / "whole.toml"
    config.write_text(tomli_w.dumps(settings))
    return work, config


def _fitted(
    scratch: Path, arguments: argparse.Namespace, flags: Mapping[str, object], given: Mapping[str, str]
) -> dict[str, object]:
    """Return the flags with which the run fits, ``given`` ones included; say what it needs.

    Raises:
        SystemExit: it does not fit for certain, or nothing is to be run.
    """
    work, config = _work(scratch, arguments, weights=False)
    made = is_made(work)
    machine = fits.Machine.here(parse_cluster(arguments.check or cluster_words(arguments.gpus)), scratch)
    if arguments.check:
        stated = parse_cluster(arguments.check)
        machine = fits.Machine(stated, arguments.disk_gib * GIB if arguments.disk_gib else machine.disk_bytes)
    settings = _settings(config, {**flags, **given})
    more: dict[str, object] = {"rollout.vllm.gpu_memory_utilization": fits.engine_share(settings, machine)}
    settings = _settings(config, {**flags, **more, **given})
    needed = fits.needs(settings, machine, _workload(settings, arguments))
    more |= fits.lighter(settings, machine, needed, made=made)
    refusal = fits.certain(settings, machine, needed, made=made)
    print(
        json.dumps({"needs": needed.as_json(), "over": needed.over(), "refused": refusal, "flags": more}),
        file=sys.stderr,
        flush=True,
    )
    if refusal or arguments.check:
        raise SystemExit(refusal or None)
    return {**flags, **more, **given}


def _settings(config: Path, flags: Mapping[str, object]) -> Settings:
    return load(config, [f"--{name}={value}" for name, value in {**FLAGS, **flags}.items() if value is not None])


def _workload(settings: Settings, arguments: argparse.Namespace) -> Workload:
    lengths = fits.geometric(arguments.mean_tokens or TAIL_TOKENS[arguments.device], settings.sampling.max_new_tokens)
    work = fits.workload(settings, PROMPT_TOKENS, lengths)
    return with_turns(work, settings, arguments.turns, 0.0, 0.0) if arguments.turns else work


def _gpu_flags(gpus: int, ranks: int, tensor_parallel: int) -> dict[str, object]:
    return {
        **_GPU,
        "trainer.gpus": list(range(ranks)),
        "rollout.replicas": (gpus - ranks) // tensor_parallel,
        "rollout.vllm.tensor_parallel_size": tensor_parallel,
        "rollout.gpus": list(range(ranks, gpus)),
    }


def _parsed() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="7b")
    parser.add_argument("--layers", type=int, default=0, help="of the shape's; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=0, help="of the trainer; default: half of the GPUs; on a CPU 2")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of a replica")
    parser.add_argument("--turns", type=int, default=0, help="of an episode; default: samples are completions")
    parser.add_argument("--mean-tokens", type=int, default=0, help="of a completion; default: 800, on a CPU 12")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kills", nargs="*", default=KILLS, metavar="NAME:STEP", help=f"default: {' '.join(KILLS)}")
    parser.add_argument("--limit-s", type=float, default=1200.0)
    parser.add_argument(
        "--folder", type=Path, help="of model and run; it needs about 160 GB at 7B. Default: a temporary one"
    )
    parser.add_argument("--models", type=Path, help="keep models here; default: with the run, which is deleted")
    parser.add_argument("--check", default="", metavar="GPUS", help="run nothing; as --gpus of penstock plan")
    parser.add_argument("--disk-gib", type=float, default=0.0, help="free, for --check; default: this machine's")
    parser.add_argument("--out", type=Path, help="folder for the run's metrics, events, memory and logs")
    return parser.parse_known_args()


def main() -> None:
    """Run, kill, audit and print."""
    arguments, more = _parsed()
    on_gpus = arguments.device == "cuda"
    ranks = arguments.ranks or (arguments.gpus // 2 if on_gpus else 2)
    with tempfile.TemporaryDirectory(prefix="penstock-whole-", dir=arguments.folder) as name:
        scratch = Path(name)
        flags: dict[str, object] = {**_FLAGS, "trainer.ranks": ranks}
        given = dict(flag.removeprefix("--").split("=", 1) for flag in more)
        if on_gpus:
            flags |= _gpu_flags(arguments.gpus, ranks, arguments.tensor_parallel)
            flags = _fitted(scratch, arguments, flags, given)
        flags |= given
        work, config = _work(scratch, arguments)
        folder, made = asyncio.run(_whole(scratch, config, flags, arguments))
        rate, replicas = made["tokens_per_s"], int(str(flags["rollout.replicas"]))
        made["tokens_per_s_of"] = {
            "a replica": rate / replicas,
            **({"a GPU": rate / arguments.gpus} if on_gpus else {}),
        }
        print(json.dumps(made), file=sys.stderr, flush=True)
        made |= {"plan": planned(folder, made["step_s"], cluster_words(arguments.gpus))} if on_gpus else {}
    shown = {"benchmark": "whole_run", "work": work.name, "host": Results(None).host, "cores": os.cpu_count()}
    print(
        json.dumps({**shown, "flags": {name: str(value) for name, value in flags.items() if value is not None}, **made})
    )


if __name__ == "__main__":
    main()
