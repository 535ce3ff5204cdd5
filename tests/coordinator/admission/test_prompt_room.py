"""Prompts without room for a completion are known before a model is loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.admission.dataset import load_training
from penstock.services.coordinator.admission.first_rows import long_prompts
from penstock.services.coordinator.service import start
from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings

POLICY = Path("examples/arithmetic/policy")
"""Reads 64 tokens, one a character."""
FITS, LONG = "1" * 62, "1" * 63


def settings(folder: Path, prompts: list[Any], **more: dict[str, Any]) -> Settings:
    """Return those of a run with completions of 4 tokens; two tokens of a text count as merged."""
    path = folder / "train.jsonl"
    column = "prompt" if isinstance(prompts[0], str) else "messages"
    path.write_text("".join(json.dumps({column: prompt, "answer": 1}) + "\n" for prompt in prompts))
    given: dict[str, dict[str, Any]] = {
        "policy": {"model": str(POLICY)},
        "data": {"path": str(path)},
        "sampling": {"max_new_tokens": 4},
    }
    for table, values in more.items():
        given[table] = {**given.get(table, {}), **values}
    return Settings.model_validate(given)


def said(of: Settings) -> str:
    return long_prompts(of, load_training(of.data))


def asked(*texts: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": text} for text in texts[:-1]] + [{"role": "user", "content": texts[-1]}]


def test_prompts_without_room_are_counted_and_the_shortest_is_named(tmp_path: Path) -> None:
    of = settings(tmp_path, [FITS, "1" * 70, FITS, LONG])
    assert said(of) == (
        "2 of 4 prompts spread over the data leave no room for a completion and will be dropped; the shortest, train.jsonl:4, has at "
        "least 61 tokens, of 60 at most (a context of 64, the model's or rollout.vllm.max_model_len, less sampling.max_new_tokens = 4): "
        "shorten them, or change one of these settings, or data.filter"
    )
    assert said(settings(tmp_path, [FITS])) == ""


async def test_a_run_of_which_no_prompt_has_room_is_refused_by_its_coordinator(tmp_path: Path) -> None:
    of = settings(
        tmp_path, [LONG, LONG], run={"id": "long", "folder": str(tmp_path)}, bus={"url": "redis://127.0.0.1:9"}
    )
    with pytest.raises(
        SettingsError, match=r"^expected prompts with room for a completion, found none among 2 prompts"
    ):
        await start(of, "coordinator-0")


def test_a_shorter_context_and_the_datasets_own_length_count(tmp_path: Path) -> None:
    of = settings(tmp_path, [FITS, "1"], rollout={"vllm": {"max_model_len": 32}, "engine": "vllm"})
    assert said(of).startswith("1 of 2 prompts")
    other = tmp_path / "b.jsonl"
    other.write_text(f'{{"prompt": "{LONG}", "answer": 1}}\n')
    paths = {str(tmp_path / "train.jsonl"): 1, str(other): 1}
    of = settings(tmp_path, [FITS], data={"path": paths}, sampling={"by_dataset": {str(other): {"max_new_tokens": 3}}})
    assert said(of) == "", "61 tokens and 3"


def test_messages_count_as_much_as_any_template_must_render_of_them(tmp_path: Path) -> None:
    assert said(settings(tmp_path, [asked("1" * 30, "1" * 34)])) == "", "60 without the tokens that may merge"
    with pytest.raises(SettingsError, match="has at least 61 tokens"):
        said(settings(tmp_path, [asked("1" * 30, "1" * 35)]))
    answered = [*asked("1" * 30), {"role": "assistant", "content": "1" * 60}, *asked("1")]
    assert said(settings(tmp_path, [answered])) == "", "a template may leave out what it answered before"


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_nothing_is_said_without_a_readable_tokenizer(tmp_path: Path, content: str | None) -> None:
    folder = shutil.copytree(POLICY, tmp_path / "policy")
    (folder / "tokenizer.json").unlink()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    assert said(settings(tmp_path, [LONG], policy={"model": str(folder)})) == ""


def test_a_tokenizer_that_cuts_texts_hides_no_length(tmp_path: Path) -> None:
    folder = shutil.copytree(POLICY, tmp_path / "policy")
    description = json.loads((folder / "tokenizer.json").read_text())
    cut = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps({**description, "truncation": cut}))
    with pytest.raises(SettingsError, match="has at least 61 tokens"):
        said(settings(tmp_path, [LONG], policy={"model": str(folder)}))
