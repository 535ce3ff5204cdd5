"""Hostile output through a live reward service: restarts, and stalls of its event loop.

Limits: no restart, no stall over 50 ms (``stall_process_ms``), each group's correct last answer scored 1.

::

    answers    default answer matcher, format scorer with slow patterns and a JSON schema
    programs   default code scorer, executor in the host's strongest tier

``stall_ms`` is the event loop's longest stall by the clock; ``stall_process_ms`` without waits for a core, which other
work of the machine causes; ``stall_cpu_ms`` the processor time of the loop's thread. ``--seconds`` bounds a part: what
was not sent by then is not measured. ``--stacks`` prints the service's stacks at stalls over the limit.

    python -m benchmarks.reward.hostile_rewards --answers 100000 --programs 20000
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.reward import hostile_texts
from benchmarks.reward.hostile_texts import TESTS, Family
from penstock.shared.bus import embedded
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, FinishReason, GroupId, Json, Prompt, RolloutGroup, Sample, Sampling
from penstock.shared.bus.streams import EXPERIENCE, ROLLOUTS
from penstock.shared.errors import PenstockError, TemporaryError
from penstock.shared.executor.client import ExecutorClient
from penstock.shared.executor.protocol import Job
from tests.support.raw_redis import raw

LONGEST_STALL_S = 0.05
IN_FLIGHT, START_WITHIN_S, PATIENCE_S = 48, 90.0, 600.0
_RIGHT_PROGRAM = "```python\nimport sys\nif sys.stdin.read() == '1\\n': print(6)\n{}\n```"


@dataclasses.dataclass
class Figures:
    """Results of one part."""

    samples: int = 0
    groups: int = 0
    restarts: int = 0
    buried: int = 0
    right_scored_1: int = 0
    stall_ms: float = 0.0
    stall_process_ms: float = 0.0
    stall_cpu_ms: float = 0.0
    stalls_over_bar: int = 0
    seconds: float = 0.0
    statuses: dict[str, int] = dataclasses.field(default_factory=dict)
    families: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    reasons: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def kept(self) -> bool:
        """Whether every limit holds."""
        right = self.right_scored_1 == self.groups - self.buried and self.buried == 0
        return self.restarts == 0 and self.stall_process_ms <= LONGEST_STALL_S * 1000 and right


class Service:
    """The reward service, restarted when it dies."""

    def __init__(self, config: Path, folder: Path, module: str) -> None:
        self._config = config
        self._module = module
        self._log = (folder / "reward.log").open("ab")
        self._process: asyncio.subprocess.Process | None = None
        self.starts = 0
        self._last: dict[str, float] = {}

    async def keep(self, port: int) -> None:
        """Keep it running."""
        while True:
            command = [sys.executable, "-m", self._module, "--config", str(self._config), "--replica", "reward-0"]
            command += [f"--run.metrics_port={port}"]
            self._process = await asyncio.create_subprocess_exec(*command, stdout=self._log, stderr=self._log)
            self.starts += 1
            await self._process.wait()

    async def stop(self) -> None:
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
        self._log.close()


async def scrape(port: int) -> dict[str, float]:
    """Return the event loop's metrics, if the service answers."""
    try:
        async with httpx.AsyncClient(trust_env=False) as http:
            text = (await http.get(f"http://127.0.0.1:{port}/metrics", timeout=60.0)).text
    except httpx.HTTPError:
        return {}
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    stalls = {
        each.labels["clock"]: each.value for each in samples if each.name == "penstock_event_loop_longest_stall_seconds"
    }
    buckets = {
        each.labels["le"]: each.value for each in samples if each.name == "penstock_event_loop_stall_seconds_bucket"
    }
    over = buckets.get("+Inf", 0.0) - buckets.get(str(LONGEST_STALL_S), 0.0)
    return {clock: stalls.get(clock, 0.0) for clock in ("elapsed", "process", "cpu")} | {"over": over}


def groups(families: tuple[Family, ...], count: int, seed: int, samples: int) -> Iterator[tuple[str, RolloutGroup]]:
    """Yield (family, group): ``count`` hostile samples, each group ending with a correct one."""
    made = hostile_texts.texts(families, count, seed)
    number = itertools.count()
    for family, rows in itertools.groupby(made, key=lambda each: each[0]):
        for batch in _batches((text for _, text in rows), samples):
            yield family, _group(next(number), batch, programs=families[0] in hostile_texts.PROGRAMS)


def _batches(texts: Iterator[str], size: int) -> Iterator[tuple[str, ...]]:
    while batch := tuple(itertools.islice(texts, size)):
        yield batch


def _group(number: int, batch: tuple[str, ...], *, programs: bool) -> RolloutGroup:
    reference = (str(number), f"{number}x+1", rf"2\sqrt{{{number + 2}}}", rf"\frac{{{number + 1}}}{{7}}")[number % 4]
    tests: Json = [*TESTS[number % len(TESTS)]]
    right = _right_program(number) if programs else f"<answer>{reference}</answer> \\boxed{{{reference}}}"
    texts = (*batch, right)
    sampling = Sampling(len(texts), 64, 1.0)
    prompt = Prompt(GroupId(number), f"hostile:{number}", sampling, text="?", answer=reference, extra={"tests": tests})
    spans, logprobs = np.array([[0, 0]], dtype=np.int32), np.zeros(1, dtype=np.float32)
    made = tuple(Sample(np.zeros(1, np.int32), logprobs, spans, FinishReason.STOP, text) for text in texts)
    return RolloutGroup(prompt, np.zeros(1, np.int32), made, "hostile", 0.0, 0.0)


def _right_program(number: int) -> str:
    returned = ("7", "[1, 2, 3]", "[9, 4]", "{'a': [1, 2]}", "6")[number % len(TESTS)]
    return _RIGHT_PROGRAM.format(f"def f(*a): return {returned}")


async def measure(bus: Bus, service: Service, port: int, made: Iterator[tuple[str, RolloutGroup]]) -> Figures:
    """Send every group, and read the metrics after each family."""
    figures, started_s = Figures(), time.monotonic()
    for family, rows in itertools.groupby(made, key=lambda each: each[0]):
        began_s, before = time.monotonic(), await scrape(port)
        await _through(bus, (group for _, group in rows), figures)
        seen = await scrape(port)
        figures.stall_ms = max(figures.stall_ms, 1000 * seen.get("elapsed", 0.0))
        figures.stall_process_ms = max(figures.stall_process_ms, 1000 * seen.get("process", 0.0))
        figures.stall_cpu_ms = max(figures.stall_cpu_ms, 1000 * seen.get("cpu", 0.0))
        over = int(seen.get("over", 0.0) - before.get("over", 0.0))
        figures.stalls_over_bar += max(0, over)
        figures.families[family] = {"seconds": round(time.monotonic() - began_s, 1), "stalls_over_bar": over, "restarts": service.starts - 1, "stall_process_ms_so_far": round(figures.stall_process_ms, 1)}  # fmt: skip
        print(family, figures.families[family], file=sys.stderr)
    figures.seconds = round(time.monotonic() - started_s, 1)
    figures.restarts = service.starts - 1
    return figures


async def _through(bus: Bus, rows: Iterator[RolloutGroup], figures: Figures) -> None:
    sent, out, ended, buried_before = 0, 0, 0, figures.buried
    until_s = time.monotonic() + PATIENCE_S
    while True:
        for group in itertools.islice(rows, IN_FLIGHT - (sent - ended)):
            await bus.append(ROLLOUTS, {"id": str(group.prompt.group_id), "data": wire.encode(group)})
            sent += 1
            figures.samples += len(group.samples) - 1
        if ended == sent:
            break
        for delivery in await bus.read(EXPERIENCE, Experience, "bench", IN_FLIGHT, block_s=0.5):
            _note(figures, delivery.message())
            await bus.acknowledge(delivery)
            out += 1
        figures.buried = await bus.length(ROLLOUTS.dead)
        before, ended = ended, out + figures.buried - buried_before
        until_s = time.monotonic() + PATIENCE_S if ended != before else until_s
        if time.monotonic() > until_s:
            raise PenstockError(f"expected a group within {PATIENCE_S:.0f} s: {sent - ended} groups did not come out")
    figures.groups += sent


def _note(figures: Figures, experience: Experience) -> None:
    for scores in experience.scores:
        for score in scores.scores:
            _count(figures.statuses, f"{score.scorer}:{score.status.value}")
    right = {score.scorer: score.value for score in experience.scores[-1].scores}
    figures.right_scored_1 += next(iter(right.values())) == 1.0


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


@contextlib.asynccontextmanager
async def executor(folder: Path) -> AsyncIterator[str]:
    """Yield a new executor's address."""
    address = f"unix:{folder}/executor.sock"
    command = [sys.executable, "-m", "penstock.services.reward.executor", "--reward.executor.address", address]
    process = subprocess.Popen([*command, "--telemetry.log_level", "ERROR"], stdout=subprocess.DEVNULL)
    client = ExecutorClient(address)
    try:
        async with asyncio.timeout(START_WITHIN_S):
            while True:
                with contextlib.suppress(TemporaryError):
                    await client.run(Job("print(1)"))
                    break
                await asyncio.sleep(0.2)
        yield address
    finally:
        await client.close()
        process.terminate()
        await asyncio.to_thread(process.wait)


async def run_part(name: str, scorers: list[dict[str, Any]], address: str, arguments: argparse.Namespace) -> Figures:
    """Measure one part."""
    with tempfile.TemporaryDirectory(prefix="penstock-hostile-") as place, embedded.serving(Path(place) / "bus") as url:
        folder, port = Path(place), _free_port()
        config = folder / "run.toml"
        config.write_text(_toml(name, folder, url, scorers, address))
        tomllib.loads(config.read_text())
        bus = await Bus.connect(url, name, wait_s=START_WITHIN_S)
        await bus.make_groups()
        service = Service(
            config, folder, "benchmarks.reward.stalled_stacks" if arguments.stacks else "penstock.services.reward"
        )
        keeping = asyncio.create_task(service.keep(port))
        try:
            count = arguments.answers if name == "answers" else arguments.programs
            families = hostile_texts.ANSWERS if name == "answers" else hostile_texts.PROGRAMS
            chosen = tuple(each for each in families if not arguments.families or each.name in arguments.families)
            made = groups(chosen if arguments.families else families, count, arguments.seed, arguments.group_size)
            until_s = time.monotonic() + arguments.seconds
            in_time = itertools.takewhile(lambda _: time.monotonic() < until_s, made)
            figures = await measure(bus, service, port, in_time)
            for _, fields in await raw(bus).xrange(bus.keys.of(ROLLOUTS.dead), count=1000):
                _count(figures.reasons, fields[b"reason"].decode(errors="replace")[:120])
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await service.stop()
            await bus.close()
            sys.stderr.write(_tail(folder / "reward.log"))
            if arguments.stacks:
                sys.stderr.write((folder / "reward.log").read_text(errors="replace"))
        return figures


def _tail(file: Path) -> str:
    lines = file.read_text(errors="replace").splitlines()
    return "".join(f"{line[:300]}\n" for line in lines if "Traceback" in line or "Error" in line)[-3000:]


def _toml(run_id: str, folder: Path, url: str, scorers: list[dict[str, Any]], address: str) -> str:
    lines = [f'[run]\nid = "{run_id}"\nfolder = "{folder}"\n[bus]\nurl = "{url}"\n[telemetry]\nlog_level = "WARNING"\n']
    lines.append(f'[reward]\nexpression = "{scorers[0].get("name", scorers[0]["kind"])}"\n')
    if address:
        lines.append(f'[reward.executor]\naddress = "{address}"\n')
    lines += [f"[[reward.scorers]]\n{''.join(f'{key} = {_value(value)}{os.linesep}' for key, value in each.items())}" for each in scorers]  # fmt: skip
    return "\n".join(lines)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_value(each)}" for key, each in value.items()) + "}"
    return "[" + ", ".join(_value(each) for each in value) + "]" if isinstance(value, list) else json.dumps(value)


def _free_port() -> int:
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Measure both parts."""
    figures_of_parts: dict[str, Figures] = {}
    if arguments.answers:
        figures_of_parts["answers"] = await run_part(
            "answers", [{"kind": "answer"}, hostile_texts.FORMAT], "", arguments
        )
    if arguments.programs:
        with tempfile.TemporaryDirectory(prefix="penstock-hostile-") as place:
            async with executor(Path(place)) as address:
                figures_of_parts["programs"] = await run_part("programs", [{"kind": "code"}], address, arguments)
    parts = {name: dataclasses.asdict(figures) for name, figures in figures_of_parts.items()}
    return {"benchmark": "hostile_rewards", "kept": all(each.kept for each in figures_of_parts.values()), **parts}


def main() -> int:
    """Print; return 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=900.0, help="of a part")
    parser.add_argument("--stacks", action="store_true", help="print the service's stacks at stalls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", nargs="*", default=[], help="only these")
    result = asyncio.run(run(parser.parse_args()))
    print(json.dumps(result))
    return 0 if result["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
