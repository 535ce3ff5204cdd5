"""Laws of demonstrations: their tokens, refused rows, and admission as experience."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.services.cli import plan as plans
from penstock.services.coordinator.admission.admission import Admission, terms_of
from penstock.services.coordinator.admission.bus_full import Shortage
from penstock.services.coordinator.admission.curriculum import Curriculum
from penstock.services.coordinator.admission.dataset import Dataset, Problem, rows_to_try
from penstock.services.coordinator.admission.demonstrations import Demonstrations
from penstock.services.coordinator.data import load_data, order_of
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import ChatMessage, Experience, Purpose
from penstock.shared.errors import SettingsError
from penstock.shared.model.tokenizer import stop_tokens
from penstock.shared.settings import Settings
from tests.coordinator.admission.test_admission import start
from tests.support import tiny
from tests.support.coordinator_players import generating

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
    return [(each.prompt_token_ids.tolist(), each.completion.token_ids.tolist()) for each in shown if each is not None]


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


TURN = "{% for m in messages %}{{ m.role[0] }}={{ m.content }}{{ END }}{% endfor %}{% if add_generation_prompt %}a={% endif %}"
USER, ASSISTANT = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    ("end", "ids"),
    [
        ("''", [4, END]),
        ("eos_token", [4, END]),
        ("eos_token + ' '", [4, END]),
        ("eos_token + eos_token", [4, END]),
    ],
    ids=["GLM-4", "DeepSeek", "ChatML", "twice"],
)
def test_an_answer_ends_with_an_end_token_whether_the_template_writes_one(
    tmp_path: Path, end: str, ids: list[int]
) -> None:
    of = settings(tmp_path, [{"messages": [USER, ASSISTANT]}], TURN.replace("END", end))
    assert [completion for _, completion in loaded(of)] == [ids]


def test_where_the_template_ends_answers_with_another_special_token_both_generation_and_demonstrations_end_there(
    tmp_path: Path,
) -> None:
    of = settings(tmp_path, [{"messages": [USER, ASSISTANT]}])
    tokenizer = tiny.tokenizer(TURN.replace("END", "'<end_of_turn> '"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    tokenizer.save_pretrained(of.policy.model)
    end_of_turn = len(tokenizer) - 1
    assert stop_tokens(tokenizer) == (END, end_of_turn)
    reading = Demonstrations(of)
    reading._vocabulary = reading._codec._vocabulary = len(tokenizer)
    problem = Problem("rows.jsonl:1", None, (ChatMessage("user", "1+1"),), None, {})
    assert reading.encode(problem, ["2"]).completion.token_ids.tolist() == [4, end_of_turn]


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
        (
            {"messages": [USER, {"role": "assistant", "content": "because 2"}]},
            TURN.replace("m.content", "m.content.split('because ')[-1]"),
            "but it leaves a part of it out: change policy.tokenizer, or give prompt and completion as texts",
        ),
        ({"messages": [USER, ASSISTANT]}, TURN.replace("END", "'end'"), "but it puts text after it: change policy"),
        (
            {"messages": [{"role": "system", "content": "think"}, USER, ASSISTANT]},
            "{% for m in messages if m.role != 'system' %}{{ m.role[0] }}={{ m.content }}{% endfor %}",
            r"renders every message of .*rows.jsonl:1, but it leaves out the system's",
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
        (
            "algorithm",
            {"dynamic_sampling": True},
            "expected algorithm.dynamic_sampling to be left out with algorithm.loss",
        ),
        (
            "algorithm",
            {"kl": {"coefficient": 0.1}},
            "expected algorithm.kl.coefficient to be left out with algorithm.loss",
        ),
        ("algorithm", {"advantage": "rloo"}, "expected algorithm.advantage to be left out with algorithm.loss"),
        ("data", {"curriculum": True}, 'expected data.curriculum = False with algorithm.loss = "cross_entropy"'),
        ("evaluation", {"path": {"a": "a.jsonl", "b": "b.jsonl"}}, "expected one held-out set"),
    ):
        changes = {**tables, section: {**tables[section], **changed}}
        with pytest.raises(ValueError, match=sentence):
            Settings.model_validate(changes)


def mixture(folder: Path, problems: list[Any], shown: list[Any], **sections: dict[str, Any]) -> Settings:
    policy = tiny.save(folder)
    tiny.tokenizer().save_pretrained(policy)
    paths = {}
    for name, rows, weight in (("problems", problems, 2.0), ("shown", shown, 1.0)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths[str(folder / f"{name}.jsonl")] = weight
    tables: dict[str, dict[str, Any]] = {
        "policy": {"model": str(policy)},
        "data": {"path": paths, "shuffle": False},
        "algorithm": {"imitation": 0.1, "groups_per_step": 3, "max_lag": 1},
        "sampling": {"group_size": 4, "max_new_tokens": 8},
        "reward": {"scorers": [{"kind": "answer", "name": "answer"}], "expression": "answer"},
    }
    return Settings.model_validate(
        {name: {**table, **sections.get(name, {})} for name, table in tables.items()}
        | {name: table for name, table in sections.items() if name not in tables}
    )


PROBLEMS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
SHOWN = [{"prompt": f"{i}+2=", "completion": str(i + 2)} for i in range(2)]


async def test_problems_and_demonstrations_are_admitted_in_one_order_by_weight(tmp_path: Path, bus: Bus) -> None:
    of = mixture(tmp_path, PROBLEMS, SHOWN)
    ledger = await start(bus)
    train: Dataset = load_data(of).train
    assert [problem.demonstration is not None for problem in train.problems] == [False] * 4 + [True] * 2
    assert [prompt.text for prompt in rows_to_try(train.problems, ["answer"])] == ["0+1=", "2+1=", "3+1="]

    def admission() -> Admission:
        return Admission(
            bus, ledger, train, order_of(of, train), lambda: terms_of(of), lambda: True, Shortage(bus, ledger), 0.001
        )

    assert (await admission().admit(), await admission().admit()) == (6, 0)
    deliveries = await bus.read(streams.EXPERIENCE, Experience, "trainer", 10, 0.1)
    shown = {int(e.group_id): (e.group.prompt.purpose, e.group.prompt.text) for e in (d.message() for d in deliveries)}
    asked = {int(prompt.group_id): (prompt.purpose, prompt.text) for prompt in await generating(bus)}
    places = [order_of(of, train).index(place) for place in range(6)]
    kinds = [Purpose.DEMONSTRATE if train.problems[index].demonstration else Purpose.TRAIN for index in places]
    assert kinds.count(Purpose.DEMONSTRATE) == 2
    assert {**shown, **asked} == {g: (kinds[g], train.problems[places[g]].text) for g in range(6)}
    assert await bus.length(streams.PROMPTS) == 4 * 4, "an entry for each sample of the problems"
    assert await ledger.in_flight() == 6
    assert await ledger.count_earlier([0, 3, 99]) == [sum(place < end for place in asked) for end in (0, 3, 99)]
    await bus.drop(deliveries[0], "test")
    assert await admission().admit() == 1
    assert (await ledger.status()).cursor == 7


def test_a_curriculum_draws_problems_and_shows_every_demonstration_once_an_epoch(tmp_path: Path) -> None:
    of = mixture(tmp_path, PROBLEMS, [*SHOWN, {"prompt": "7+2=", "completion": "9"}], data={"curriculum": True})
    train = load_data(of).train
    drawing = order_of(of, train)
    assert isinstance(drawing, Curriculum)
    easy, hard = train.problems[0].row_id, train.problems[1].row_id
    drawing.follow({easy: 0.0, hard: 0.25, train.problems[4].row_id: 0.25})
    drawn = [drawing.index(place) for place in range(3000)]
    shown = [index for index in drawn if index >= 4]
    assert shown == [4 + place % 3 for place in range(999)], "333 of each 1,000 draws"
    assert drawn.count(0) < drawn.count(1) / 5


@pytest.mark.parametrize(
    ("problems", "shown", "sentence"),
    [
        (PROBLEMS, [*SHOWN, {"prompt": "1", "answer": "2"}], r"found one in .*shown.jsonl:1 and none in .*shown.jsonl:3: complete"),
        ([*PROBLEMS, *SHOWN], SHOWN, r"found one in .*problems.jsonl:5 and none in .*problems.jsonl:1: complete the rows"),
        (PROBLEMS, PROBLEMS, "beside others in data.path with algorithm.imitation > 0, found none: change data.completion_field"),
        (SHOWN, SHOWN, "found only demonstrations: train them alone by `penstock sft`"),
        ([{"prompt": "1+1="}] * 20, SHOWN, "expected a reference answer in 'answer' for scorer 'answer'"),
    ],
)  # fmt: skip
def test_datasets_that_are_neither_are_refused_by_row(
    tmp_path: Path, problems: list[Any], shown: list[Any], sentence: str
) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load_data(mixture(tmp_path, problems, shown))


def test_without_imitation_a_completion_is_a_column_like_any_other(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2", "completion": "two"}, PROBLEMS[0]]
    train = load_data(mixture(tmp_path, rows, PROBLEMS, algorithm={"imitation": 0.0})).train
    assert train.problems[0].extra == {"completion": "two"}
    assert all(problem.demonstration is None for problem in train.problems)


def test_what_a_mixture_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    for sections, sentence in (
        ({"data": {"path": "rows.jsonl"}}, "expected several datasets in data.path with algorithm.imitation > 0, found 0.1 and one"),
        ({"algorithm": {"imitation": 0.1, "preset": "dpo"}}, 'expected algorithm.imitation to be left out with algorithm.loss = "dpo"'),
        ({"algorithm": {"imitation": 0.1, "loss": "cross_entropy"}}, "expected algorithm.imitation to be left out with algorithm.loss"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            mixture(tmp_path, PROBLEMS, SHOWN, **sections)
    of = mixture(tmp_path, PROBLEMS, SHOWN)
    with pytest.raises(SettingsError, match=r"expected algorithm.imitation = 0 with penstock plan, found 0.1"):
        plans.make(of, "8xH200")
    own = {"by_dataset": {str(tmp_path / "shown.jsonl"): {"top_p": 0.5}}, "max_new_tokens": 8}
    with pytest.raises(
        SettingsError, match=r"expected datasets of problems in sampling.by_dataset, found '.*shown.jsonl'"
    ):
        load_data(mixture(tmp_path, PROBLEMS, SHOWN, sampling=own))
