"""Laws of texts that end a completion: the first token that completes one ends it, however tokens arrive."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.rollout.engines.stop_texts import StopTexts
from penstock.shared.bus.messages import Int32Array

WORDS = ("a", "b", "ab", " ", "é", "\n")


def decoded(completions: Sequence[Int32Array]) -> list[str]:
    return ["".join(WORDS[token] for token in ids) for ids in completions]


@given(
    st.lists(st.integers(0, len(WORDS) - 1), max_size=80),
    st.lists(st.text("ab é\n", min_size=1, max_size=3), min_size=1, max_size=2),
    st.integers(1, 12),
    st.integers(0, 20),
)
def test_a_completion_ends_at_the_first_token_after_its_minimum_that_completes_a_text(
    tokens: list[int], texts: list[str], together: int, minimum: int
) -> None:
    ids = np.array(tokens, dtype=np.int32)
    prefixes = [decoded([ids[:length]])[0] for length in range(1, len(ids) + 1)]
    early = len(decoded([ids[:minimum]])[0])
    ends = [[end for end in range(early + 1, len(text) + 1) if text[:end].endswith(tuple(texts))] for text in prefixes]
    expected = next((n for n, complete in enumerate(ends, 1) if n > minimum and complete), 0)
    stop, searched, end = StopTexts(decoded, texts, minimum), 0, 0
    for arrived in [*range(together, len(ids), together), len(ids)]:
        end, searched = stop.end(ids[:arrived], searched), arrived
        if end:
            break
    assert end == expected


def test_tokens_that_arrive_together_are_decoded_once() -> None:
    calls = list[int]()

    def counted(completions: Sequence[Int32Array]) -> list[str]:
        calls.append(len(completions[-1]))
        return decoded(completions)

    stop, ids = StopTexts(counted, ["\n"]), np.zeros(2000, dtype=np.int32)
    for arrived in range(8, 2001, 8):
        assert stop.end(ids[:arrived], arrived - 8) == 0
    assert len(calls) == 250
    assert max(calls) < 8 + 4 + 8 + 1


def test_of_a_long_completion_only_the_last_tokens_are_read() -> None:
    read = list[int]()

    class Tokens(list[int]):
        def __getitem__(self, places: Any) -> Any:
            part = super().__getitem__(places)
            read.append(len(part))
            return part

        def __array__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("all tokens were read")

    assert StopTexts(decoded, ["\n"]).end(Tokens([0] * 5_000 + [5]), 5_000) == 5_001
    assert max(read) < 20
