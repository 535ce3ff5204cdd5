"""Laws of demonstrations: their tokens, refused rows, and admission as experience."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.coordinator.admission.admission import Admission, terms_of
from services.coordinator.admission.bus_full import Shortage
from services.coordinator.admission.dataset import Dataset
from services.coordinator.service import load_data, order_of
from shared.bus import streams
from shared.bus.bus import Bus
from shared.bus.messages import Experience, Purpose
from shared.errors import SettingsError
from shared.settings import Settings
from tests.coordinator.admission.test_admission import start
from tests.support import tiny

CHAT = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }}{{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)
END = 1


def settings(folder: Path, rows: list[dict[str, Any]], template: str | None = None, **data: Any) -> Settings:
    policy = tiny.save(folder)
    tiny.tokenizer(template).save_pretrained(policy)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Settings.model_validate(
        {
            "policy": {"model": str(policy)},
            "data": {"path": folder / "rows.jsonl", "max_bad_rows": 0, "shuffle": False, **data},
            "algorithm": {"loss": "cross_entropy", "groups_per_step": 2},
            "trainer": {"micro_batch_tokens": 40},
        }
    )


def loaded(of: Settings) -> list[tuple[list[int], list[int]]]:
    shown = [problem.demonstration for problem in load_data(of).train.problems]
    return [(each.prompt_token_ids.tolist(), each.token_ids.tolist()) for each in shown if each is not None]


def test_a_completion_follows_its_prompts_tokens_and_ends(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "12+3=", "completion": "15"},
        {"prompt": "1+1=", "completion": [{"role": "assistant", "content": "2"}]},
    ]
    assert loaded(settings(tmp_path, rows)) == [([3, 4, 12, 5, 13], [3, 7, END]), ([3, 12, 3, 13], [4, END])]
    renamed = [{"prompt": "1+1=", "answer": "2"}]
    assert loaded(settings(tmp_path, renamed, completion_field="answer")) == [([3, 12, 3, 13], [4, END])]


def test_messages_that_end_with_the_assistants_are_a_prompt_and_its_completion(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    of = settings(tmp_path, [{"messages": turns}, {"messages": turns[:1], "completion": "2"}], CHAT)
    whole = tiny.tokenizer(CHAT)("u=1+1")["input_ids"]
    first, second = loaded(of)
    assert first == second
    assert first[0][: len(whole)] == whole
    assert first[1] == [4, END], "what follows the turn's end is not trained"


@pytest.mark.parametrize(
    ("row", "template", "sentence"),
    [
        (
            {"prompt": "1+1="},
            None,
            "expected a completion in 'completion', or 'messages' that end with the assistant's",
        ),
        ({"prompt": "1+1=", "completion": ""}, None, "expected a completion in 'completion'"),
        (
            {"prompt": "1+1=", "completion": "1" * 36},
            None,
            r"expected a demonstration of at most 40 tokens \(trainer.micro_batch_tokens\), found 41",
        ),
        (
            {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]},
            "{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            "expected a chat template that renders an answered conversation as the prompt and what follows it",
        ),
    ],
)
def test_a_row_that_cannot_be_trained_is_a_bad_row(
    tmp_path: Path, row: dict[str, Any], template: str | None, sentence: str
) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load_data(settings(tmp_path, [row], template))


async def test_demonstrations_are_experience_in_flight_until_they_end(tmp_path: Path, bus: Bus) -> None:
    of = settings(tmp_path, [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(3)])
    ledger = await start(bus)
    train: Dataset = load_data(of).train

    def admission() -> Admission:
        return Admission(
            bus, ledger, train, order_of(of, train), lambda: terms_of(of), lambda: True, Shortage(bus, ledger), 0.001
        )

    assert (await admission().admit(), await admission().admit()) == (4, 0), "another coordinator admits none again"
    deliveries = await bus.read(streams.EXPERIENCE, Experience, "trainer", 10, 0.1)
    groups = [delivery.message().group for delivery in deliveries]
    assert [(int(group.group_id), group.prompt.problem.rpartition(":")[2]) for group in groups] == [
        (0, "1"), (1, "2"), (2, "3"), (3, "1"),
    ]  # fmt: skip
    assert {group.prompt.purpose for group in groups} == {Purpose.DEMONSTRATE}
    assert (await ledger.in_flight(), (await ledger.status()).cursor) == (4, 4)
    await bus.drop(deliveries[0], "test")
    assert await admission().admit() == 1
    assert (await ledger.in_flight(), (await ledger.status()).cursor) == (4, 5)
    assert [await bus.length(stream) for stream in (streams.PROMPTS, streams.ROLLOUTS)] == [0, 0]


def test_what_needs_rewards_or_samples_is_refused_by_name(tmp_path: Path) -> None:
    tables = settings(tmp_path, [{"prompt": "1", "completion": "2"}]).model_dump()
    for section, changed, sentence in (
        ("algorithm", {"dynamic_sampling": True}, "expected algorithm.dynamic_sampling to be left at its default"),
        ("algorithm", {"kl": {"coefficient": 0.1}}, "expected algorithm.kl to be left at its default"),
        ("algorithm", {"advantage": "rloo"}, "expected algorithm.advantage to be left at its default"),
        ("data", {"curriculum": True}, 'expected data.curriculum = False with algorithm.loss = "cross_entropy"'),
        ("evaluation", {"path": {"a": "a.jsonl", "b": "b.jsonl"}}, "expected one held-out set"),
    ):
        changes = {**tables, section: {**tables[section], **changed}}
        with pytest.raises(ValueError, match=sentence):
            Settings.model_validate(changes)
