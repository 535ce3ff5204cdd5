"""Laws of text and tokens, and of opening a policy."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.rollout.engines.transformers.loading import open_model
from penstock.shared.bus.messages import ChatMessage, Prompt
from penstock.shared.errors import PermanentError, SettingsError
from penstock.shared.model.tokenizer import Limits, TokenizerCodec, check_stop_texts, open_tokenizer
from penstock.shared.settings import PolicySettings, SamplingSettings
from tests.support import builders, tiny

CHAT = "{% for m in messages %}{{ m.role[0] }}={{ m.content }} {% endfor %}{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}"


def codec(chat_template: str | None = None) -> TokenizerCodec:
    return TokenizerCodec(tiny.tokenizer(chat_template), tiny.opened(tiny.model()))


def asking(**fields: Any) -> Prompt:
    values = {name: getattr(builders.prompt(7), name) for name in Prompt.__slots__} | fields
    return Prompt(**values)


def test_a_text_is_tokenized_and_completions_are_read_without_special_tokens() -> None:
    assert codec().encode(asking(text="12+3=")).tolist() == [3, 4, 12, 5, 13]
    assert codec().decode([np.array([6, 8, 1], dtype=np.int32), np.array([3], dtype=np.int32)]) == ["46", "1"]


def test_messages_go_through_the_chat_template() -> None:
    messages = (ChatMessage("user", "1+1"),)
    assert (
        codec(CHAT).encode(asking(text=None, messages=messages)).tolist()
        == codec().encode(asking(text="u=1+1 ")).tolist()
    )


def test_todays_date_in_a_chat_template_is_that_of_the_prompts_admission_in_every_time_zone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = "{{ strftime_now('%d') }}{% for m in messages %}+{{ m.content }}{% endfor %}"
    messages, ours = (ChatMessage("user", "1"),), codec(template)
    midnight_s = datetime(2026, 11, 27, tzinfo=UTC).timestamp()
    for zone in ("UTC", "Pacific/Kiritimati", "Pacific/Pago_Pago"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        for at_s, text in ((midnight_s - 1, "26+1"), (midnight_s, "27+1"), (midnight_s - 1, "26+1")):
            asked = asking(text=None, messages=messages, admitted_at_s=at_s)
            assert ours.encode(asked).tolist() == codec(template).encode(asking(text=text)).tolist()
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("refused", ["<eos>", "4<eos>"])
def test_a_stop_text_with_a_special_token_is_refused_as_no_completion_has_it(refused: str) -> None:
    check_stop_texts(tiny.tokenizer(), SamplingSettings(stop=("4", "=")))
    for sampling in ({"stop": [refused]}, {"by_dataset": {"a.jsonl": {"stop": ["4", refused]}}}):
        with pytest.raises(SettingsError, match=f"without special tokens in sampling.stop, found '{refused}'"):
            check_stop_texts(tiny.tokenizer(), SamplingSettings.model_validate(sampling))


def test_arguments_of_the_chat_template_reach_it() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '+1' if enable_thinking else '' }}{{ tools[0].name if tools else '' }}"
    messages = (ChatMessage("user", "1"),)
    arguments = {"enable_thinking": True, "tools": [{"name": "=4"}]}
    argued = TokenizerCodec(tiny.tokenizer(template), tiny.opened(tiny.model()), arguments)
    asked = asking(text=None, messages=messages)
    assert argued.encode(asked).tolist() == codec().encode(asking(text="1+1=4")).tolist()
    assert codec(template).encode(asked).tolist() == codec().encode(asking(text="1")).tolist()


@pytest.mark.parametrize(
    ("fields", "template", "sentence"),
    [
        ({"text": None}, None, "expected text or messages in train.jsonl:8, found other content"),
        ({"text": ""}, None, "at least one token in train.jsonl:8, found an empty one"),
        (
            {"text": "1" * 509},
            None,
            "at most 508 tokens .* context of 512, the model.s or rollout.vllm.max_model_len, less sampling.max_new_tokens = 4\\), found 509: shorten it",
        ),
        ({"text": "ÄÖÜ"}, None, "tokens that hold the text of train.jsonl:8, found unknown ones and padding only"),
        ({"text": None, "messages": (ChatMessage("user", "1"),)}, None, "no chat template, but found messages"),
        (
            {"text": None, "messages": (ChatMessage("user", "1"),) * 3},
            CHAT,
            "the chat template cannot render .*too long",
        ),
    ],
)
def test_a_prompt_that_the_model_cannot_read_is_refused_with_a_sentence(
    fields: dict[str, Any], template: str | None, sentence: str
) -> None:
    with pytest.raises(PermanentError, match=sentence):
        codec(template).encode(asking(**fields))


def test_a_saved_policy_is_opened_with_its_stop_tokens_and_limits(tmp_path: Path) -> None:
    policy = PolicySettings(model=str(tiny.save(tmp_path)), dtype="bfloat16")
    opened = open_model(policy, open_tokenizer(policy), "cpu")
    assert (opened.stop, opened.context_tokens, opened.vocabulary) == ((1,), 512, 48)
    assert opened.parameters["model.norm.weight"].dtype == torch.bfloat16
    assert "lm_head.weight" in opened.parameters  # tied: optional
    assert "lm_head.weight" not in opened.required


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("", "hub name: set policy.model"),
        (
            "/no/such/folder",
            "no folder in Hugging Face form at '/no/such/folder': change policy.model",
        ),
        ("{empty}", r"the folder .* has no tokenizer \(tokenizer_config.json, .*\): change policy.model"),
    ],
)
def test_a_model_that_is_none_is_told_in_one_sentence(tmp_path: Path, model: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        open_tokenizer(PolicySettings(model=model.format(empty=tmp_path)))


def test_a_hub_name_without_a_hub_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        SettingsError,
        match=r"there is no folder 'nobody/nothing', and the hub cannot be reached \(.*\): change policy.model",
    ):
        open_tokenizer(PolicySettings(model="nobody/nothing"))
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"no folder in Hugging Face form at 'models/mine'"):
        open_tokenizer(PolicySettings(model="models/mine"))


def test_a_broken_model_or_device_names_its_setting(tmp_path: Path) -> None:
    policy = PolicySettings(model=str(tiny.save(tmp_path)))
    tokenizer = open_tokenizer(policy)
    with pytest.raises(SettingsError, match=r"'cuda:77' cannot be used .*: change run.device"):
        open_model(policy, tokenizer, "cuda:77")
    with pytest.raises(SettingsError, match=r"'gpu' cannot be used .*: change run.device"):
        open_model(policy, tokenizer, "gpu")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(SettingsError, match=r"could not load .*: change policy.model"):
        open_model(policy, tokenizer, "cpu")


def test_a_tokenizer_with_more_tokens_than_the_model_is_another_models() -> None:
    smaller = Limits(512, len(tiny.CHARACTERS))
    with pytest.raises(SettingsError, match=r"at most the model's 39 tokens, found 4\d: .* change policy.tokenizer"):
        TokenizerCodec(tiny.tokenizer(), smaller)


def test_tokens_that_were_added_to_the_vocabulary_may_be_beyond_the_model() -> None:
    tokenizer = tiny.tokenizer()
    vocabulary = tokenizer.vocab_size
    tokenizer.add_special_tokens({"pad_token": "<one more>"})
    assert len(tokenizer) > vocabulary
    assert TokenizerCodec(tokenizer, Limits(512, vocabulary)).encode(asking(text="12+3=")).tolist() == [3, 4, 12, 5, 13]
