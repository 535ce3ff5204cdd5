"""Calls in a policy's text: as a regular expression would find them, in one pass over it."""

import random
import re
import time

import pytest

from penstock.services.episodes.answers import _calls_in

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def test_calls_are_those_between_markers() -> None:
    lot = random.Random(0)
    matched = 0
    for _ in range(20_000):
        text = "".join(lot.choices(["<tool_call>", "</tool_call>", "{", "}", " ", "\n", "a"], k=lot.randrange(12)))
        calls = [(match.start(), match[1], match.end()) for match in CALL.finditer(text)]
        assert list(_calls_in(text)) == calls, text
        matched += len(calls)
    assert matched > 100


@pytest.mark.parametrize("part", ["<tool_call>{", "<tool_call>{} ", "{}</tool_call>", "<tool_call> ", "} "])
def test_the_work_grows_with_the_text(part: str) -> None:
    """A policy may write anything; this is read on the event loop of all episodes."""

    def cpu_s(parts: int) -> float:
        began_s = time.process_time()
        list(_calls_in(part * parts))
        return time.process_time() - began_s

    few_s = max(1e-4, min(cpu_s(4_000) for _ in range(5)))
    assert min(cpu_s(32_000) for _ in range(5)) < 24 * few_s
