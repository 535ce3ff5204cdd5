"""Laws of datasets: rows, errors, and the order of a run."""

import datetime
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from penstock.services.coordinator.admission import dataset, dataset_files, first_rows, hub, references
from penstock.services.coordinator.admission.data_overlap import Overlap, Training
from penstock.services.coordinator.admission.dataset import subset
from penstock.services.coordinator.admission.mixing import EpochOrder
from penstock.services.coordinator.data import load_data
from penstock.shared.bus.messages import ChatMessage
from penstock.shared.errors import SettingsError
from penstock.shared.settings import DataSettings
from penstock.shared.settings.rewards.scorers import AnswerScorer
from tests.support.coordinator_players import settings

ROOT = Path(__file__).parents[3]


def lines(path: Path, *rows: object) -> Path:
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", encoding="utf-8"
    )
    return path


def load(path: Path, **changed: object) -> dataset.Dataset:
    return dataset.load(str(path), DataSettings.model_validate({"path": path, **changed}), "data.path")


def refusal(path: Path, **changed: object) -> str:
    with pytest.raises(SettingsError) as caught:
        load(path, **changed)
    return str(caught.value)


def test_a_row_becomes_text_answer_and_the_rest_and_a_number_keeps_its_type(tmp_path: Path) -> None:
    loaded = load(lines(tmp_path / "a.jsonl", {"prompt": "12+34=", "answer": 46, "level": 1, "tags": ["x", None]}))
    assert loaded.problems == (
        dataset.Problem("a.jsonl:1", "12+34=", None, "46", {"answer": 46, "level": 1, "tags": ["x", None]}),
    )


def test_a_row_has_the_same_id_wherever_it_is_and_another_one_another(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": "1+1=", "answer": "2"},
        {"prompt": "1+1=", "answer": "3"},
        {"prompt": "2+2=", "answer": "4", "level": 1},
        {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"},
    ]
    first = [problem.row_id for problem in load(lines(tmp_path / "a.jsonl", *rows)).problems]
    assert len(set(first)) == len(first)
    moved = load(lines(tmp_path / "b.jsonl", *reversed(rows), rows[0]), system="Add.").problems
    assert [problem.row_id for problem in moved] == [*reversed(first), first[0]], "equal rows are the same problem"
    more = load(lines(tmp_path / "c.jsonl", {**rows[0], "level": 2, "answer": 2})).problems
    assert [problem.row_id for problem in more] == first[:1], "other columns, and a number as a text, change nothing"
    assert moved[0].prompt(0, dataset._PROBE).stable_id == moved[0].row_id


@pytest.mark.parametrize(
    ("answer", "text"), [("46", "46"), (46, "46"), (0.5, "0.5"), (-3, "-3"), (None, None), ("", "")]
)
def test_numbers_become_text(tmp_path: Path, answer: object, text: str | None) -> None:
    assert load(lines(tmp_path / "a.jsonl", {"prompt": "q", "answer": answer})).problems[0].answer == text


def test_messages_stand_in_where_there_is_no_prompt(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    dataset = load(
        lines(tmp_path / "a.jsonl", {"messages": turns}, {"prompt": turns}, {"prompt": "t", "messages": turns})
    )
    expected = (ChatMessage("system", "Add."), ChatMessage("user", "1+1"))
    assert [problem.messages for problem in dataset.problems] == [expected, expected, None]
    assert [problem.text for problem in dataset.problems] == [None, None, "t"]


def test_other_columns_can_be_named(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"question": "q", "solution": "a"})
    dataset = load(path, prompt_field="question", answer_field="solution")
    assert (dataset.problems[0].text, dataset.problems[0].answer, dataset.problems[0].extra) == ("q", "a", {})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"prompt": ', "expected a JSON object, but this is not JSON"),
        ("[1]", "expected a JSON object on each line, found list"),
        ({"question": "q"}, "expected a column 'prompt' or 'messages' that is not null, found 'question'"),
        ({"prompt": None, "answer": "2"}, "expected a column 'prompt' or 'messages' that is not null, found 'answer'"),
        ({}, "expected a column 'prompt' or 'messages' that is not null, found no column"),
        ({"prompt": ""}, "expected text in 'prompt', found an empty one"),
        ({"prompt": 7}, "expected text or chat messages in 'prompt', found 7"),
        ({"messages": []}, "expected text or chat messages in 'messages', found []"),
        ({"messages": [{"role": "user"}]}, "expected {role, content} as texts in 'messages', found"),
        ({"prompt": "q", "answer": [1]}, "expected text or a number in 'answer', found [1]"),
        ({"prompt": "q", "answer": True}, "expected text or a number in 'answer', found true"),
        ({"prompt": "q", "big": 2**64}, "a value cannot be put into a message"),
        ('{"prompt": "\\ud800"}', "a value cannot be put into a message"),
        ("[" * 100_000, "expected a JSON object, but this is not JSON"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: object, words: str) -> None:
    path = lines(tmp_path / "train.jsonl", {"prompt": "q"}, row)
    assert load(path, max_bad_rows=1).bad_rows == 1
    assert f"train.jsonl:2: {words}" in refusal(path, max_bad_rows=0)


def test_bytes_that_are_not_utf8_are_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9"}\n\xef\xbb\xbf\n{"prompt": "q"}\n')
    assert "a.jsonl:1: expected UTF-8, found" in refusal(path, max_bad_rows=0)
    path.write_bytes('{"prompt": "q"}'.encode("utf-16"))  # which json.loads would take
    assert "a.jsonl:1: expected UTF-8, found" in refusal(path, max_bad_rows=0)


def test_a_byte_order_mark_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "q"}\r\n\n  \n{"prompt": "r"}')
    dataset = load(path, max_bad_rows=0)
    assert [(problem.source, problem.text) for problem in dataset.problems] == [("a.jsonl:1", "q"), ("a.jsonl:4", "r")]


def test_bad_rows_are_counted_up_to_the_limit_and_the_first_are_listed(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"prompt": "q"}, [], *({f"column {n}": 1} for n in range(6)))
    assert load(path, max_bad_rows=7).bad_rows == 7
    words = refusal(path, max_bad_rows=6)
    assert "expected at most 6 bad rows" in words
    assert "data.max_bad_rows" in words
    assert [f"a.jsonl:{line}:" in words for line in (2, 6, 7)] == [True, True, False]
    same = lines(tmp_path / "b.jsonl", *["bad"] * 7)
    assert [f"b.jsonl:{line}:" in refusal(same) for line in (1, 2)] == [True, False], "a reason is given once"


def test_an_empty_dataset_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.touch()
    assert refusal(path) == f"expected at least one row in {path}, but it has no rows: change data.path"


def test_a_missing_or_unknown_file_is_refused(tmp_path: Path) -> None:
    assert f"no dataset at {tmp_path / 'no.jsonl'}: change data.path" in refusal(tmp_path / "no.jsonl")
    assert f"{tmp_path / 'gsm8k'} (on a hub, it is hf://OWNER/NAME): change data.path" in refusal(tmp_path / "gsm8k")
    (tmp_path / "a.csv").touch()
    assert "expected .jsonl, .parquet, or a folder" in refusal(tmp_path / "a.csv")


def test_parquet_rows_read_like_lines(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    turns = [[{"role": "user", "content": "1+1"}], None]
    day = datetime.date(2026, 1, 2)
    columns = {"prompt": [None, "2+2="], "messages": turns, "answer": [2, 4], "day": [day, None]}
    parquet.write_table(arrow.table(columns), path)
    loaded = load(path)
    assert loaded.problems == (
        dataset.Problem(
            "train.parquet:1", None, (ChatMessage("user", "1+1"),), "2", {"answer": 2, "day": "2026-01-02"}
        ),
        dataset.Problem("train.parquet:2", "2+2=", None, "4", {"answer": 4, "day": None}),
    )


def test_a_column_that_json_cannot_hold_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    parquet.write_table(arrow.table({"prompt": ["q"], "image": [b"\x00"]}), path)
    assert "train.parquet:1: expected a JSON value in 'image', found bytes" in refusal(path, max_bad_rows=0)


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no")
    assert "as a Parquet file" in refusal(tmp_path / "a.parquet")


def test_a_saved_hugging_face_dataset_is_read_and_a_dict_of_splits_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    first = datasets.Dataset.from_dict({"prompt": ["1+1=", "2+2="], "answer": [2, 4], "level": [1, 2]})
    first.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": first, "test": first}).save_to_disk(str(tmp_path / "both"))
    assert load(tmp_path / "one").problems[1] == dataset.Problem("one:2", "2+2=", None, "4", {"answer": 4, "level": 2})
    words = refusal(tmp_path / "both")
    assert "found a DatasetDict (train, test)" in words
    assert f"change data.path to the folder of one split, such as {tmp_path}/both/train" in words
    assert load(tmp_path / "both" / "train").problems[0].text == "1+1="


def test_a_folder_that_is_no_dataset_is_refused(tmp_path: Path) -> None:
    assert "a folder without dataset_info.json" in refusal(tmp_path)


def test_without_the_datasets_package_the_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dataset_info.json").touch()
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install '.[datasets]'" in refusal(tmp_path)


def test_each_epoch_draws_every_problem_once_in_its_own_order() -> None:
    order = EpochOrder(50, seed=7, shuffle=True)
    first, second = ([order.index(place) for place in range(start, start + 50)] for start in (0, 50))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != list(range(50))


def test_the_order_depends_on_seed_and_cursor_alone() -> None:
    whole = [EpochOrder(10, seed=3, shuffle=True).index(place) for place in range(30)]
    resumed = EpochOrder(10, seed=3, shuffle=True)
    assert [resumed.index(place) for place in range(17, 30)] == whole[17:]
    assert [EpochOrder(10, seed=4, shuffle=True).index(place) for place in range(30)] != whole


def test_the_order_of_a_seed_never_changes() -> None:
    # Runs resume by cursor: the order must never change.
    assert [EpochOrder(8, seed=0, shuffle=True).index(place) for place in range(16)] == [
        2,
        4,
        3,
        6,
        5,
        0,
        1,
        7,
        1,
        3,
        7,
        6,
        0,
        4,
        2,
        5,
    ]


def test_without_shuffle_the_order_is_the_files() -> None:
    assert [EpochOrder(3, seed=0, shuffle=False).index(place) for place in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_subset_is_fixed_by_its_seed() -> None:
    chosen = subset(100, 10, seed=5)
    assert chosen == subset(100, 10, seed=5)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 10
    assert subset(3, 10, seed=5) == [0, 1, 2]


def _routed(tmp_path: Path, *values: object) -> dataset.Dataset:
    path = tmp_path / "routed.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1+1=", "by": value}) + "\n" for value in values))
    settings = DataSettings.model_validate({"path": path, "scorers_field": "by", "max_bad_rows": 0})
    return dataset.load(path, settings, "data.path", ["answer", "format"])


def test_a_row_names_the_scorers_that_apply(tmp_path: Path) -> None:
    actual = _routed(tmp_path, ["answer"], "format, answer", None, "", [])
    assert [problem.scorers for problem in actual.problems] == [("answer",), ("format", "answer"), (), (), ()]
    assert actual.problems[0].prompt(0, dataset._PROBE).scorers == ("answer",)
    assert actual.problems[0].extra == {}


@pytest.mark.parametrize("value", ["code", ["answer", "code"], 5, [5], {"a": 1}])
def test_a_row_that_names_no_scorer_of_the_run_is_bad(tmp_path: Path, value: object) -> None:
    with pytest.raises(SettingsError, match=r"expected names of scorers \(answer, format\) in 'by', found"):
        _routed(tmp_path, value)


def test_a_training_row_names_its_teachers_and_an_unknown_one_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "taught.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1+1=", "by": value}) + "\n" for value in ("large", "large, small")))
    settings = DataSettings.model_validate({"path": path, "teacher_field": "by", "max_bad_rows": 0})
    problems = dataset.load_training(settings, teachers=["large", "small"]).problems
    assert [problem.prompt(0, dataset._PROBE).teachers for problem in problems] == [("large",), ("large", "small")]
    assert [problem.extra for problem in problems] == [{}, {}]
    with pytest.raises(SettingsError, match=r"expected names of teachers \(large\) in 'by', found \"small\""):
        dataset.load_training(settings, teachers=["large"])
    assert len(dataset.load(path, settings, "evaluation.path")) == 2
    path.write_text(json.dumps({"prompt": "1+1=", "by": None}))
    with pytest.raises(SettingsError, match=r"expected the name of a teacher \(large\) in 'by', found none"):
        dataset.load_training(settings, teachers=["large"])


@pytest.mark.parametrize("role", ["assistant", "Assistant", "model"])
def test_messages_that_end_with_the_policys_own_turn_are_bad_as_they_show_the_answer(tmp_path: Path, role: str) -> None:
    asked = [{"role": "user", "content": "1+1="}]
    few_shot = [*asked, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2="}]
    path = tmp_path / "chat.jsonl"
    turns = [few_shot, [*asked, {"role": role, "content": "2"}]]
    path.write_text("".join(json.dumps({"messages": turn, "answer": "2"}) + "\n" for turn in turns))
    with pytest.raises(SettingsError) as caught:
        dataset.load(path, DataSettings.model_validate({"path": path, "max_bad_rows": 0}), "data.path")
    assert (
        f"chat.jsonl:2: expected messages that end with the question to the policy, found {role!r} as the last role"
        in str(caught.value)
    )
    assert "data.answer_field" in str(caught.value)
    assert "data.prompt_field" in str(caught.value)


def test_a_row_without_a_reference_answer_is_bad_where_a_scorer_that_applies_compares_with_one(tmp_path: Path) -> None:
    path = tmp_path / "routed.jsonl"
    rows = [{"prompt": "a", "by": "format"}, {"prompt": "b", "answer": "2"}, {"prompt": "c", "answer": " "}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = DataSettings.model_validate({"path": path, "scorers_field": "by"})
    loaded = dataset.load(path, settings, "data.path", ["answer", "format"], [AnswerScorer(kind="answer")])
    assert ([problem.text for problem in loaded.problems], loaded.bad_rows) == (["a", "b"], 1)
    assert len(dataset.load(path, settings, "data.path", ["answer", "format"])) == 3


def test_a_reference_that_no_answer_can_equal_is_a_bad_row_that_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    answers = [
        "4",
        "$x=-1$ or $x=1$",
        r"$\$ 3040$",
        "min at $x=1$, max at $2$ or so",
        float("nan"),
        "",
        r"1;$\frac{8}{9}$",
    ]
    path.write_text("".join(json.dumps({"prompt": "a", "answer": answer}) + "\n" for answer in answers))
    settings = DataSettings.model_validate({"path": path, "max_bad_rows": 3})
    loaded = dataset.load(path, settings, "data.path", ["answer"], [AnswerScorer(kind="answer")])
    assert [problem.answer for problem in loaded.problems] == [answers[0], answers[1], answers[2], answers[6]]
    assert [sentence.partition(": ")[0] for sentence in loaded.bad] == [f"odd.jsonl:{line}" for line in (5, 6, 4)]
    assert "'min at $x=1$, max at $2$ or so', which does not even equal itself" in loaded.bad[2]
    with pytest.raises(SettingsError, match=r"odd\.jsonl:1: expected one of the letters ABCDE"):
        dataset.load(path, settings, "data.path", ["answer"], [AnswerScorer(kind="answer", extract="choice")])


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("_NEEDED", ("penstock.services.missing",), "where the reward service is installed"),
        ("_LEAST_S", 0.0, "took more than 0 s"),
        ("_COMMAND", (sys.executable, "-c", "raise SystemExit('killed')"), "failed: killed"),
    ],
)
def test_references_that_cannot_be_checked_are_used_and_said(
    name: str, value: object, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(references, name, value)
    assert references.check([(AnswerScorer(kind="answer"), "min at $x=1$, max at $2$ or so")]) == [None]
    (said,) = caplog.records
    assert reason in said.reason  # type: ignore[attr-defined]


def test_a_dataset_of_few_rows_that_are_all_bad_names_them(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text('{"prompt": "1+1="}\n')
    with pytest.raises(
        SettingsError, match=r"found a bad one(.|\n)*few\.jsonl:1: expected a reference answer in 'answer'"
    ):
        dataset.load(path, DataSettings(path=str(path)), "data.path", ["answer"], [AnswerScorer(kind="answer")])


def test_overlap_counts_prompts_word_for_word_and_but_for_case_and_spacing(tmp_path: Path) -> None:
    def problems(name: str, *rows: dict[str, object]) -> dataset.Dataset:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return dataset.load(path, DataSettings(path=str(path)), "data.path")

    chat: list[dict[str, object]] = [
        {"messages": [{"role": "user", "content": text}]} for text in ("Name a color.", "x")
    ]
    train = problems("train.jsonl", {"prompt": "1+1="}, {"prompt": "What is  2?"}, chat[0])
    held_out = problems("held.jsonl", {"prompt": "3+3="}, {"prompt": "1+1="}, {"prompt": "what is 2? "}, *chat)
    actual = Training(train.problems).overlap("heldout", held_out.problems)
    assert actual == Overlap("heldout", problems=5, exact=2, similar=1, example="held.jsonl:2")
    assert actual.sentence("evaluation.path") == (
        "3 of the 5 held-out problems of 'heldout' are in the training data too (2 word for word, 1 but for case and spacing; the "
        "first is held.jsonl:2): their accuracy measures memory. Remove them from one of the two: change evaluation.path or data.path"
    )


def test_rows_to_try_are_spread_over_the_data_for_each_scorer(tmp_path: Path) -> None:
    path = tmp_path / "routed.jsonl"
    rows = [{"prompt": str(index), "by": "format" if index == 7 else "answer"} for index in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = DataSettings.model_validate({"path": path, "scorers_field": "by"})
    loaded = dataset.load(path, settings, "data.path", ["answer", "format"])
    assert [prompt.text for prompt in dataset.rows_to_try(loaded.problems, ["answer", "format"])] == [
        "0",
        "4",
        "7",
        "8",
    ]
    assert [prompt.text for prompt in dataset.rows_to_try(loaded.problems[:1], ["answer"])] == ["0"]


def test_overlap_is_a_notice_of_the_run_and_the_arithmetic_example_has_none(tmp_path: Path) -> None:
    shared = settings(tmp_path, heldout=3)
    (notice,) = load_data(shared).notices
    assert (notice.about, notice.level) == ("held-out data heldout", "warning")
    assert notice.text.startswith("3 of the 3 held-out problems")
    example = ROOT / "examples" / "arithmetic"
    apart = settings(tmp_path, data={"path": example / "train.jsonl"}, evaluation={"path": example / "heldout.jsonl"})
    assert load_data(apart).notices == ()


ROWS = [
    {"prompt": "1+1=", "level": 1, "source": "book", "hard": False},
    {"prompt": "2+2=", "level": 2, "source": "web", "hard": True},
    {"prompt": "a long prompt", "level": 3, "source": "book", "hard": True},
]


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("level <= 2", ["1+1=", "2+2="]),
        ('source == "book"', ["1+1=", "a long prompt"]),
        ("prompt_characters < 10", ["1+1=", "2+2="]),
        ('not hard or source != "book" and level > 1', ["1+1=", "2+2="]),
    ],
)
def test_rows_that_meet_the_filter_are_used_and_the_others_are_counted(
    tmp_path: Path, condition: str, kept: list[str]
) -> None:
    path = lines(tmp_path / "a.jsonl", *ROWS)
    loaded = dataset.load_training(DataSettings.model_validate({"path": path, "filter": condition}))
    assert [problem.text for problem in loaded.problems] == kept
    assert (loaded.filtered, loaded.bad_rows) == (3 - len(kept), 0)


@pytest.mark.parametrize(
    ("condition", "sentence"),
    [
        ("grade > 1", "expected a number or text in 'grade', as data.filter needs it, found none"),
        ("source + 1 > 1", "expected values that fit data.filter, found others"),
        ("level > 9", "expected rows of .* that meet data.filter .level > 9., but none of 3 does: change data.filter"),
    ],
)
def test_a_filter_that_does_not_fit_the_rows_is_refused(tmp_path: Path, condition: str, sentence: str) -> None:
    settings = DataSettings.model_validate({"path": lines(tmp_path / "a.jsonl", *ROWS), "filter": condition})
    with pytest.raises(SettingsError, match=sentence):
        dataset.load_training(settings)


def test_the_system_message_precedes_prompts_that_have_none(tmp_path: Path) -> None:
    user, own = {"role": "user", "content": "1+1"}, {"role": "system", "content": "Own."}
    path = lines(tmp_path / "a.jsonl", {"prompt": "1+1"}, {"prompt": [user]}, {"prompt": [own, user]})
    loaded = load(path, system="Add.")
    added, kept = ChatMessage("system", "Add."), ChatMessage("system", "Own.")
    asked = ChatMessage("user", "1+1")
    assert [problem.messages for problem in loaded.problems] == [(added, asked), (added, asked), (kept, asked)]
    assert [problem.text for problem in loaded.problems] == [None, None, None]


def test_several_datasets_are_loaded_one_after_the_other(tmp_path: Path) -> None:
    first, second = lines(tmp_path / "a.jsonl", *ROWS), lines(tmp_path / "b.jsonl", *ROWS, {"prompt": ""})
    settings = DataSettings.model_validate({"path": {str(first): 3, str(second): 1}, "filter": "level > 1"})
    loaded = dataset.load_training(settings)
    assert [problem.source for problem in loaded.problems] == ["a.jsonl:2", "a.jsonl:3", "b.jsonl:2", "b.jsonl:3"]
    assert (loaded.sizes, loaded.filtered, loaded.bad) == (
        (2, 2),
        2,
        ("b.jsonl:4: expected text in 'prompt', found an empty one",),
    )


def test_a_line_is_bounded_in_bytes_and_values_and_the_next_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"prompt": "' + b"a" * (16 << 20) + b'"}\n' + b"[[]" + b",[]" * 600_000 + b']\n{"prompt": "q"}\n'
    )
    loaded = load(path, max_bad_rows=2)
    assert [problem.source for problem in loaded.problems] == ["a.jsonl:3"]
    assert loaded.bad[0] == "a.jsonl:1: expected at most 16777216 bytes on a line, found more"
    assert loaded.bad[1].startswith("a.jsonl:2: expected at most 1000000 values on a line")


@pytest.mark.parametrize(("depth", "bad"), [(31, 0), (32, 0), (33, 1), (500, 1), (5_000, 1)])
def test_a_row_that_no_reader_takes_is_bad(depth: int, bad: int, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "q"}\n{"prompt": "q", "deep": ' + "[" * depth + "]" * depth + "}\n")
    assert load(path, max_bad_rows=1).bad_rows == bad


_LOADED = """
import sys
from collections.abc import Iterator
from pathlib import Path
from penstock.services.coordinator.admission import dataset_files
from penstock.shared.errors import SettingsError
def peak_kib():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
before = peak_kib()
rows = 0
try:
    for _ in dataset_files.read(sys.argv[1], "data.path"):
        rows += 1
except SettingsError as error:
    print(error)
print(rows, peak_kib() - before)
"""


@pytest.mark.parametrize(("length", "rows"), [(2_400_000, 106), (17 << 20, 0)])
def test_a_small_parquet_file_of_enormous_rows_is_refused_in_little_memory(
    length: int, rows: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    texts = arrow.DictionaryArray.from_arrays(arrow.array([0] * 1024, arrow.int32()), ["a" * length])
    parquet.write_table(arrow.table({"prompt": texts}), path, compression="zstd")
    assert path.stat().st_size < 30_000
    done = subprocess.run([sys.executable, "-c", _LOADED, path], capture_output=True, text=True, check=True, cwd=ROOT)
    sentence, counts = done.stdout.strip().splitlines()
    read, kib = map(int, counts.split())
    assert sentence.startswith("expected rows of at most 16777216 bytes")
    assert rows <= read < rows + 20
    assert kib < 300 * 1024


def test_a_row_group_that_declares_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"prompt": ["q"] * 1000}), path)
    monkeypatch.setattr(dataset_files, "_GROUP_BYTES", 1000)
    assert "expected row groups of at most 1000 bytes" in refusal(path)


def test_rows_of_a_hub_are_judged_one_by_one_and_left_to_the_coordinator_where_reading_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def served(*answers: dict[str, object] | OSError) -> bool:
        def rows() -> Iterator[dict[str, object]]:
            for answer in answers:
                if isinstance(answer, OSError):
                    raise answer
                read.append(str(answer))
                yield answer

        monkeypatch.setattr(hub, "_load", lambda *_, **__: rows())
        return first_rows.check(settings(tmp_path, data={"path": "hf://own/sums:train", "system": "Add."}))

    bad: dict[str, object] = {"question": "1+1="}
    asks: dict[str, object] = {"prompt": "1+1=", "answer": 2}
    assert served(bad, asks, asks)
    assert len(read) == 2, "up to the first usable row"
    assert served(bad, OSError("reset by peer")), "by the system prompt"
    for answers in ((bad,), ()):
        with pytest.raises(SettingsError, match=r"expected at least one (usable )?row in hf://own/sums:train"):
            served(*answers)
