"""Share of ordinary answers that the matcher compares, and its time per answer.

    python -m benchmarks.reward.answers --answers 4000 --processes 2

Answers are seeded, distinct and half correct: 36 % numbers, 15 % fractions, 10 % multiples of roots and pi, 10 %
intervals, 8 % sets and lists, 10 % polynomials, 4 % matrices, 3 % with units, 2 % sentences, 2 % logarithms.
``algebra_*``: only answers that need a matcher process. Time is from request to score; ``cpu_ms`` is processor time.
``--before FOLDER`` measures another checkout, ``math_verify_*`` the library alone. Fails if a limit or verdict is
missed.
"""

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import psutil

from penstock.services.reward.scorers.answer.scorer import AnswerMatcher
from penstock.shared.bus.messages import FinishReason, GroupId, Prompt, RolloutGroup, Sample, Sampling, ScoreStatus
from penstock.shared.settings.rewards.scorers import AnswerScorer

LEAST_PER_S = 300
LEAST_SHARE_UNDER_50_MS = 0.99


@dataclasses.dataclass(frozen=True)
class Case:
    """One answer to compare."""

    kind: str
    reference: str
    text: str
    equal: bool


Maker = Callable[[int, int, bool], tuple[str, str]]
"""(a, b, equal) → (reference, completion)."""


def _number(a: int, b: int, equal: bool) -> tuple[str, str]:
    result = a if equal else a + b
    return f"{a}", (rf"So \boxed{{{result}}}.", f"#### {result:,}", f"{result}.0")[b % 3]


def _fraction(a: int, b: int, equal: bool) -> tuple[str, str]:
    return rf"\frac{{{a}}}{{{b}}}", rf"\boxed{{\left(\frac{{{2 * a if equal else 2 * a + 1}}}{{{2 * b}}}\right)}}"


def _root(a: int, b: int, equal: bool) -> tuple[str, str]:
    if b % 2:
        return rf"{a}\pi", rf"\boxed{{\pi\cdot {a if equal else a + 1}}}"
    return rf"{a}\sqrt{{{4 * b}}}", rf"\boxed{{{2 * a if equal else 2 * a + 1}\sqrt{{{b}}}}}"


def _interval(a: int, b: int, equal: bool) -> tuple[str, str]:
    end = "]" if equal else ")"
    return rf"[{a},{a + b}]", rf"\boxed{{\left[{a}, {a + b}\right{end}}}"


def _set(a: int, b: int, equal: bool) -> tuple[str, str]:
    return rf"\{{{a},{a + b},-{b}\}}", rf"\boxed{{\{{-{b}, {a + b}, {a if equal else a + b + 1}\}}}}"


def _polynomial(a: int, b: int, equal: bool) -> tuple[str, str]:
    return rf"x^2+{a + b}x+{a * b}", rf"\boxed{{(x+{a})(x+{b if equal else b + 1})}}"


def _matrix(a: int, b: int, equal: bool) -> tuple[str, str]:
    last = b if equal else b + 1
    return (
        rf"\begin{{pmatrix}}{a}&0\\1&{b}\end{{pmatrix}}",
        rf"\boxed{{\begin{{bmatrix}}{a} & 0 \\ 1 & {last}\end{{bmatrix}}}}",
    )


def _unit(a: int, b: int, equal: bool) -> tuple[str, str]:
    return f"{a} cm", rf"\boxed{{{a if equal else a + b}\text{{ cm}}}}"


def _sentence(a: int, b: int, equal: bool) -> tuple[str, str]:
    return f"{a}", f"We add {b} and find that it is {a if equal else a + b}."


def _logarithm(a: int, b: int, equal: bool) -> tuple[str, str]:
    return rf"{a}\ln {b}", rf"\boxed{{{a if equal else a + 1} \cdot \ln({b})}}"


def _inequality(a: int, b: int, equal: bool) -> tuple[str, str]:
    return f"x > {a * b}", rf"\boxed{{{a * b if equal else a * b + 1} < x}}"


def _quotient(a: int, b: int, equal: bool) -> tuple[str, str]:
    return rf"\frac{{{a}}}{{x+{b}}}", rf"\boxed{{\frac{{{2 * a if equal else 2 * a + 1}}}{{2x+{2 * b}}}}}"


Mix: TypeAlias = dict[str, tuple[int, Maker]]
MIX: Mix = {
    "number": (36, _number),
    "fraction": (15, _fraction),
    "root": (10, _root),
    "interval": (10, _interval),
    "set": (8, _set),
    "polynomial": (10, _polynomial),
    "matrix": (4, _matrix),
    "unit": (3, _unit),
    "sentence": (2, _sentence),
    "logarithm": (2, _logarithm),
}
ALGEBRA: Mix = {
    "sentence": (1, _sentence),
    "logarithm": (1, _logarithm),
    "inequality": (1, _inequality),
    "quotient": (1, _quotient),
}


def cases(count: int, mix: Mix = MIX, seed: int = 0) -> Iterator[Case]:
    """Yield ``count`` distinct answers."""
    lot, seen = random.Random(seed), set[tuple[str, str]]()
    while len(seen) < count:
        (kind,) = lot.choices(list(mix), [share for share, _ in mix.values()])
        equal = lot.random() < 0.5
        pair = mix[kind][1](lot.randint(2, 999), lot.randint(2, 99), equal)
        if pair not in seen:
            seen.add(pair)
            yield Case(kind, *pair, equal)


def group(number: int, case: Case) -> RolloutGroup:
    """Return a group of one answer."""
    prompt = Prompt(GroupId(number), f"mix:{number}", Sampling(1, 64, 1.0), text="?", answer=case.reference)
    none = np.zeros(0, np.float32)
    sample = Sample(none.astype(np.int32), none, np.zeros((1, 2), np.int32), FinishReason.STOP, case.text)
    return RolloutGroup(prompt, none.astype(np.int32), (sample,), "benchmark", 0.0, 0.0)


async def measure(todo: list[Case], processes: int, at_once: int) -> dict[str, float]:
    """Return the metrics of one pass over ``todo``."""
    matcher = AnswerMatcher(AnswerScorer(kind="answer"), processes=processes)
    await matcher.start()
    took_s, wrong, waiting = list[float](), list[Case](), iter(enumerate(todo))

    async def ask() -> None:
        for number, case in waiting:
            started_s = time.perf_counter()
            (score,) = await matcher.score(group(number, case))
            took_s.append(time.perf_counter() - started_s)
            if (score.status, score.value) != (ScoreStatus.OK, float(case.equal)):
                wrong.append(case)

    started_s, cpu_s = time.perf_counter(), _cpu_s()
    await asyncio.gather(*(ask() for _ in range(at_once)))
    wall_s, cpu_s = time.perf_counter() - started_s, _cpu_s() - cpu_s
    await matcher.close()
    for case in wrong[:5]:
        print(f"wrong verdict: {case}", file=sys.stderr)
    times_s = np.array(took_s)
    return {
        "per_s": round(len(todo) / wall_s, 1),
        "p50_ms": round(float(np.quantile(times_s, 0.5)) * 1000, 2),
        "p99_ms": round(float(np.quantile(times_s, 0.99)) * 1000, 2),
        "share_under_50ms": round(float((times_s < 0.05).mean()), 4),
        "cpu_ms": round(cpu_s / len(todo) * 1000, 2),
        "wrong": len(wrong),
    }


def _cpu_s() -> float:
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True)))


def library(todo: list[Case]) -> dict[str, float]:
    """Return the metrics of math-verify alone."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    right = sum(
        verify(
            parse(f"${case.reference}$", parsing_timeout=None),
            parse(case.text, parsing_timeout=None),
            timeout_seconds=None,
        )
        == case.equal
        for case in todo
    )
    cpu_s = time.process_time() - cpu_s
    return {
        "math_verify_per_s": round(len(todo) / (time.perf_counter() - started_s), 1),
        "math_verify_cpu_ms": round(cpu_s / len(todo) * 1000, 2),
        "math_verify_wrong": len(todo) - right,
    }


def before(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the result of another checkout."""
    options = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in ("answers", "processes", "at-once")]
    measured = subprocess.run(
        [sys.executable, Path(__file__).resolve(), *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder.resolve())},
        stdout=subprocess.PIPE,
        check=False,
    )
    figures = json.loads(measured.stdout)
    return {
        f"before_{name}": figures[name]
        for name in ("per_s", "cpu_ms", "wrong", "algebra_per_s", "algebra_cpu_ms", "algebra_wrong")
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=4000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=2, help="answers in flight")
    parser.add_argument("--before", type=Path, help="folder of another checkout, whose matcher is asked the same")
    arguments = parser.parse_args()
    todo = list(cases(arguments.answers))
    algebra = list(cases(max(1, arguments.answers // 10), ALGEBRA))
    figures = asyncio.run(measure(todo, arguments.processes, arguments.at_once))
    slow = asyncio.run(measure(algebra, arguments.processes, arguments.at_once))
    figures |= {f"algebra_{name}": value for name, value in slow.items()}
    figures |= library(todo[: max(1, arguments.answers // 10)])
    if arguments.before is not None:
        figures |= before(arguments.before, arguments)
    print(json.dumps(figures | {"answers": len(todo), "processes": arguments.processes, "at_once": arguments.at_once}))
    if (
        figures["per_s"] < LEAST_PER_S
        or figures["share_under_50ms"] < LEAST_SHARE_UNDER_50_MS
        or figures["wrong"] + figures["algebra_wrong"]
    ):
        sys.exit(
            f"expected at least {LEAST_PER_S} answers/s, {LEAST_SHARE_UNDER_50_MS:.0%} of them under 50 ms, and no wrong verdict"
        )


if __name__ == "__main__":
    main()
