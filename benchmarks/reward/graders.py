"""Verdicts of the answer scorer beside those of public graders, on their own test data.

    python -m benchmarks.reward.graders --math-verify Math-Verify/tests --hendrycks math/modeling \\
        --qwen-math Qwen2.5-Math/evaluation/data --tiny 2400 --attacks 500

Each grader's cases are scored under the preset of its name (Hendrycks' under ``qwen-math``, which contains it), and every
disagreement is listed. ``references``: the references of the public test sets that do not match themselves, written in
a box, and are not refused when the data is read. ``tiny``: generated pairs of formulas with tiny factors. ``attacks``: wrong
answers of :mod:`benchmarks.reward.answer_attacks` that the default accepts, beside math-verify. ``labelled``: a file of answers with verdicts of a person (``tests/support/answer_words.jsonl``). The folders are those of
checkouts of the projects; nothing of them is copied.
"""

import argparse
import asyncio
import importlib.util
import json
import logging
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.reward.answer_attacks import attacks
from benchmarks.reward.answers import Case, group
from penstock.services.reward.scorers.answer.extraction import boxed
from penstock.services.reward.scorers.answer.scorer import AnswerMatcher
from penstock.shared.settings.rewards.scorers import AnswerScorer
from tests.support import answer_pairs


async def verdicts(cases: Iterable[Case], **settings: Any) -> list[bool]:
    """Return whether each case is accepted."""
    matcher = AnswerMatcher(AnswerScorer.model_validate({"kind": "answer", **settings}), timeout_s=10.0)
    await matcher.start()
    accepted = list[bool]()
    for number, case in enumerate(cases):
        (score,) = await matcher.score(group(number, case))
        accepted.append(score.value == 1.0)
    await matcher.close()
    return accepted


async def disagreements(cases: list[Case], **settings: Any) -> dict[str, object]:
    accepted = await verdicts(cases, **settings)
    differing = [
        {"reference": case.reference[-200:], "answer": case.text[-200:], "theirs": case.equal}
        for case, verdict in zip(cases, accepted, strict=True)
        if verdict != case.equal
    ]
    return {"cases": len(cases), "disagreements": differing}


def of_math_verify(folder: Path) -> Iterator[Case]:
    """Yield the parametrized cases of its tests."""
    for file in sorted(folder.glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(f"of_math_verify.{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[f"tests.{file.stem}"] = module  # by which they import one another
        spec.loader.exec_module(module)
        for test in vars(module).values():
            for mark in getattr(test, "pytestmark", ()):
                names = re.split(r"\s*,\s*", mark.args[0]) if isinstance(mark.args[0], str) else mark.args[0]
                for values in mark.args[1]:
                    case = dict(zip(names, values, strict=False))
                    if {"gold", "pred"} <= case.keys():
                        yield Case(
                            file.stem, case["gold"], case["pred"], bool(case.get("expected", case.get("result")))
                        )


def of_hendrycks(folder: Path) -> Iterator[Case]:
    """Yield the cases of math_equivalence_test.py."""
    text = (folder / "math_equivalence_test.py").read_text()
    for match in re.finditer(r'test_in = (".*")\s*test_out = (".*")\s*self\.assert(True|False)', text):
        yield Case("hendrycks", json.loads(match[1]), json.loads(match[2]), match[3] == "True")


def of_qwen(folder: Path) -> Iterator[Case]:
    """Yield its graded completions."""
    for row in _rows(folder / "eval_rm_maj_example" / "math_cot_100.jsonl"):
        for completion, right in zip(row["code"], row["score"], strict=True):
            yield Case("qwen", row["gt"], completion, right)


_ANSWERS = ("answer", "final_answer", "Answer", "target", "label", "correct", "choice_answer")


def references(folder: Path) -> Iterator[Case]:
    """Yield the references of its test sets as they stand, with what a completion would write."""
    for file in sorted(folder.glob("*/test.jsonl")):
        for row in _rows(file):
            answer = next((row[name] for name in _ANSWERS if row.get(name) not in (None, "")), "")
            answer = answer[0] if isinstance(answer, list) else answer
            if not answer and file.parent.name == "minerva_math":
                answer = boxed(row["solution"]) or ""
            text = str(answer).rpartition("####")[2].strip()
            undressed = re.sub(r"(?<!\\)\$", "", text)
            yield Case(file.parent.name, text, rf"\boxed{{{undressed}}}", True)


def _rows(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def tiny(count: int) -> Iterator[Case]:
    """Yield pairs with tiny factors, half of them equal."""
    rules = list(answer_pairs.TINY)
    lot, seen = random.Random(41), set[tuple[str, str]]()
    while len(seen) < count:
        rule, off = rules[len(seen) % len(rules)], len(seen) // len(rules) % 2
        pair = answer_pairs.TINY[rule](lot, off)
        if pair not in seen:
            seen.add(pair)
            yield Case(rule, pair[0], rf"\boxed{{{pair[1]}}}", off == 0)


def library(cases: Iterable[Case]) -> list[bool]:
    """Return math-verify's own verdicts."""
    from math_verify import parse, verify

    return [bool(verify(parse(rf"\boxed{{{case.reference}}}"), parse(case.text))) for case in cases]


def labelled(file: Path) -> Iterator[tuple[str, Case]]:
    """Yield (set, case) of the rows ``[set, kind, reference, completion, equal]``; letters are not the library's."""
    for number, kind, reference, text, equal in _rows(file):
        if kind != "choice":
            yield f"set_{number}", Case(kind, reference, text, equal)


async def of_labelled(file: Path) -> dict[str, object]:
    """Count what the default and math-verify accept and refuse wrongly."""
    sets = dict[str, list[Case]]()
    for name, case in labelled(file):
        sets.setdefault(name, []).append(case)
    counted = dict[str, object]()
    for name, cases in sets.items():
        for grader, accepted in (("penstock", await verdicts(cases)), ("math_verify", library(cases))):
            pairs = list(zip(cases, accepted, strict=True))
            counted[f"{name}_{grader}"] = {
                "cases": len(cases),
                "accepted_wrongly": sum(verdict and not case.equal for case, verdict in pairs),
                "refused_wrongly": sum(case.equal and not verdict for case, verdict in pairs),
            }
    return counted


async def measure(arguments: argparse.Namespace) -> dict[str, object]:
    figures = dict[str, object]()
    if arguments.math_verify:
        figures["math_verify"] = await disagreements(list(of_math_verify(arguments.math_verify)), preset="math-verify")
    if arguments.hendrycks:
        figures["hendrycks"] = await disagreements(
            list(of_hendrycks(arguments.hendrycks)), preset="qwen-math", extract="whole"
        )
    if arguments.qwen_math:
        figures["qwen_math"] = await disagreements(list(of_qwen(arguments.qwen_math)), preset="qwen-math")
        figures["references"] = await of_references(list(references(arguments.qwen_math)))
    if arguments.tiny:
        figures["tiny"] = await disagreements(list(tiny(arguments.tiny)))
    if arguments.attacks:
        wrong = [Case(attack.kind, attack.reference, attack.completion, False) for attack in attacks(arguments.attacks)]
        figures["attacks"] = {**await disagreements(wrong), "math_verify_accepts": sum(library(wrong))}
    if arguments.labelled:
        figures["labelled"] = await of_labelled(arguments.labelled)
    return figures


async def of_references(cases: list[Case]) -> dict[str, object]:
    """Return how many rows reading refuses, and the others that a completion with the reference in a box misses."""
    asked = json.dumps({"scorers": [{"kind": "answer"}], "references": [[0, case.reference] for case in cases]})
    program = [sys.executable, "-m", "penstock.services.reward.scorers.answer.references"]
    refused = json.loads(subprocess.run(program, input=asked, capture_output=True, text=True, check=True).stdout)
    usable = [case for case, reason in zip(cases, refused, strict=True) if not reason]
    return {
        "rows": len(cases),
        "refused": len(cases) - len(usable),
        "silent": (await disagreements(usable))["disagreements"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("math-verify", "hendrycks", "qwen-math", "labelled"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--tiny", type=int, default=0)
    parser.add_argument("--attacks", type=int, default=0)
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    logging.getLogger("penstock.services").addHandler(logging.NullHandler())
    print(json.dumps(asyncio.run(measure(parser.parse_args())), ensure_ascii=False))


if __name__ == "__main__":
    main()
