"""Laws of reasoning: what of a completion is its answer."""

import pytest
from tokenizers import AddedToken

from penstock.shared.errors import SettingsError
from penstock.shared.model.tokenizer import TextDecoder, check_stop_texts, encode_text
from penstock.shared.reasoning import KNOWN, Reasoning
from penstock.shared.settings import SamplingSettings, Settings, loads
from tests.support import tiny


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 7.", "The answer is 7."),
        ("<think> maybe \\boxed{5}, no </think> The answer is 7.", " The answer is 7."),
        ("<think> maybe \\boxed{5}", ""),
        ("<think>\nFirst, 2 plus 2.\n</think>\n<answer>4</answer>", "\n<answer>4</answer>"),
        ("maybe \\boxed{5}</think>7", "7"),
        ("a<think>b</think>c\n<think>d</think>e", "ac\ne"),
        ("a<think>b</think>c\n  <think>\\boxed{5}", "ac\n  "),
        ("<think>a</think><think>b</think>c", "c"),
        ("<think>a</think>Put it in <think> tags: 5", "Put it in <think> tags: 5"),
        ("<think>a</think>Put it in `<think>…</think>`: 5", "Put it in `<think>…</think>`: 5"),
        ("<think>not [/THINK], [THINK]5[/THINK] or <|END_THINKING|>4</think>7", "7"),
        ("<think>a</seed:think>5", ""),
        ("<think>a<think>b</think>c", "c"),
        ("a</think>b</think>c", "c"),
        ("[THINK]5[/THINK]7", "7"),
        (
            "<|channel|>analysis<|message|>Try \\boxed{3}, no.assistant<|channel|>final<|message|>\\boxed{4}",
            "\\boxed{4}",
        ),
        ("<|channel|>final<|message|>4", "4"),
        ("<|channel|>analysis<|message|>\\boxed{3}", ""),
        ("<|channel>thought\n5<channel|>7", "7"),
        ("<|START_THINKING|>5<|END_THINKING|>7", "7"),
        ("", ""),
    ],
)
def test_what_is_reasoned_is_no_answer(text: str, answer: str) -> None:
    assert Reasoning(KNOWN).answer(text) == answer
    assert Reasoning({}).answer(text) == text


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<｜Assistant｜><think>", "<think>"),
        ("<think>\n\n</think>\n\n", ""),
        ("Explain <think> to me<|im_end|>\n<|im_start|>assistant\n", ""),
        ("2+2=", ""),
    ],
)
def test_a_prompt_opens_the_reasoning_if_it_ends_with_the_opening(prompt: str, opening: str) -> None:
    assert Reasoning(KNOWN).opening(prompt) == opening


def test_a_text_of_many_openings_is_read_in_linear_time() -> None:
    assert Reasoning(KNOWN).answer("<think>" * 200_000) == ""
    assert Reasoning(KNOWN).answer("</think>" * 200_000) == ""
    assert Reasoning(KNOWN).answer("</think>x" + "<think>" * 200_000) == "x" + "<think>" * 200_000


def test_the_markers_are_a_setting() -> None:
    pair = Settings.model_validate({"reward": {"reasoning": ["<reason>", "</reason>"]}})
    assert Reasoning(pair.reward.reasoning_markers).answer("<reason>5</reason>7") == "7"
    assert not Settings.model_validate({"reward": {"reasoning": "none"}}).reward.reasoning_markers
    for wrong in ('["<reason>", "<reason>"]', '["", "</reason>"]'):
        with pytest.raises(SettingsError, match=r"two different texts around the reasoning.*change reward\.reasoning"):
            loads(f"[reward]\nreasoning = {wrong}", "run.toml")


def test_special_tokens_that_scorers_look_for_stay_in_texts() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(text, special=True) for text in ("<think>", "</think>", "<hidden>")]}
    )
    ids = tokenizer("<think>12</think><hidden>46", add_special_tokens=False)["input_ids"]
    scorers = [{"kind": "format", "tags": ["think"]}]
    for reward in (
        {},
        {"reasoning": "none", "scorers": scorers},
        {"reasoning": "none", "scorers": [{"kind": "answer", "extract": "tag:think"}]},
    ):
        markers = Settings.model_validate({"reward": reward}).reward.markers
        assert TextDecoder(tokenizer, markers)([ids]) == ["<think>12</think>46"]
        check_stop_texts(tokenizer, SamplingSettings(stop=("</think>",)), markers)
    assert TextDecoder(tokenizer)([ids]) == ["1246"]
    with pytest.raises(SettingsError, match=r"without special tokens in sampling\.stop"):
        check_stop_texts(tokenizer, SamplingSettings(stop=("<hidden>",)), markers)


def test_a_text_that_has_the_tokenizers_beginning_gets_no_second_one() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny.tokenizer()
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    once = [tokenizer.eos_token_id, 3, 12, 3]
    assert tokenizer(f"{end}1+1")["input_ids"] == [tokenizer.eos_token_id, *once], "as transformers reads it"
    for text in ("1+1", f"{end}1+1", f"{end}{end}1+1"):
        assert encode_text(tokenizer, text) == once
    assert encode_text(tokenizer, end) == encode_text(tokenizer, "") == [tokenizer.eos_token_id]
