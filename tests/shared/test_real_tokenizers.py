"""Laws of real tokenizers crossed with public chat templates: right or refused, nothing silently cut or doubled."""

import functools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.services.coordinator.admission import demonstrations
from penstock.services.coordinator.admission.dataset import Problem
from penstock.services.coordinator.admission.dataset_files import BadRow
from penstock.services.coordinator.admission.demonstrations import Demonstrations
from penstock.shared.bus.messages import ChatMessage
from penstock.shared.errors import PermanentError
from penstock.shared.model.tokenizer import TokenizerCodec, stop_tokens
from penstock.shared.settings import Settings
from tests.rollout.engines.test_prompts import asking
from tests.support import real_tokenizers, tiny

USER, SYSTEM = ChatMessage("user", "What is 2 + 2?"), ChatMessage("system", "Answer in one word.")
TURNS = ((USER,), (SYSTEM, USER), (USER, ChatMessage("assistant", "It is 4."), ChatMessage("user", "And 3 + 3?")))
ANSWERS = ("It is 4.", "It is 5, I think.")
THOUGHT = "<think>\nTwo and two.\n</think>\n\nIt is 4."


class Limits:
    """Of no model."""

    context_tokens, vocabulary = 1 << 20, 1 << 20


@functools.cache
def tokenizer(name: str) -> Any:
    make: Callable[[], Any] = getattr(real_tokenizers, name)
    return make()


def settings_of(folder: Path) -> Settings:
    policy, config = {"model": str(tiny.save(folder))}, folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": Limits.vocabulary}))
    return Settings.model_validate(
        {"policy": policy, "algorithm": {"loss": "cross_entropy"}, "rollout": {"vllm": {"max_model_len": 1 << 20}}}
    )


def reader(settings: Settings, of: Any, monkeypatch: pytest.MonkeyPatch) -> Demonstrations:
    monkeypatch.setattr(demonstrations, "open_tokenizer", lambda _, **__: of)
    return Demonstrations(settings)


def prompts(of: Any, codec: TokenizerCodec, kinds: Counter[str]) -> None:
    """A prompt is all of its template's text, has its messages once and at most one BOS, also where a text is given."""
    for messages in TURNS:
        prompt = asking(text=None, messages=messages)
        try:
            token_ids = codec.encode(prompt).tolist()
        except PermanentError:
            kinds["prompts refused"] += 1
            continue
        rendered = codec.rendered(prompt, add_generation_prompt=True)
        assert of.decode(token_ids, skip_special_tokens=False) == rendered
        for content in {message.content for message in messages if message.role != "assistant"}:
            assert rendered.count(content) == 1, "neither left out nor doubled"
        assert codec.encode(asking(text=rendered)).tolist() == token_ids
        assert of.bos_token is None or of.bos_token in of.eos_token + "<|im_start|>" or rendered.count(of.bos_token) < 2
        kinds["prompts"] += 1


def completions(of: Any, reading: Demonstrations, answers: tuple[str, ...], kinds: Counter[str], kind: str) -> None:
    """A completion has its answer once, in full, before a token that ends generation, after which there is nothing."""
    problem = Problem("rows.jsonl:1", text=None, messages=(USER,), answer=None, extra={})
    try:
        shown = reading.encode(problem, answers)
    except BadRow:
        kinds[f"{kind} refused"] += 1
        return
    for answer, completion in zip(answers, shown.completions, strict=True):
        *before, last = completion.token_ids.tolist()
        assert last in stop_tokens(of)
        assert not {*before} & {of.eos_token_id}
        text = of.decode(before, skip_special_tokens=False)
        thought, _, said = answer.rpartition("</think>")
        assert text.count(said.strip()) == 1
        assert thought.removeprefix("<think>").strip() in text
        assert reading._codec.plain(text).endswith(reading._codec.plain(said)), "and nothing after it"
        whole = of.decode([*shown.prompt_token_ids.tolist(), *before], skip_special_tokens=False)
        assert whole == of.decode(shown.prompt_token_ids.tolist(), skip_special_tokens=False) + text
        assert text.count("</think>") == text.count("<think>") + whole[: -len(text)].endswith("<think>\n")
    kinds[kind] += 1


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("smollm2", {"prompts": 196, "demonstrations": 24, "thoughtful demonstrations": 32, "pairs": 24}),
        ("deepseek", {"prompts": 196, "demonstrations": 0, "thoughtful demonstrations": 1, "pairs": 0}),
        ("qwen", {"prompts": 193, "demonstrations": 20, "thoughtful demonstrations": 30, "pairs": 20}),
    ],
)
def test_every_public_template_is_rendered_whole_and_once_or_refused(
    name: str, counts: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, kinds = tokenizer(name), Counter[str]()
    settings, templates = settings_of(tmp_path), real_tokenizers.templates()
    assert len(templates) == 72
    for template in templates.values():
        monkeypatch.setattr(of, "chat_template", template)
        reading = reader(settings, of, monkeypatch)
        prompts(of, reading._codec, kinds)
        completions(of, reading, ANSWERS[:1], kinds, "demonstrations")
        completions(of, reading, (THOUGHT,), kinds, "thoughtful demonstrations")
        completions(of, reading, ANSWERS, kinds, "pairs")
    assert {kind: kinds[kind] for kind in counts} == counts
    assert sum(count for kind, count in kinds.items() if kind.startswith("prompts")) == 3 * 72


@pytest.mark.parametrize(
    ("name", "template", "opening"),
    [
        ("deepseek", "deepseekv3", "<think>\n"),
        ("qwen", "qwen3_6", "<think>\n"),
        ("qwen", "qwen3", ""),
        ("qwen", "nemotron_3_nano", "<think>\n"),
    ],
)
def test_a_completions_text_begins_with_the_opening_that_the_template_wrote(
    name: str, template: str, opening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = tokenizer(name)
    monkeypatch.setattr(of, "chat_template", real_tokenizers.templates()[template])
    codec = TokenizerCodec(of, Limits(), None, Settings().reward)
    prompt_ids = codec.encode(asking(text=None, messages=(USER,)))
    completion = np.array(of("So.\n</think>\n4", add_special_tokens=False)["input_ids"], dtype=np.int32)
    assert codec.texts(prompt_ids, [completion]) == [opening + "So.\n</think>\n4"]
