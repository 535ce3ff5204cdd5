"""The reward model's values equal a plain forward pass of one text, whatever else is in the batch."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.services.reward.models.classifier import Text
from penstock.services.reward.scorers.reward_model import RewardModel
from penstock.shared.bus import transcripts
from penstock.shared.bus.messages import ChatMessage, ScoreStatus
from penstock.shared.errors import PermanentError, SettingsError
from tests.support import builders, reward_models, tiny
from tests.support.tolerance import FORWARD

COMPLETIONS = ("46", "4", "thesumis46", "a", "12+34is46andnoothernumber")


def plain(model: Any, text: str) -> Any:
    ids = torch.tensor([tiny.tokenizer()(text)["input_ids"]])
    with torch.no_grad():
        return model(input_ids=ids).logits[0]


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize(
    "model",
    [reward_models.qwen(), reward_models.qwen(pad=None), reward_models.llama(), reward_models.bert()],
    ids=["qwen", "qwen without padding token", "llama without padding token", "bert"],
)
def test_a_batch_of_mixed_lengths_has_the_values_of_its_texts_alone(
    model: Any, padding_side: str, tmp_path: Path
) -> None:
    classifier = reward_models.classifier(
        reward_models.settings(reward_models.save(model, tmp_path, None, padding_side))
    )
    texts = classifier.read(builders.prompt(), COMPLETIONS)
    expected = [float(plain(model, "12+34=" + completion)[0]) for completion in COMPLETIONS]
    assert max(expected) - min(expected) > 0.1
    assert classifier.compute(texts) == pytest.approx(expected, abs=FORWARD)
    assert classifier.compute(texts[2:3]) == pytest.approx(expected[2:3], abs=FORWARD)


def test_a_text_that_ends_in_the_padding_token_keeps_its_end_where_the_model_names_no_padding(tmp_path: Path) -> None:
    model = reward_models.qwen(pad=None)
    classifier = reward_models.classifier(reward_models.settings(reward_models.save(model, tmp_path)))
    with torch.no_grad():
        expected = [float(model(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in ([5, 6, 0], [5, 6])]
    texts = [Text((5, 6, 0)), Text((5, 6))]
    assert classifier.compute(texts) == pytest.approx(expected, abs=FORWARD)
    assert abs(expected[0] - expected[1]) > 1e-3


def test_texts_that_hold_every_token_of_the_vocabulary_are_read_one_by_one(tmp_path: Path) -> None:
    model = reward_models.qwen(pad=None)
    classifier = reward_models.classifier(reward_models.settings(reward_models.save(model, tmp_path)))
    vocabulary = tuple(range(tiny.VOCABULARY))
    with torch.no_grad():
        expected = [float(model(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in (vocabulary, (7, 8))]
    assert classifier.compute([Text(vocabulary), Text((7, 8))]) == pytest.approx(expected, abs=FORWARD)


def test_the_models_own_chat_template_joins_prompt_and_completion(tmp_path: Path) -> None:
    folder = reward_models.save(reward_models.qwen(), tmp_path, reward_models.CHAT)
    prompt = dataclasses.replace(
        builders.prompt(), text=None, messages=(ChatMessage("system", "add"), ChatMessage("user", "1+1"))
    )
    (text,) = reward_models.classifier(reward_models.settings(folder)).read(prompt, ["2"])
    eos = "<eos>"
    assert tiny.tokenizer().decode(list(text.token_ids)) == f"s=add{eos}u=1+1{eos}a=2{eos}"
    (bare,) = reward_models.classifier(reward_models.settings(folder, template="plain")).read(prompt, ["2"])
    assert bare.token_ids == (15, 18, 18, 3, 12, 3, 4)  # add1+1 2: the vocabulary has no line break
    own = reward_models.settings(folder, template="{{ messages[-1]['content'] }}")
    assert reward_models.classifier(own).read(prompt, ["42"])[0].token_ids == (6, 4)
    dated = reward_models.settings(folder, template="{{ strftime_now('%d+%m') }}")
    admitted = dataclasses.replace(prompt, admitted_at_s=32 * 86_400.0)
    (text,) = reward_models.classifier(dated).read(admitted, ["2"])
    assert tiny.tokenizer().decode(list(text.token_ids)) == "02+02"


def test_a_chat_template_joins_all_messages_of_an_episode(tmp_path: Path) -> None:
    folder = reward_models.save(reward_models.qwen(), tmp_path, reward_models.CHAT)
    conversation, eos = transcripts.read(builders.episode()), "<eos>"
    (text,) = reward_models.classifier(reward_models.settings(folder)).read(builders.prompt(), ["46"], [conversation])
    decoded = tiny.tokenizer().decode(list(text.token_ids))
    assert decoded == f"u=12+34={eos}a={eos}t=46{eos}a=46{eos}"


def test_messages_that_the_template_refuses_bury_their_group(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    folder = reward_models.save(reward_models.qwen(), tmp_path, template)
    with pytest.raises(PermanentError, match="roles must alternate"):
        reward_models.classifier(reward_models.settings(folder)).read(builders.prompt(), ["2"])


def test_a_tokenizer_of_another_model_buries_the_group_with_the_setting_to_change(tmp_path: Path) -> None:
    classifier = reward_models.classifier(
        reward_models.settings(reward_models.save(reward_models.qwen(vocab_size=10), tmp_path))
    )
    with pytest.raises(PermanentError, match=r"under the model's 10, found 13: .*; change model of scorer 'model'"):
        classifier.read(builders.prompt(), ["46"])


def test_what_is_too_long_loses_its_beginning_and_says_so(tmp_path: Path) -> None:
    classifier = reward_models.classifier(
        reward_models.settings(reward_models.save(reward_models.qwen(max_position_embeddings=4), tmp_path))
    )
    short, long = classifier.read(dataclasses.replace(builders.prompt(), text=""), ["1234", "012345"])
    assert (short.token_ids, short.cut_tokens) == ((3, 4, 5, 6), 0)
    assert (long.token_ids, long.cut_tokens) == ((4, 5, 6, 7), 2)


async def test_scores_say_what_was_cut(tmp_path: Path) -> None:
    folder = reward_models.save(reward_models.qwen(max_position_embeddings=8), tmp_path)
    scorer = RewardModel(reward_models.settings(folder), reward_models.WORK)
    await scorer.start()
    try:
        first, second = await scorer.score(builders.group(0, ("46", "4600")))
    finally:
        await scorer.close()
    assert (first.status, first.detail) == (ScoreStatus.OK, "")
    assert second.detail == "cut to 8 of 10 tokens"


def test_of_several_outputs_the_named_one_is_the_value(tmp_path: Path) -> None:
    model = reward_models.qwen(labels=3)
    folder = reward_models.save(model, tmp_path)
    logits = plain(model, "12+34=46")
    for label in ("label 2", "2"):
        classifier = reward_models.classifier(reward_models.settings(folder, label=label))
        assert classifier.compute(classifier.read(builders.prompt(), ["46"])) == pytest.approx(
            [float(logits[2])], abs=FORWARD
        )
    share = reward_models.classifier(reward_models.settings(folder, label="label 1", value="probability"))
    expected = float(logits.softmax(-1)[1])
    assert share.compute(share.read(builders.prompt(), ["46"])) == pytest.approx([expected], abs=FORWARD)


def test_a_probability_of_one_output_is_its_sigmoid(tmp_path: Path) -> None:
    model = reward_models.qwen()
    classifier = reward_models.classifier(
        reward_models.settings(reward_models.save(model, tmp_path), value="probability")
    )
    expected = float(plain(model, "12+34=46")[0].sigmoid())
    assert classifier.compute(classifier.read(builders.prompt(), ["46"])) == pytest.approx([expected], abs=FORWARD)


def test_a_scalar_head_is_read_at_the_last_token(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModel

    folder = reward_models.save_scalar(tmp_path)
    classifier = reward_models.classifier(reward_models.settings(folder))
    trunk, weights = AutoModel.from_pretrained(folder).eval(), load_file(folder / "model.safetensors")
    expected = []
    for completion in COMPLETIONS:
        ids = torch.tensor([tiny.tokenizer()("12+34=" + completion)["input_ids"]])
        with torch.no_grad():
            hidden = trunk(input_ids=ids).last_hidden_state[0, -1]
        expected.append(float(hidden @ weights["v_head.summary.weight"][0]) + 0.25)
    assert classifier.compute(classifier.read(builders.prompt(), COMPLETIONS)) == pytest.approx(expected, abs=FORWARD)


def test_a_classifier_whose_weights_have_another_head_is_refused_with_the_way_to_read_it(tmp_path: Path) -> None:
    config = reward_models.save_scalar(tmp_path) / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(
        SettingsError,
        match=r"expected score\.weight, as config\.json .* LlamaForSequenceClassification, found the head v_head\.summary\.weight "
        r'instead: remove "architectures" .* or change model of scorer',
    ):
        reward_models.classifier(reward_models.settings(tmp_path))
    del fields["architectures"]
    config.write_text(json.dumps(fields))
    reward_models.classifier(reward_models.settings(tmp_path))


@pytest.mark.parametrize(
    ("model", "more", "sentence"),
    [
        (reward_models.qwen(labels=2), {}, "expected one of the model's 2 outputs (label 0, label 1), found 'none': change label"),
        (reward_models.qwen(), {"label": "good"}, "found 'good': change label of scorer 'model'"),
        (None, {}, "its weights lack score.weight, which would be random"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_what_the_settings_say_is_one_sentence(
    model: Any, more: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    folder = tiny.save(tmp_path) if model is None else reward_models.save(model, tmp_path)
    with pytest.raises(SettingsError) as caught:
        reward_models.classifier(reward_models.settings(folder, **more))
    assert sentence in str(caught.value)


def test_a_model_that_is_nowhere_is_refused_when_its_scorer_is_made(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"change model of scorer 'model' in \[\[reward.scorers\]\]"):
        RewardModel(reward_models.settings(tmp_path / "nowhere"), reward_models.WORK)
