"""Turns of episodes in records, tables and the report."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.services.coordinator.records.recorder import rollout_line
from penstock.services.coordinator.records.report import write_report
from penstock.services.coordinator.schemas.records import excerpt, rollout_view
from penstock.services.tracking.tables import table_of
from penstock.shared.bus.messages import Sample
from penstock.shared.bus.transcripts import Tally, TranscribedTurn, tally, turns_of, written
from tests.coordinator.records.test_report import ATTACK, shown, write_lines
from tests.support import builders
from tests.support.browser import shows

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TURNS = [
    TranscribedTurn(
        [{"role": "user", "content": "1 and 2?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
        after=None, segment=1, tokens=2, versions=[3], seconds=0.5, waited_s=0.25,
    ),
    TranscribedTurn(
        [{"role": "tool", "content": ATTACK}, {"role": "assistant", "content": "3", "reasoning_content": "one more"}],
        after=0, segment=3, tokens=1, versions=[3, 4], seconds=0.5, waited_s=2.0,
    ),
    TranscribedTurn(
        [{"role": "user", "content": "again"}, {"role": "assistant", "content": "4"}],
        after=0, segment=4, tokens=2, versions=[4], seconds=0.5, waited_s=0.0, fork="history",
    ),
]  # fmt: skip


def episode(transcript: bytes = written(TURNS, {})) -> Sample:
    return dataclasses.replace(builders.tree(4), transcript=transcript)


def line(sample: Sample) -> dict[str, Any]:
    made = builders.experience(1, (1.0,))
    group = dataclasses.replace(made.group, samples=(sample,), prompt_token_ids=np.zeros(0, np.int32))
    return rollout_line("5-0", 5, dataclasses.replace(made, group=group), 5)


def test_a_record_has_each_message_with_its_tokens_versions_reward_and_times() -> None:
    assert turns_of(episode()) == [
        {"role": "user", "content": "1 and 2?", "seconds": 0.25},
        {"role": "assistant", "calls": [{"name": "add", "arguments": '{"a": 1}'}], "turn": 0, "tokens": 2, "versions": [3],
         "seconds": 0.5, "reward": 0.0},
        {"role": "tool", "content": ATTACK, "seconds": 2.0},
        {"role": "assistant", "content": "3", "reasoning": "one more", "turn": 1, "tokens": 1, "versions": [3, 4],
         "seconds": 0.5, "reward": 1.0},
        {"role": "user", "content": "again", "seconds": 0.0, "fork": "history", "after": 0},
        {"role": "assistant", "content": "4", "turn": 2, "tokens": 2, "versions": [4], "seconds": 0.5, "reward": 0.5},
    ]  # fmt: skip
    assert "turns" not in line(builders.sample())["completions"][0]


HUGE = b"1" + b"0" * 400
"""More than a float holds."""


@pytest.mark.parametrize(
    "transcript",
    [
        *(b"", b"[]", b"{", b"\xff", b'{"turns": [1]}', b'{"turns": [{"messages": []}]}', b"[" * 100_000),
        written(TURNS[:1], {}).replace(b"0.25", HUGE),
    ],
)
def test_a_transcript_that_cannot_be_read_shows_no_turns(transcript: bytes) -> None:
    assert turns_of(episode(transcript)) == []


@pytest.mark.parametrize("number", [HUGE, b"Infinity", b"NaN", b"1e999", b'"?"', b"[1]", b"{}"])
def test_a_transcript_whose_numbers_are_none_counts_for_nothing(number: bytes) -> None:
    whole = written(TURNS, {"score": 7.5})
    assert tally(episode(whole)) == Tally(1, 2.0, {"score": 7.5})
    assert tally(episode(whole.replace(b"7.5", number))) == Tally()
    assert tally(episode(whole.replace(b"2.0", number))) == Tally()


def test_long_episodes_are_cut_to_what_samples_and_records_hold() -> None:
    message = {"role": "user", "content": "\x00" * 70_000, "tool_calls": [CALL] * 200}
    turns = [dataclasses.replace(TURNS[0], messages=[message] * 20) for _ in range(200)]
    transcript = written(turns, {})
    assert len(transcript) < 1 << 24
    shown_turns: list[Any] = turns_of(episode(transcript))
    assert [turn["turn"] for turn in shown_turns if "turn" in turn] == list(range(200))
    assert len(json.dumps(line(episode(transcript)))) < 1 << 21


def test_a_list_leaves_the_turns_out_and_trackers_show_them_as_text() -> None:
    made = line(episode())
    view = rollout_view(made).completions[0]
    assert (view.ended, view.turns[1].calls[0].name, view.turns[4].fork) == ("turns", "add", "history")
    assert excerpt(rollout_view(made), 5).completions[0].turns == ()
    assert [turn.content for turn in excerpt(rollout_view(made), 2, turns=True).completions[0].turns] == [
        "1 ", "", "</", "3", "ag", "4",
    ]  # fmt: skip
    table = table_of(made)
    row = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert row["finish_reason"] == "turns"
    assert row["completion"].splitlines() == [
        "user: 1 and 2?", 'assistant, turn 1: add({"a": 1})', f"tool: {ATTACK}", "assistant, turn 2: 3",
        "user, a branch (history): again", "assistant, turn 3: 4",
    ]  # fmt: skip


async def test_the_report_shows_turns_and_what_a_tool_or_model_wrote_stays_text(tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", [line(episode())])
    write_report(tmp_path)
    async with shown(tmp_path) as page:
        await page.get_by_role("button", name="Unfold").first.click()
        for words in ("assistant, turn 1 · v3 · 2 tokens · 0.5 s · reward 0", 'add({"a": 1})', "one more", "ended: turns",
                      "tool · given, not trained · 2 s since the answer before", ATTACK,
                      "a branch after turn 1: other messages than were sent"):  # fmt: skip
            await shows(page, "#rollouts .whole", words)
        assert await page.locator("img").count() == 0
        assert await page.locator("script").count() == 2
