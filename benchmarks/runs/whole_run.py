r"""A run of a large policy with everything on, whose processes are killed, and its audit.

    python -m benchmarks.runs.whole_run --out /tmp/whole                             # 7B, four GPUs of 80 GB or more
    python -m benchmarks.runs.whole_run --shape tiny --device cpu --steps 14 --out /tmp/whole        # a smoke test

Completions have very different lengths (``benchmarks.peers.work``: 800 tokens on average, 2,048 at most). Half of
the GPUs train with ZeRO 3, and each of the others has a replica (vLLM: prefix caching, new weights during generation).
There are evaluations and checkpoints, and kill -9 of the trainer, a replica and the coordinator at given steps. At the
end the run is stopped, and the audit of the fault tests says whether each admitted group ended once.

Prints one JSON object: the audit's counts, samples/s and tokens/s of the steps without a kill, seconds from each kill to
the next commit, evaluations. ``--out`` gets the run's metrics, events, memory and logs. ``--steps`` counts trained steps
at the end: those after the newest checkpoint are trained twice, with the same numbers. Other flags go to ``penstock up``.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.peers.pipeline import Results, copy_run, steps_of
from benchmarks.peers.work import TAIL_TOKENS, Work, long
from benchmarks.shapes import SHAPES
from penstock.shared.bus.bus import Bus
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import Run, left_behind, running

_POLL_S, _COPY_S = 0.5, 15.0
_HELD_OUT = 32
_FLAGS: Mapping[str, object] = {
    "algorithm.max_lag": 2,
    "algorithm.groups_per_step": 16,
    "sampling.group_size": 8,
    "rollout.replicas": 2,
    "rollout.max_groups": 24,
    "trainer.ranks": 2,
    "trainer.zero_stage": 3,
    "trainer.checkpoint_every_steps": 6,
    "trainer.keep_last": 2,
    "evaluation.every_steps": 10,
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
KILLS: Mapping[str, int] = {"trainer-0": 8, "rollout-1": 13, "coordinator-0": 16}


async def _until(run: Run, condition: Callable[[], bool], until_s: float) -> None:
    while not condition():
        run.check()
        if time.monotonic() > until_s:
            raise AssertionError(f"not done in time: raise --limit-s\n{run.report()}")
        await asyncio.sleep(_POLL_S)


async def _kill(run: Run, name: str, until_s: float) -> dict[str, Any]:
    """Kill a process once a commit is there; return the seconds to its next start and to the commit after it."""
    pid = run.pid(name)
    assert pid is not None, name
    before = steps_of(run.folder)[-1]["finished_at_s"]
    os.kill(pid, signal.SIGKILL)
    killed_s, at_s = time.time(), time.monotonic()
    await _until(run, lambda: run.pid(name) not in (None, pid), until_s)
    started_s = time.time()
    await _until(run, lambda: steps_of(run.folder)[-1]["finished_at_s"] > max(before, killed_s), until_s)
    return {
        "name": name,
        "at_step": len(steps_of(run.folder)),
        "killed_at_s": killed_s,
        "started_s": round(started_s - killed_s, 1),
        "next_commit_s": round(time.monotonic() - at_s, 1),
    }


async def _whole(
    scratch: Path, config: Path, flags: Mapping[str, object], kills: Mapping[str, int], arguments: argparse.Namespace
) -> dict[str, Any]:
    began_s, until_s = time.time(), time.monotonic() + arguments.limit_s
    done: list[dict[str, Any]] = []
    async with running(scratch, flags=flags, config=str(config), forked=False) as run:
        copying = asyncio.create_task(_copy(run.folder, arguments.out))
        try:
            for name, step in sorted(kills.items(), key=lambda kill: kill[1]):
                await _until(run, lambda step=step: len(steps_of(run.folder)) >= step, until_s)  # type: ignore[misc]
                done.append(await _kill(run, name, until_s))
                print(json.dumps(done[-1]), file=sys.stderr, flush=True)
            await _until(run, lambda: len(steps_of(run.folder)) >= arguments.steps, until_s)
            await run.stop()
        finally:
            copying.cancel()
            if arguments.out is not None:
                copy_run(run.folder, arguments.out)
    async with left_behind(run) as bus:
        return {
            **(await _audited(bus)),
            **figures(steps_of(run.folder), done, began_s),
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
    return {
        "steps": len(lines),
        "first_step_s": round(lines[0]["finished_at_s"] - began_s, 1),
        "samples_per_s": round(samples / seconds, 2),
        "tokens_per_sample": round(tokens, 1),
        "kills": list(kills),
    }


def _evaluations(run: Run) -> list[dict[str, Any]]:
    file = run.folder / "evaluations.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _work(folder: Path, arguments: argparse.Namespace) -> tuple[Work, Path]:
    """Return the work, and its configuration with held-out problems."""
    work = long(folder, arguments.shape, arguments.device, "auto", mean_tokens=TAIL_TOKENS[arguments.device])
    prompts = Path(work.settings["data"]["path"])
    held_out, rest = folder / "held-out.jsonl", folder / "train.jsonl"
    lines = prompts.read_text().splitlines(keepends=True)
    held_out.write_text("".join(lines[:_HELD_OUT]))
    rest.write_text("".join(lines[_HELD_OUT:]))
    settings = {**work.settings, "data": {"path": str(rest)}, "evaluation": {"path": str(held_out)}}
    config = folder / "whole.toml"
    config.write_text(tomli_w.dumps(settings))
    return work, config


def _gpu_flags(gpus: int) -> dict[str, object]:
    ranks = gpus // 2
    return {
        **_GPU,
        "trainer.ranks": ranks,
        "trainer.gpus": list(range(ranks)),
        "rollout.replicas": gpus - ranks,
        "rollout.gpus": list(range(ranks, gpus)),
    }


def main() -> None:
    """Run, kill, audit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=1200.0)
    parser.add_argument(
        "--folder", type=Path, help="of model and run; it needs about 160 GB at 7B. Default: a temporary one"
    )
    parser.add_argument("--out", type=Path, help="folder for the run's metrics, events, memory and logs")
    arguments, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="penstock-whole-", dir=arguments.folder) as name:
        scratch = Path(name)
        work, config = _work(scratch, arguments)
        flags = {**_FLAGS, **(_gpu_flags(arguments.gpus) if arguments.device == "cuda" else {})}
        flags |= dict(flag.removeprefix("--").split("=", 1) for flag in more)
        made = asyncio.run(_whole(scratch, config, flags, KILLS, arguments))
    shown = {"benchmark": "whole_run", "work": work.name, "host": Results(None).host, "cores": os.cpu_count()}
    print(json.dumps({**shown, "flags": {name: str(value) for name, value in flags.items()}, **made}))


if __name__ == "__main__":
    main()
