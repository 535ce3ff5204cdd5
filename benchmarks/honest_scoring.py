"""Throughput of honest samples through the format, answer and code scorers, here and in another checkout.

Both checkouts are measured in turn. ``ratio`` is the median of here / before, by the clock; ``cpu_ratio`` by processor
time of all processes, which other load disturbs less. Fails if a ``cpu_ratio`` is under ``LEAST_RATIO``.

    git archive COMMIT | tar x -C /tmp/before && python -m benchmarks.honest_scoring --before /tmp/before
"""

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.answers import cases, group
from benchmarks.executor import executor
from services.reward.scorers.answer.scorer import AnswerMatcher
from services.reward.scorers.code.scorer import CodeTester
from services.reward.scorers.format.scorer import FormatChecker
from services.reward.scorers.scorer import Scorer
from shared.bus.messages import RolloutGroup
from shared.settings.rewards.scorers import AnswerScorer, CodeScorer, FormatScorer

LEAST_RATIO = 0.9
GROUP_SIZE, AT_ONCE = 16, 8
PATTERN = r"\s*<think>.*</think>\s*<answer>.*</answer>\s*"
_THOUGHT = "First we add the numbers, then we take the root of {}, and so on. "


def _texts(number: int) -> Iterator[str]:
    for sample in range(GROUP_SIZE):
        thought = _THOUGHT.format(number * GROUP_SIZE + sample) * (10 + sample)
        yield f"<think>{thought}</think>\n<answer>{number}</answer>"


def _programs(number: int) -> Iterator[str]:
    for sample in range(GROUP_SIZE):
        yield f"```python\n# {number}, {sample}\ndef f(x):\n    return x + {number}\n```"


def _with(made: RolloutGroup, texts: Iterator[str]) -> RolloutGroup:
    return dataclasses.replace(made, samples=tuple(dataclasses.replace(made.samples[0], text=text) for text in texts))


def format_groups(count: int) -> list[RolloutGroup]:
    """Return groups of well-formed completions."""
    made = [group(number, case) for number, case in enumerate(cases(count))]
    return [_with(each, _texts(number)) for number, each in enumerate(made)]


def code_groups(count: int) -> list[RolloutGroup]:
    """Return groups of right programs."""
    made = [_with(group(number, case), _programs(number)) for number, case in enumerate(cases(count))]
    return [
        dataclasses.replace(
            each, prompt=dataclasses.replace(each.prompt, extra={"tests": [f"assert f(2) == {number + 2}"]})
        )
        for number, each in enumerate(made)
    ]


async def measure(scorer: Scorer, groups: list[RolloutGroup]) -> dict[str, float]:
    """Return samples per second by the clock and by processor time."""
    await scorer.start()
    waiting = iter(groups[AT_ONCE:])

    async def ask(todo: Iterator[RolloutGroup]) -> None:
        for each in todo:
            for score in await scorer.score(each):
                assert score.value is not None, score

    await ask(iter(groups[:AT_ONCE]))
    samples = sum(len(each.samples) for each in groups[AT_ONCE:])
    started_s, cpu_s = time.perf_counter(), _cpu_s()
    await asyncio.gather(*(ask(waiting) for _ in range(AT_ONCE)))
    wall_s, cpu_s = time.perf_counter() - started_s, _cpu_s() - cpu_s
    await scorer.close()
    return {"per_s": samples / wall_s, "per_cpu_s": samples / cpu_s}


def _cpu_s() -> float:
    """Return the processor time of this process and its descendants, reaped ones included."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in (own, *own.children(recursive=True)))


async def _scorers(groups: int) -> AsyncIterator[tuple[str, Scorer, list[RolloutGroup]]]:
    try:
        rules = FormatScorer.model_validate({"kind": "format", "tags": ["think", "answer"], "pattern": PATTERN})
    except ValueError:  # an older checkout
        tags = [{"tag": "think"}, {"tag": "answer"}]
        rules = FormatScorer.model_validate({"kind": "format", "tags": tags, "pattern": PATTERN})
    yield "format", FormatChecker(rules), format_groups(groups)
    answers = [group(number, case) for number, case in enumerate(cases(groups * GROUP_SIZE))]
    yield "answer", AnswerMatcher(AnswerScorer(kind="answer")), answers
    async with executor("auto", 0) as client:
        scorer = CodeTester(CodeScorer(kind="code"), client.address)
        yield "code", scorer, code_groups(max(2 * AT_ONCE, groups // 4))


async def here(groups: int) -> dict[str, dict[str, float]]:
    """Measure this checkout."""
    return {name: await measure(scorer, todo) async for name, scorer, todo in _scorers(groups)}


def _ask(folder: Path, groups: int) -> dict[str, dict[str, float]]:
    command = [sys.executable, str(Path(__file__).resolve()), "--groups", str(groups)]
    environment = os.environ | {"PYTHONPATH": str(folder.resolve())}
    answer = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True)
    result: dict[str, dict[str, float]] = json.loads(answer.stdout)
    return result


def compare(before: Path, groups: int, rounds: int) -> dict[str, Any]:
    """Measure both checkouts in turn."""
    pairs = [(_ask(Path.cwd(), groups), _ask(before, groups)) for _ in range(rounds)]

    def median_ratio(scorer: str, figure: str) -> float:
        return round(statistics.median(now[scorer][figure] / then[scorer][figure] for now, then in pairs), 3)

    return {
        scorer: {
            "ratio": median_ratio(scorer, "per_s"),
            "cpu_ratio": median_ratio(scorer, "per_cpu_s"),
            "per_s": [round(now[scorer]["per_s"], 1) for now, _ in pairs],
            "before_per_s": [round(then[scorer]["per_s"], 1) for _, then in pairs],
        }
        for scorer in pairs[0][0]
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=120, help="of 16 samples; a quarter of it for programs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="folder of another checkout")
    arguments = parser.parse_args()
    if arguments.before is None:
        print(json.dumps(asyncio.run(here(arguments.groups))))
        return
    result = compare(arguments.before, arguments.groups, arguments.rounds)
    print(json.dumps({"benchmark": "honest_scoring", "load": round(os.getloadavg()[0], 1)} | result))
    if min(each["cpu_ratio"] for each in result.values()) < LEAST_RATIO:
        sys.exit(f"expected at least {LEAST_RATIO} of the throughput before, of every scorer")


if __name__ == "__main__":
    main()
