"""Objects of a notebook become files of the run."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer

import penstock
from penstock.services.reward.scorers.function.trl_call import load_object
from penstock.services.reward.scorers.function.trl_scorer import TrlFunctions
from penstock.services.up.run_folder import private_files
from penstock.shared.settings import Settings, loads
from penstock.shared.settings.rewards.scorers import TrlScorer
from tests.support import builders

POLICY = Path(__file__).parents[2] / "examples" / "arithmetic" / "policy"
ROWS = [{"prompt": "1+1=", "answer": "2", "level": 3}, {"prompt": "1+2=", "answer": "3", "level": 1}]


def make(folder: Path, **objects: Any) -> penstock.Run:
    return penstock.Run({"run": {"folder": folder, "id": "x"}, "policy.model": str(POLICY)}, **objects)


def settings_of(run: penstock.Run) -> Settings:
    assert run._process is not None
    return loads(run._process._toml, "run.toml")


def written(run: penstock.Run) -> Path:
    assert run._process is not None
    assert run._process._inputs is not None
    assert not (run.folder / "inputs").exists(), "nothing is written before the start"
    with private_files():
        run._process._inputs.write(run.folder / "inputs")
    return run.folder / "inputs"


def test_a_model_and_its_tokenizer_are_saved_in_the_runs_folder(tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(POLICY), AutoTokenizer.from_pretrained(POLICY)
    run = make(tmp_path, model=model, tokenizer=tokenizer)
    policy = settings_of(run).policy
    inputs = written(run)
    assert (policy.model, policy.tokenizer) == (str(inputs / "policy"), str(inputs / "tokenizer"))
    again = AutoModelForCausalLM.from_pretrained(policy.model).state_dict()
    assert all((again[name] == tensor).all() for name, tensor in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(policy.tokenizer)("12+34=").input_ids == tokenizer("12+34=").input_ids


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_rows_are_json_lines(tmp_path: Path, kind: Callable[[Any], Any]) -> None:
    run = make(tmp_path, data=kind(ROWS), held_out=kind(ROWS[:1]))
    settings = settings_of(run)
    inputs = written(run)
    assert settings.data.path == str(inputs / "train.jsonl")
    assert settings.evaluation.path == str(inputs / "heldout.jsonl")
    assert [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()] == ROWS


def test_a_dataset_stays_one(tmp_path: Path) -> None:
    run = make(tmp_path, data=Dataset.from_list(ROWS))
    assert load_from_disk(str(settings_of(run).data.path if written(run) else "")).to_list() == ROWS


async def test_functions_of_a_cell_score_in_other_processes_by_their_names(tmp_path: Path) -> None:
    bonus = {"2": 0.5}

    def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [
            float(text == expected) + bonus.get(text, 0.0) for text, expected in zip(completions, answer, strict=True)
        ]

    right.__module__ = "__main__"  # as in a notebook's cell
    run = make(
        tmp_path, rewards=[right, lambda completions, **_: [-1.0 for _ in completions], lambda completions, **_: [2.0]]
    )
    bonus["2"] = 9.0  # too late
    settings = settings_of(run)
    (scorer,) = settings.reward.scorers
    assert isinstance(scorer, TrlScorer)
    assert [name.partition("(")[0] for name in scorer.functions] == [
        "penstock.carried:right", "penstock.carried:reward", "penstock.carried:reward_2",
    ]  # fmt: skip
    written(run)
    functions = TrlFunctions(scorer, "answer", 10)
    try:
        await functions.start()
        (score,) = await functions.score(builders.group(0, ("2",)))
    finally:
        await functions.close()
    assert score.parts == {"right": 0.5, "reward": -1.0, "reward_2": 2.0}


def locked() -> Callable[..., list[float]]:
    lock = threading.Lock()

    def waits(completions: list[str], **_: Any) -> list[float]:
        with lock:
            return [0.0 for _ in completions]

    return waits


def large() -> Callable[..., list[float]]:
    table = bytes(65 << 20)
    return lambda completions, **_: [float(len(table)) for _ in completions]


@pytest.mark.parametrize(
    ("objects", "sentence"),
    [
        ({"rewards": locked()}, "the reward function 'waits' cannot be sent to another process.*lock"),
        ({"rewards": large()}, "at most 64 MiB with what it refers to, found 65 of 'reward'"),
        ({"rewards": ["mine:right"]}, "expected functions as rewards, found str"),
        ({"data": [{"prompt": "1", "answer": {1, 2}}]}, "JSON can hold at train row 1"),
        ({"data": [*ROWS, {"prompt": "1", "answer": float("nan")}]}, "JSON can hold at train row 3"),
        ({"data": ["1+1="]}, "expected dictionaries as rows, found str at train row 1"),
        ({"data": DatasetDict({"test": Dataset.from_list(ROWS)})}, "found a table of test: give one of them"),
        ({"model": "gpt2"}, "expected a model of transformers, found str"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, objects: dict[str, Any], sentence: str) -> None:
    with pytest.raises(penstock.SettingsError, match=sentence):
        make(tmp_path, **objects)


def test_before_the_start_the_sentence_names_it(tmp_path: Path) -> None:
    with pytest.raises(penstock.PenstockError, match=r"has not been started: call start\(\)"):
        make(tmp_path).status()


@pytest.mark.parametrize("existing", ["inputs", "settings.toml"])
def test_an_existing_run_is_refused_before_anything_is_written(tmp_path: Path, existing: str) -> None:
    run = make(tmp_path, data=ROWS)
    (run.folder / existing).mkdir(parents=True)
    with pytest.raises(penstock.SettingsError, match=f"a run exists in {run.folder}"):
        run.start()
    assert [path.relative_to(run.folder) for path in run.folder.rglob("*")] == [Path(existing)]


def right(completions: list[str], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


def test_settings_may_name_the_functions_that_are_given(tmp_path: Path) -> None:
    run = make(tmp_path, settings={"reward.expression": "2 * rewards"}, rewards=[right])
    assert settings_of(run).reward.expression == "2 * rewards"


@pytest.mark.parametrize("name", ["Path", "pickle", "loader", "os", "__getattr__", "__loader"])
def test_a_function_may_be_called_as_anything(tmp_path: Path, name: str) -> None:
    def function(completions: list[str], **_: Any) -> list[float]:
        return [2.0 for _ in completions]

    function.__name__ = name
    run = make(tmp_path, rewards=[function])
    written(run)
    (scorer,) = settings_of(run).reward.scorers
    assert isinstance(scorer, TrlScorer)
    assert load_object(scorer.functions[0])(["a"]) == [2.0]


@pytest.mark.parametrize("place", ["inputs", "inputs/rewards.pkl"])
def test_functions_that_others_may_have_written_are_not_read(tmp_path: Path, place: str) -> None:
    run = make(tmp_path, rewards=[right])
    file = written(run) / "rewards.pkl"
    (run.folder / place).chmod(0o770)
    with pytest.raises(
        penstock.SettingsError, match=f"found {run.folder / place} of another owner, or writable by others"
    ):
        load_object(f'penstock.carried:right(file="{file}")')
