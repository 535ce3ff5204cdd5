"""A run is continued with the files that it was started with, or says which have changed."""

import os
from pathlib import Path
from typing import Any

import pytest

from penstock.shared import inputs
from penstock.shared.errors import SettingsError
from penstock.shared.inputs import INPUTS, Inputs, read_inputs, settle_inputs
from penstock.shared.settings import Settings
from tests.support.model_folders import write_model, write_safetensors

ROWS = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n'


class Run:
    """A run with files of its own, of which digests are noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.folder.mkdir()
        self.train, self.heldout = folder / "train.jsonl", folder / "heldout.jsonl"
        for file in (self.train, self.heldout):
            file.write_text(ROWS)
        self.model = write_model(folder / "model")
        self.settle().write(self.folder / INPUTS)

    def settle(self, *, accept: bool = False, **changed: Any) -> Inputs:
        values = {
            "data": {"path": self.train},
            "evaluation": {"path": self.heldout},
            "policy": {"model": str(self.model)},
        }
        return settle_inputs(Settings.model_validate({**values, **changed}), self.folder, accept=accept)

    def refusal(self, **changed: Any) -> str:
        with pytest.raises(SettingsError) as caught:
            self.settle(**changed)
        return str(caught.value)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def reverse(file: Path) -> None:
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))


@pytest.mark.parametrize(("name", "setting"), [("train", "data.path"), ("heldout", "evaluation.path")])
def test_changed_data_are_refused_by_their_name_or_accepted_and_told(run: Run, name: str, setting: str) -> None:
    assert run.settle().accepted == ()
    file: Path = getattr(run, name)
    reverse(file)
    said = run.refusal()
    assert f"found that {file} ({setting}) has changed: " in said
    assert f"`penstock up --resume {run.folder} --accept-changed-inputs`" in said
    accepted = run.settle(accept=True)
    assert [sentence.partition(", accepted at ")[0] for sentence in accepted.accepted] == [
        f"{file} ({setting}) has changed"
    ]
    accepted.write(run.folder / INPUTS)
    assert run.settle().accepted == accepted.accepted, "accepted once, and not forgotten"
    reverse(file)
    assert "has changed" in run.refusal(), "what was accepted is what the run is continued with"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_changed_model_tokenizer_or_template_is_refused(run: Run, name: str) -> None:
    file = run.model / name
    file.write_bytes(file.read_bytes().replace(b"e", b"f", 1) + b" ")
    assert f"found that {file} (policy.model) has changed" in run.refusal()


def test_new_and_missing_files_are_changes(run: Run) -> None:
    (run.model / "chat_template.jinja").write_text("{{ messages }}")
    assert f"{run.model / 'chat_template.jinja'} (policy.model) is new" in run.refusal()
    run.settle(accept=True).write(run.folder / INPUTS)
    (run.model / "chat_template.jinja").unlink()
    assert f"{run.model / 'chat_template.jinja'} (policy.model) is missing" in run.refusal()


def test_the_same_files_at_another_place_are_the_same(run: Run, tmp_path: Path) -> None:
    moved = run.train.rename(tmp_path / "moved.jsonl")
    model = run.model.rename(tmp_path / "moved")
    (model / "README.md").write_text("of nobody's concern")
    assert run.settle(data={"path": moved}, policy={"model": str(model)}).accepted == ()
    run.train.write_text("{}")
    assert f"{run.train} (data.path) has changed" in run.refusal(policy={"model": str(model)})
    both = {"path": {str(moved): 1.0, str(run.heldout): 1.0}}
    assert f"{run.heldout} (data.path) is new" in run.refusal(data=both, policy={"model": str(model)})


def test_a_file_as_old_as_noted_is_not_read_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_SETTLED_S", -1.0)
    run.settle().write(run.folder / INPUTS)
    monkeypatch.setattr(inputs, "_digest", lambda path: pytest.fail(f"{path} is read again"))
    run.settle()


def test_weights_are_digested_by_parts_that_other_weights_differ_in(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "model.safetensors")
    size = inputs._WHOLE_BYTES + 1
    os.truncate(file, size)
    known = inputs._file(file, None)
    assert known.digest.startswith("parts:")
    for place in (0, size // 63 * 30 + 100, size - 1):  # beginning, a block, the end
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(b"\xff")
        changed = inputs._file(file, None)
        assert changed.digest != known.digest
        known = changed


def test_digests_that_cannot_be_read_are_refused_and_a_run_of_an_older_penstock_has_none(run: Run) -> None:
    (run.folder / INPUTS).write_text("[]")
    with pytest.raises(SettingsError, match="expected digests in"):
        read_inputs(run.folder)
    (run.folder / INPUTS).unlink()
    reverse(run.train)
    assert run.settle().accepted == ()


def test_changed_functions_of_a_notebook_are_refused(tmp_path: Path) -> None:
    run, file = Run(tmp_path), tmp_path / "my rewards.pkl"
    file.write_bytes(b"1")
    functions = [f'penstock.carried:{name}(file="{file}")' for name in ("right", "short")]
    reward = {"scorers": [{"kind": "trl", "name": "rewards", "functions": functions}]}
    run.settle(reward=reward).write(run.folder / INPUTS)
    file.write_bytes(b"2")
    assert f"{file} (functions of scorer 'rewards') has changed" in run.refusal(reward=reward)
