"""Laws of demonstrations of several turns: the assistant's tokens alone are trained, or the row is refused."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.services.coordinator.admission.conversations import Conversation
from penstock.services.coordinator.admission.dataset import Problem
from penstock.services.coordinator.admission.dataset_files import BadRow
from penstock.services.coordinator.admission.demonstrations import Completion, experience
from penstock.services.coordinator.data import load_data
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import ChatMessage, Experience, PolicyVersion
from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings
from tests.coordinator.admission import test_preference_pairs
from tests.coordinator.admission.test_demonstrations import CHAT, END, settings
from tests.shared.test_real_tokenizers import reader, settings_of
from tests.support import real_tokenizers

USER, SAID, AGAIN = (
    {"role": role, "content": text} for role, text in (("user", "1"), ("assistant", "2"), ("user", "3"))
)
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "7", "arguments": {"8": 9}}}]}  # fmt: skip
RESULT = {"role": "tool", "content": "5", "name": None}
CALLS = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.role[0] }}="
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.content or '' }}{{ eos_token }} {% endfor %}{% if add_generation_prompt %}a={% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "7", "parameters": {}}}]


def shown(of: Settings) -> list[tuple[Completion, ...]]:
    return [each.demonstration.completions for each in load_data(of).train.problems if each.demonstration is not None]


def trained(of: Completion) -> list[list[int]]:
    return [of.token_ids[first:last].tolist() for first, last, is_sampled in of.spans if is_sampled]


def test_every_turn_of_the_assistant_is_a_sampled_segment_and_what_is_between_is_given(tmp_path: Path) -> None:
    turns = [USER, SAID, AGAIN, {"role": "assistant", "content": "44"}]
    of = settings(tmp_path, [{"messages": turns}, {"prompt": turns[:1], "completion": turns[1:]}], CHAT)
    (first,), (second,) = shown(of)
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert trained(first) == [[4, END], [6, 6, END]]
    assert [kind for *_, kind in first.spans] == [True, False, True]
    assert first.segments[:, 1].tolist() == [-1, 0, 1]
    problem = load_data(of).train.problems[0]
    assert problem.demonstration is not None
    sent = wire.decode(wire.encode(experience(problem, 3, PolicyVersion(2))), Experience)
    (sample,) = sent.group.samples
    assert sample.token_ids[sample.sampled].tolist() == [4, END, 6, 6, END]
    whole = [*problem.demonstration.prompt_token_ids.tolist(), *first.token_ids.tolist()]
    from penstock.shared.model.tokenizer import open_tokenizer

    rendered = open_tokenizer(of.policy).apply_chat_template(
        turns, add_generation_prompt=False, tokenize=True, return_dict=False
    )
    assert rendered[: len(whole)] == whole


def test_the_last_turn_alone_is_trained_after_a_prompt_of_several(tmp_path: Path) -> None:
    (completion,), = shown(settings(tmp_path, [{"prompt": [USER, SAID, AGAIN], "completion": "4"}], CHAT))  # fmt: skip
    assert (completion.token_ids.tolist(), len(completion.segments)) == ([6, END], 0)


@pytest.mark.parametrize("tools", [TOOLS, '[{"name": "7"}]'])
def test_calls_are_trained_results_are_given_and_tools_are_shown(tmp_path: Path, tools: Any) -> None:
    template = CALLS if isinstance(tools, list) else CALLS.replace("t.function.name", "t.name")
    of = settings(tmp_path, [{"messages": [USER, CALL, RESULT, SAID], "tools": tools}], template)
    ((completion,),) = shown(of)
    assert [ids[-1] for ids in trained(completion)] == [END, END]
    assert trained(completion)[1] == [4, END]
    assert [kind for *_, kind in completion.spans] == [True, False, True]


def test_pairs_may_differ_from_any_turn_of_the_assistant(tmp_path: Path) -> None:
    other = {"role": "assistant", "content": "6"}
    rows = [{"chosen": [USER, SAID, AGAIN, SAID], "rejected": [USER, other, AGAIN, SAID]}]
    ((better, worse),) = shown(test_preference_pairs.settings(tmp_path, rows, CHAT))
    assert (trained(better), trained(worse)) == ([[4, END], [4, END]], [[8, END], [4, END]])


LAST_ONLY = CHAT.replace("{{ m.content }}", "{% if loop.last %}0{% endif %}{{ m.content }}")


@pytest.mark.parametrize(
    ("row", "template", "sentence"),
    [
        ({"messages": [USER, SAID, AGAIN, SAID]}, LAST_ONLY, "found another beginning at message 2: change policy.tokenizer"),
        ({"messages": [USER, CALL, RESULT, SAID]}, CHAT.replace("m.content", "m.content or ''"), "leaves a part of it out"),
        ({"messages": [USER, {**SAID, "reasoning_content": "77"}]}, CHAT, "leaves a part of it out"),
        ({"messages": [USER, CALL, RESULT, SAID]}, CALLS.replace("m.content or", "'' if m.role == 'tool' else m.content or"), "leaves out the tool's"),
        ({"messages": [USER, SAID], "tools": TOOLS}, CHAT, "leaves out its tools"),
        ({"messages": [USER, SAID], "tools": "hammer"}, CHAT, "expected a list of functions, or it as JSON, in 'tools'"),
        ({"messages": [USER, {"role": "assistant", "content": ""}, AGAIN, SAID]}, CHAT, "expected content or tool_calls in every message"),
        ({"messages": [USER, {"role": "assistant"}, AGAIN, SAID]}, CHAT, "expected {role, content} as texts in 'completion'"),
        ({"messages": [USER, SAID, AGAIN, SAID], "prompt": "4"}, CHAT, "begin with the row's prompt, found another prompt"),
        ({"prompt": "1", "completion": [SAID, AGAIN, SAID]}, CHAT, "expected chat messages as the prompt of several messages"),
        ({"messages": [USER, SAID, AGAIN]}, CHAT, "expected a completion in 'completion', or 'messages' that end with"),
        ({"messages": [USER, *[SAID, AGAIN] * 300, SAID]}, CHAT, r"expected a conversation of at most 512 tokens \(the model's context\)"),
    ],
)  # fmt: skip
def test_a_conversation_that_cannot_be_trained_is_a_bad_row(
    tmp_path: Path, row: dict[str, Any], template: str, sentence: str
) -> None:
    with pytest.raises(SettingsError, match=sentence):
        shown(settings(tmp_path, [row], template))


def own_tokenizer(template: str) -> Any:
    """Return a byte-level BPE with the control tokens that a template writes, and its end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    control = sorted(
        {
            *re.findall(r"<[|｜]?[A-Za-z0-9_▁]+[|｜]?>|<(?:start|end)_of_[a-z]+>|<\|?turn\|?>", template),
            "<|eos|>",
            "<|bos|>",
        }
    )
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=600, special_tokens=control, initial_alphabet=alphabet)
    )
    ends = [text for text in control if re.search(r"im_end|eot_id|[|]end[|]|end_of_turn|END_OF_TURN|<turn[|]>", text)]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=(ends or ["<|eos|>"])[0], bos_token="<|bos|>", chat_template=template
    )


QUESTION = {"role": "user", "content": "What is 37 * 48?"}
ASKED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "product", "arguments": {"left": 37, "right": 48}}}]}  # fmt: skip
TALKS: dict[str, list[Any]] = {
    "turns": [QUESTION, {"role": "assistant", "content": "It is 1776."}, {"role": "user", "content": "Are you sure?"}, {"role": "assistant", "content": "Yes, I am."}],
    "calls": [QUESTION, ASKED, {"role": "tool", "name": "product", "content": "1776"}, {"role": "assistant", "content": "It is 1776."}],
}  # fmt: skip
PRODUCT = {"type": "function", "function": {"name": "product", "description": "Multiply.", "parameters": {"type": "object", "properties": {"left": {"type": "integer", "description": "One."}, "right": {"type": "integer", "description": "Other."}}, "required": ["left", "right"]}, "return": {"type": "integer", "description": "It."}}}  # fmt: skip
TEXTS = [str(turns) for turns in TALKS.values()]


def runs(mask: list[int]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff([0, *mask, 0])).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_the_trained_tokens_are_those_that_public_templates_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark may begin within the generation prompt, and end with white space after the end token; neither is drawn."""
    counts, of_tests = Counter[str](), settings_of(tmp_path)
    for name, template in real_tokenizers.templates().items():
        of = own_tokenizer(template)
        reading = reader(of_tests, of, monkeypatch)
        for talk, turns in TALKS.items():
            tools: Any = [PRODUCT] if talk == "calls" else None
            problem = Problem("rows.jsonl:1", None, (ChatMessage("user", QUESTION["content"]),), None, {})
            try:
                read = reading.encode(problem, [Conversation(tuple(turns), 1, tools)])
            except BadRow:
                counts[f"{talk} refused"] += 1
                continue
            start, ids = (
                len(read.prompt_token_ids),
                [*read.prompt_token_ids.tolist(), *read.completion.token_ids.tolist()],
            )
            spans = [(start + first, start + last) for first, last, is_sampled in read.completion.spans if is_sampled]
            assert len(spans) == 2, name
            if not name.endswith("_training"):
                counts[talk] += 1
                continue
            marked = of.apply_chat_template(turns, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
            whole, marks = marked["input_ids"], runs(marked["assistant_masks"])
            assert whole[: len(ids)] == ids, name
            for (first, last), (begin, end) in zip(spans, marks, strict=True):
                asked = of.apply_chat_template(turns[:1], tools=tools, add_generation_prompt=True, tokenize=False)
                assert begin <= first, name
                assert asked.endswith(of.decode(whole[begin:first])), name
                assert not of.decode(whole[last:end]).strip(), name
                assert last <= end, name
            counts[f"{talk} as marked"] += 1
    assert counts["turns as marked"] == 19
    assert counts["calls as marked"] == 12
    assert sum(counts.values()) == 2 * 72
