"""Laws of preference pairs: both completions' tokens, TRL's forms of a row, refused rows and settings, admission."""

from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.admission.admission import Admission, terms_of
from penstock.services.coordinator.admission.bus_full import Shortage
from penstock.services.coordinator.data import load_data, order_of
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Experience, Purpose
from penstock.shared.errors import SettingsError
from penstock.shared.settings import RunKind, Settings
from penstock.shared.settings.reading.loading import is_given
from tests.coordinator.admission import test_demonstrations
from tests.coordinator.admission.test_admission import start
from tests.coordinator.admission.test_demonstrations import CHAT, END

DPO = {"preset": "dpo", "groups_per_step": 2}
QUESTION = {"role": "user", "content": "1+1"}


def settings(folder: Path, rows: list[dict[str, Any]], template: str | None = None, **data: Any) -> Settings:
    columns = {"completion_field": "chosen", "rejected_field": "rejected"}
    of = test_demonstrations.settings(folder, rows, template, **data)
    tables = of.model_dump(exclude_unset=True)
    return Settings.model_validate({**tables, "data": {**columns, **tables["data"]}, "algorithm": DPO})


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def loaded(of: Settings) -> list[tuple[list[int], list[list[int]]]]:
    shown = [problem.demonstration for problem in load_data(of).train.problems]
    return [
        (each.prompt_token_ids.tolist(), [completion.token_ids.tolist() for completion in each.completions])
        for each in shown
        if each is not None
    ]


def test_both_completions_follow_the_prompts_tokens_and_end(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "12+3=", "chosen": "15", "rejected": "5"},
        {"prompt": "1+1=", "chosen": said("2"), "rejected": said("3")},
    ]
    assert loaded(settings(tmp_path, rows)) == [
        ([3, 4, 12, 5, 13], [[3, 7, END], [7, END]]),
        ([3, 12, 3, 13], [[4, END], [5, END]]),
    ]


def test_trls_conversations_with_and_without_the_prompt_are_the_same_pair(tmp_path: Path) -> None:
    whole = {"chosen": [QUESTION, *said("2")], "rejected": [QUESTION, *said("3")]}
    rows: list[dict[str, Any]] = [
        {"prompt": [QUESTION], "chosen": said("2"), "rejected": said("3")},
        {"messages": [QUESTION], "chosen": "2", "rejected": "3"},
        whole,
        {**whole, "prompt": "1+1"},
        {**whole, "prompt": [QUESTION]},
        {**whole, "messages": whole["chosen"], "prompt": "1+1", "score_chosen": 7.0},
    ]
    first, *others = loaded(settings(tmp_path, rows, CHAT))
    assert first[1] == [[4, END], [5, END]]
    assert others == [first] * 5


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "1", "chosen": "2"}, "expected a completion in 'rejected', as text or as a message of the assistant, found none: change data.rejected_field"),
        ({"prompt": "1", "rejected": "2"}, "expected a completion in 'chosen', .* change data.completion_field"),
        ({"prompt": "1", "chosen": "2", "rejected": ""}, "expected a completion in 'rejected'"),
        ({"prompt": "1", "chosen": "2", "rejected": said("")}, "expected a completion in 'rejected'"),
        ({"prompt": "1", "chosen": "2", "rejected": [QUESTION]}, "expected a completion in 'rejected'"),
        ({"prompt": "1", "chosen": "2", "rejected": [QUESTION, *said("3")]}, "expected a completion in 'rejected'"),
        ({"prompt": "1", "chosen": "2", "rejected": said("2")}, "expected different completions in 'chosen' and 'rejected', found the same one twice"),
        ({"prompt": "1", "chosen": "2", "rejected": "2<eos>"}, "expected different tokens of the completions in 'chosen' and 'rejected', found the same"),
        ({"chosen": "2", "rejected": "3"}, "expected a column 'prompt' or 'messages' that is not null, found no column"),
        ({"chosen": [QUESTION, *said("2")], "rejected": [{"role": "user", "content": "1+2"}, *said("3")]}, "begin with the same question, found others"),
        ({"prompt": "1+2", "chosen": [QUESTION, *said("2")], "rejected": [QUESTION, *said("3")]}, "begin with the row's prompt, found another prompt"),
        ({"prompt": "1+1=", "chosen": "1" * 20, "rejected": "2" * 15}, r"expected a pair of at most 40 tokens \(trainer.micro_batch_tokens\), found 41"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_pair_is_a_bad_row_with_its_reason(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    good = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    with pytest.raises(SettingsError, match=sentence):
        load_data(settings(tmp_path, [good, row]))
    train = load_data(settings(tmp_path, [good, row], max_bad_rows=1)).train
    assert (len(train), train.bad_rows) == (1, 1)


def test_a_completion_longer_than_the_models_context_is_a_bad_row(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3" * 508}]
    tables = settings(tmp_path, rows).model_dump()
    of = Settings.model_validate({**tables, "trainer": {**tables["trainer"], "micro_batch_tokens": 4096}})
    with pytest.raises(
        SettingsError, match=r"expected a pair of at most 512 tokens \(the model's context\), found 513"
    ):
        load_data(of)


async def test_a_pair_is_a_group_of_two_samples_whose_better_one_has_the_reward(tmp_path: Path, bus: Bus) -> None:
    of = settings(tmp_path, [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "0"} for i in range(3)])
    ledger, train = await start(bus), load_data(of).train
    admission = Admission(
        bus, ledger, train, order_of(of, train), lambda: terms_of(of), lambda: True, Shortage(bus, ledger), 0.001
    )
    assert (await admission.admit(), await admission.admit()) == (of.slots, 0)
    deliveries = await bus.read(streams.EXPERIENCE, Experience, "trainer", 10, 0.1)
    groups = [delivery.message() for delivery in deliveries]
    assert [[sample.text for sample in each.group.samples] for each in groups[:2]] == [["1", "0"], ["2", "0"]]
    assert {(*each.rewards.tolist(), each.group.prompt.purpose) for each in groups} == {(1.0, 0.0, Purpose.DEMONSTRATE)}
    assert {each.group.prompt.sampling.samples for each in groups} == {2}
    assert [await bus.length(stream) for stream in (streams.PROMPTS, streams.ROLLOUTS)] == [0, 0]
    assert await ledger.in_flight() == of.slots


def test_what_pairs_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    tables = settings(tmp_path, [{"prompt": "1", "chosen": "2", "rejected": "3"}]).model_dump(exclude_unset=True)
    tables["algorithm"] = DPO
    for section, changed, sentence in (
        ("algorithm", {"preset": "grpo"}, 'expected algorithm.loss = "dpo" with data.rejected_field, .* found "clip": set algorithm.preset = "dpo"'),
        ("algorithm", {"reference": "reward"}, 'expected algorithm.reference = "trainer" with data.rejected_field'),
        ("algorithm", {"entropy_bonus": 0.1}, "expected algorithm.entropy_bonus to be left at its default with data.rejected_field"),
        ("algorithm", {"filter": "a:b"}, "expected algorithm.filter to be left at its default"),
        ("algorithm", {"overlong": (0.5, 1.0)}, "expected algorithm.overlong to be left at its default"),
        ("algorithm", {"imitation": 0.1}, 'expected algorithm.imitation to be left out with algorithm.loss = "dpo"'),
        ("algorithm", {"kl": {"coefficient": 0.1}}, 'expected algorithm.kl.coefficient to be left out with algorithm.loss = "dpo"'),
        ("guards", {"limits": {"reference_kl": 1.0}}, "expected guards.limits.reference_kl = 0 with data.rejected_field"),
        ("data", {"curriculum": True}, "expected data.curriculum = False with data.rejected_field, where nothing is generated"),
        ("data", {"completion_field": "rejected"}, "expected a column of its own in data.rejected_field"),
        ("placement", {"mode": "shared"}, 'expected placement.mode = "separate" with data.rejected_field'),
        ("evaluation", {"path": {"a": "a.jsonl", "b": "b.jsonl"}}, "expected one held-out set with data.rejected_field"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            Settings.model_validate({**tables, section: {**tables.get(section, {}), **changed}})


def test_without_the_column_dpo_is_online_and_with_it_nothing_is_generated(tmp_path: Path) -> None:
    online = Settings.model_validate({"algorithm": {"preset": "dpo"}})
    assert online.kind.generates
    pairs = settings(tmp_path, [{"prompt": "1", "chosen": "2", "rejected": "3"}])
    assert (pairs.kind, pairs.kind.generates) == (RunKind.PAIRS, False)


def test_a_flag_or_the_file_gives_a_setting(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[data]\nrejected_field = "worse"\n')
    assert is_given("data.rejected_field", path)
    assert not is_given("data.rejected_field", path, ["--data.rejected_field="])
    path.write_text("")
    assert not is_given("data.rejected_field", path)
    assert is_given("data.rejected_field", path, ["--data.rejected_field", "worse"])
