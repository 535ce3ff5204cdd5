"""Policies of random shapes whose next token depends on the last one alone, so that without being taught they call a tool
in every turn, or end after about a given number of tokens.

Each layer runs as in any model of the shape, but adds nothing. Tokens have classes. A class has an element of the
embeddings of its own, by which the output weights, which must not be tied, raise the classes that may follow. Of a class
every token is equally likely, so the samples of a group differ from their first token on.
"""

import itertools
import math
import random
import string
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

TURNS = 4
TURN_TOKENS = {"cuda": 128, "cpu": 16}
"""Of an answer, its end included, by device."""
OPENING, CLOSING = '\n<tool_call>\n{"name": "look", "arguments": {"place": ', "}}\n</tool_call>"
"""Around a digit: a call in Hermes form, as Qwen2.5's chat template writes it after text."""
START, END = "<|im_start|>", "<|im_end|>"
_LAST_LETTERS = "bcdfghjklmnpqrst"
"""Of the words for each place of an answer."""
_SPACE, _NEW_LINE = "\u0120", "\u010a"
"""As byte pair encoding writes them."""
_SHOWN = 48
"""Characters that the tool answers."""
_STAGES = 16
"""Of a completion of about a given length: the deviation of the lengths is a quarter of their mean."""
_MARGIN = 30.0
"""Nats between the tokens that may follow and the others; in all, those are drawn once in 10^8 tokens."""


class Places:
    """An environment as Penstock and TRL take it, of one tool."""

    def reset(self, **row: object) -> None:
        """Begin an episode."""

    def look(self, place: int) -> str:
        """Look at a place.

        Args:
            place: A number from 0 to 9.
        """
        return "".join(random.choices(string.ascii_letters + string.digits, k=_SHOWN))


def chat_template() -> str:
    """Return Qwen2.5's, as TRL knows it."""
    return (resources.files("trl") / "chat_templates" / "qwen2_5.jinja").read_text(encoding="utf-8")


def words_of(turn_tokens: int) -> list[list[str]]:
    """Return the words for each place of an answer before its call. None has another's letters in the same order.

    >>> [words[:2] for words in words_of(7)]
    [['Aab', 'Aac'], [' Aeb', ' Aec'], [' Aib', ' Aic']]
    """
    starts = [first + second for first in string.ascii_uppercase for second in "aeiou"]
    return [
        [f"{' ' if place else ''}{starts[place]}{last}" for last in _LAST_LETTERS] for place in range(turn_tokens - 4)
    ]


def vocabulary(turn_tokens: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return tokens of byte pair encoding, and its merges, with which each word of an answer is one token."""
    merges: dict[tuple[str, str], None] = {}
    for words in words_of(turn_tokens):
        for word in words:
            spelled = word.replace(" ", _SPACE)
            merges |= {(spelled[:end], spelled[end]): None for end in range(1, len(spelled))}
    return [_SPACE, _NEW_LINE, OPENING, CLOSING, START, *map("".join, merges)], list(merges)


def call_in_every_turn(model: Any, tokenizer: Any, turn_tokens: int) -> None:
    """Let each answer be words, a call of :meth:`Places.look` and the end."""
    classes = [["\n"], *words_of(turn_tokens), [OPENING], [*string.digits], [CLOSING], [END]]
    ids = [[_id(tokenizer, text) for text in texts] for texts in classes]
    follow(model, ids, ((place, place + 1, 1.0) for place in range(len(ids) - 1)))


def _id(tokenizer: Any, text: str) -> int:
    (token_id,) = tokenizer(text)["input_ids"]
    return int(token_id)


def end_after(model: Any, mean_tokens: int) -> None:
    """Let completions have about ``mean_tokens``: each token but the end and the padding is of a stage, prompts of the first."""
    ids, advance = range(2, model.config.vocab_size), _STAGES / mean_tokens
    bounds = [len(ids) * stage // _STAGES for stage in range(_STAGES + 1)]
    stages = [ids[begin:end] for begin, end in itertools.pairwise(bounds)]
    stay = ((stage, stage, 1 - advance) for stage in range(_STAGES))
    go = ((stage, stage + 1, advance) for stage in range(_STAGES))
    follow(model, [*stages, [model.config.eos_token_id]], [*stay, *go])


def follow(model: Any, classes: Sequence[Sequence[int]], nexts: Iterable[tuple[int, int, float]]) -> None:
    """Let tokens of one class be followed by those of another, for each (class, next class, probability)."""
    import torch

    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings, output = model.model.embed_tokens.weight, model.lm_head.weight
        output.zero_()
        for number, ids in enumerate(classes):
            embeddings[list(ids)] = 0.0
            embeddings[list(ids), number] = 1.0
        after_norm = math.sqrt(embeddings.shape[1])
        for number, after, probability in nexts:
            nats = _MARGIN + math.log(probability / len(classes[after]))
            output[list(classes[after]), number] = nats / after_norm
