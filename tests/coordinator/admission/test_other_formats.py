"""Rows of other tools: read as they are, or refused with the settings that read them; and the message around a text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.admission import dataset, first_rows
from penstock.services.coordinator.data import load_data
from penstock.shared.bus.messages import ChatMessage
from penstock.shared.errors import SettingsError
from penstock.shared.settings import DataSettings, Settings
from penstock.shared.settings.rewards.scorers import AnswerScorer
from tests.coordinator.admission.test_demonstrations import CHAT, END, loaded, settings

ASKED = (ChatMessage("user", "1+1="),)
ANSWER = AnswerScorer.model_validate({"kind": "answer", "mode": "numeric"})
FLAG = re.compile(r'--data\.(\w+) (?:"([^"]+)"|(\S+))')


def flags_in(sentence: str) -> dict[str, str]:
    return {name: quoted or word for name, quoted, word in FLAG.findall(sentence)}


def problem(folder: Path, row: dict[str, Any], **data: str) -> dataset.Problem:
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    read = DataSettings.model_validate({"path": folder / "rows.jsonl", "max_bad_rows": 0, **data})
    (loaded_one,) = dataset.load(str(read.path), read, "data.path", ["answer"], [ANSWER]).problems
    return loaded_one


@pytest.mark.parametrize(
    ("row", "tool", "flags", "asked"),
    [
        ({"question": "1+1=", "answer": "so <<1+1=2>>2\n#### 2"}, "GSM8K", {"prompt_field": "question"}, "1+1="),
        (
            {"instruction": "1+1=", "input": "", "output": "2"},
            "Alpaca",
            {"prompt_field": "instruction", "answer_field": "output"},
            "1+1=",
        ),
        (
            {"instruction": "1+1", "input": "=", "output": "2"},
            "Alpaca",
            {"prompt_field": "instruction", "answer_field": "output", "user": "{prompt} {extra.input}"},
            "1+1 =",
        ),
        ({"input": "1+1=", "label": "2"}, "OpenRLHF", {"prompt_field": "input", "answer_field": "label"}, "1+1="),
        (
            {"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2"}},
            "verl",
            {"answer_field": "reward_model.ground_truth"},
            "1+1=",
        ),
        ({"problem": "1+1=", "solution": "2"}, "", {"prompt_field": "problem", "answer_field": "solution"}, "1+1="),
    ],
)
def test_the_refusal_of_anothers_problems_names_the_settings_that_read_them(
    row: dict[str, Any], tool: str, flags: dict[str, str], asked: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError) as refused:
        problem(tmp_path, row)
    assert f"for {tool}:" in str(refused.value) or not tool
    assert flags_in(str(refused.value)) == flags
    read = problem(tmp_path, row, **flags)
    assert (read.text or read.messages[0].content if read.messages else read.text) == asked
    assert read.answer is not None
    assert read.answer.endswith("2")


@pytest.mark.parametrize(
    ("row", "flags"),
    [
        ({"instruction": "1+1=", "output": "2"}, {"prompt_field": "instruction", "completion_field": "output"}),
        ({"question": "1+1=", "answer": "2"}, {"prompt_field": "question", "completion_field": "answer"}),
        ({"prompt": "1+1=", "response": "2"}, {"completion_field": "response"}),
        (
            {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
            {"completion_field": "chosen", "rejected_field": "rejected"},
        ),
    ],
)
def test_the_refusal_of_anothers_demonstrations_names_the_settings_that_read_them(
    row: dict[str, Any], flags: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError) as refused:
        first_rows.check(settings(tmp_path, [row]))
    assert flags_in(str(refused.value)) == flags
    preset = {"preset": "dpo"} if "rejected_field" in flags else {"loss": "cross_entropy"}
    data = {"path": tmp_path / "rows.jsonl", "max_bad_rows": 0, **flags}
    of = Settings.model_validate({"policy": {"model": "a/b"}, "data": data, "algorithm": preset})
    assert not first_rows.check(of), "which asks by text"


def test_pairs_are_sent_to_sft(tmp_path: Path) -> None:
    for row in ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, {"chosen": "2", "rejected": "3"}):
        with pytest.raises(
            SettingsError, match=r"`penstock sft` with --data.completion_field chosen --data.rejected_field rejected"
        ):
            problem(tmp_path, row)


def test_conversations_of_sharegpt_are_messages(tmp_path: Path) -> None:
    asked = {"conversations": [{"from": "human", "value": "1+1="}], "answer": "2"}
    assert (read := problem(tmp_path, asked)).messages == ASKED
    assert "conversations" not in read.extra
    assert problem(tmp_path, asked, prompt_field="conversations").messages == ASKED
    shown = {"conversations": [*asked["conversations"], {"from": "gpt", "value": "2"}]}
    messages = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
    assert loaded(settings(tmp_path, [shown], CHAT)) == loaded(settings(tmp_path, [messages], CHAT))
    told = (ChatMessage("system", "Be brief."), *ASKED)
    assert problem(tmp_path, {**asked, "system": "Be brief."}).messages == told
    own = {"conversations": [{"from": "system", "value": "Be brief."}, *asked["conversations"]], "answer": "2"}
    assert problem(tmp_path, {**own, "system": "Be long."}).messages == told
    kept = {"prompt": "1+1=", "conversations": [{"from": "human", "value": "?"}], "answer": "2"}
    assert problem(tmp_path, kept).extra == {"conversations": kept["conversations"]}, "a column for scorers"


@pytest.mark.parametrize("role", ["observation", None, {"a": 1}])
def test_another_role_in_conversations_is_a_bad_row(role: object, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"rows.jsonl:1: expected human, gpt, .* as 'from' in 'conversations'"):
        problem(tmp_path, {"conversations": [{"from": role, "value": "1+1="}], "answer": "2"})


def test_a_text_is_asked_with_the_users_message_around_it(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "unit": 7, "answer": "2"}
    user = r"{prompt} in {extra.unit}, as \boxed{answer}."
    assert problem(tmp_path, row, user=user).messages == (ChatMessage("user", r"1+1= in 7, as \boxed{answer}."),)
    assert problem(tmp_path, row, user="{prompt}", system="Be brief.").messages == (
        ChatMessage("system", "Be brief."),
        *ASKED,
    )
    inserted = {"prompt": "{extra.unit}", "unit": "{prompt}", "answer": "2"}
    assert problem(tmp_path, inserted, user="{prompt} {extra.unit}").messages == (
        ChatMessage("user", "{extra.unit} {prompt}"),
    )
    assert problem(tmp_path, row, user="{prompt}").row_id == problem(tmp_path, row).row_id
    ids = [problem(tmp_path, {**row, "unit": unit}, user=user).row_id for unit in (7, 7, 8)]
    assert ids[0] == ids[1] != ids[2], "another column in it is another problem, of which the curriculum has a signal"
    shown = settings(tmp_path, [{"prompt": "1+1=", "completion": "2"}], CHAT, user="{prompt}")
    assert load_data(shown).train.problems[0].messages == ASKED
    assert loaded(shown)[0][1][-1] == END


@pytest.mark.parametrize(
    ("row", "user", "refusal"),
    [
        ({"prompt": "1", "answer": "2"}, "Be brief.", r"expected \{prompt\} in data.user"),
        ({"prompt": "1", "answer": "2"}, "{prompt} {extra.unit}", "expected text or a number in 'unit'"),
        ({"messages": [{"role": "user", "content": "1"}], "answer": "2"}, "{prompt}", "found messages"),
    ],
)
def test_a_message_that_cannot_be_filled_is_refused(
    row: dict[str, Any], user: str, refusal: str, tmp_path: Path
) -> None:
    with pytest.raises((SettingsError, ValueError), match=refusal):
        problem(tmp_path, row, user=user)
