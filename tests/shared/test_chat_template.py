"""Templates of a model that do not end, or want all memory, in a real process."""

from typing import Any

import pytest

from penstock.shared.model.rendering import chat_template
from penstock.shared.model.rendering.chat_template import TemplateEndless, TemplateFailed, View, render, render_views
from tests.conftest import PATIENCE_S

TURNS = [{"role": "user", "content": "12+34="}]
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def tokenizer(template: str) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "</s>": 1})), eos_token="</s>")
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("template", "failure", "reason"),
    [
        (NESTED, TemplateEndless, "it did not end within 1 s of CPU time"),
        ("{{ 9 ** (9 ** 9) }}", TemplateEndless, "it did not end within 1 s of CPU time"),
        ("{{ 'a' * (2000000000 + messages|length) }}", TemplateFailed, "MemoryError"),
        (
            "{{ 'a' * (16777217 + messages|length) }}",
            TemplateFailed,
            "expected at most 16777216 characters, found 16777218",
        ),
        ("{{ raise_exception('no system') }}", TemplateFailed, "no system"),
        ("{% for %}", TemplateFailed, "Expected an expression"),
    ],
)
def test_a_template_that_cannot_be_rendered_ends_its_process_only(
    template: str, failure: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_CPU_S", 1.0)
    monkeypatch.setattr(chat_template, "_STARVED_S", PATIENCE_S)
    good = tokenizer("{{ bos_token }}{% for turn in messages %}{{ turn.content }}{{ eos_token }}{% endfor %}")
    with pytest.raises(failure, match=reason):
        render(tokenizer(template), TURNS)
    assert render(good, TURNS) == "12+34=</s>"


def test_a_template_is_rendered_as_its_library_does_it_with_the_given_clock() -> None:
    template = "{{ strftime_now('%Y') }} {{ messages|tojson }}\n{%- if add_generation_prompt %}go{{ more }}{% endif %}"
    by_us = render(tokenizer(template), TURNS, add_generation_prompt=True, arguments={"more": "on"}, at_s=0.0)
    by_them = tokenizer(template).apply_chat_template(
        TURNS, add_generation_prompt=True, tokenize=False, more="on", strftime_now=lambda form: "1970"
    )
    assert by_us == by_them == '1970 [{"role": "user", "content": "12+34="}]goon'


def test_parts_of_a_conversation_are_asked_for_at_once_and_are_what_each_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = "{% for turn in messages %}<{{ loop.length if loop.first else '' }}{{ turn.content }}>{% endfor %}{{ '…' if add_generation_prompt }}"
    turns = [{"role": "user", "content": f"{n} ☃"} for n in range(4)]
    other = {"role": "tool", "content": "x"}
    asked, ask = list[bytes](), chat_template._Renderer._ask

    def noted(renderer: Any, question: bytes) -> dict[str, Any]:
        asked.append(question)
        return ask(renderer, question)

    monkeypatch.setattr(chat_template._Renderer, "_ask", noted)
    views = [View(4, answers=True), View(3, other), View(2), View(0, other, answers=True)]
    texts = ["<40 ☃><1 ☃><2 ☃><3 ☃>…", "<40 ☃><1 ☃><2 ☃><x>", "<20 ☃><1 ☃>", "<1x>…"]
    assert render_views(tokenizer(template), turns, views) == texts
    assert len(asked) == 1
    alone = [[*turns[: view.turns], *([view.last] if view.last else [])] for view in views]
    again = [
        render(tokenizer(template), part, add_generation_prompt=view.answers)
        for part, view in zip(alone, views, strict=True)
    ]
    assert again == texts
