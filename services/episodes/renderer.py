"""Messages to token ids, by the difference of the chat template's renderings.

::

    whole   all messages, as the template writes them
    after   the ids that follow an answer's own: the template with and without the messages after it. None where these change
            what the template writes before them, as one that drops earlier reasoning does: then the history is a branch

Text from outside never becomes a control token: where a message spells one, its place is rendered, and its text encoded by
a tokenizer that has none.
"""

import hashlib
import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.services.episodes.messages import Message, call, writable
from penstock.shared.bus.messages import Int32Array
from penstock.shared.errors import PermanentError, SettingsError
from penstock.shared.model.rendering import chat_template
from penstock.shared.model.rendering.chat_template import View
from penstock.shared.model.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]
_RECENT = 512
"""Ids that are kept: siblings, and answers to one question, share some."""
_ANSWER, _BECAUSE = "0815", "4711"


class Renderer:
    """Renders by a policy's template, in a process that can be killed; for threads.

    Args:
        arguments: of the template.
    """

    def __init__(self, tokenizer: Tokenizer, arguments: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise SettingsError(
                "expected a tokenizer with a chat template for [episodes], found one without: change policy.tokenizer"
            )
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        self._backend, self._plain, self._control = _without_control_tokens(tokenizer)
        self._nonce = f"xq{secrets.token_hex(8)}x"
        self._places = re.compile(f"{self._nonce}([0-9]+)x")
        self._recent: OrderedDict[bytes, Int32Array | None] = OrderedDict()
        self._keeping = threading.Lock()
        self._reads_clock = "strftime_now" in str(tokenizer.chat_template)
        self._calls_as_text = self._reads_calls_as_text()
        self._end, self.writes_reasoning = self._end_of_answer()
        """What the template writes after an answer, such as ``<|im_end|>``; nothing where the next role's mark ends it."""

    def whole(self, messages: Sequence[Message], tools: Tools, at_s: float | None = None) -> Int32Array:
        """Return the ids of a conversation, up to where the policy answers. Raises PermanentError."""
        hidden: dict[str, int] = {}
        turns = self._hide(messages, hidden)

        def ids() -> Int32Array:
            try:
                (text,) = self._render(turns, [View(len(turns), answers=True)], tools, hidden, at_s)
            except chat_template.TemplateFailed as error:
                raise PermanentError(f"the chat template cannot render these messages: {error}") from error
            return np.array(self._encode(text, hidden), dtype=np.int32)

        whole = self._kept((turns, list(hidden), list(tools), at_s if self._reads_clock else None), ids)
        assert whole is not None
        return whole

    def after(
        self, messages: Sequence[Message], answered: int, tools: Tools, last_id: int, at_s: float | None = None
    ) -> Int32Array | None:
        """Return the ids of ``messages[answered:]``, which follow an answer that ends with ``last_id``; None: the template
        writes what is before them otherwise, or they have answers of their own.
        """
        rest = messages[answered:]
        if not rest or not answered or any(message.role == "assistant" for message in rest):
            return None
        hidden: dict[str, int] = {}
        turns = self._hide(messages, hidden)

        def ids() -> Int32Array | None:
            return self._after(turns, answered, tools, last_id, at_s, messages[answered - 1].reasoning.strip(), hidden)

        own = answered, last_id, at_s if self._reads_clock else None
        return self._kept((turns, list(hidden), list(tools), *own), ids)

    def _after(
        self,
        turns: Sequence[Any],
        answered: int,
        tools: Tools,
        last_id: int,
        at_s: float | None,
        reasoning: str,
        hidden: dict[str, int],
    ) -> Int32Array | None:
        other = {**turns[answered], "content": "1" if str(turns[answered]["content"]).startswith("0") else "0"}
        views = [View(len(turns), answers=True), View(answered, other if self._end else None)]
        views += [View(answered - 1)] if answered > 1 else []
        try:
            text, varied, before = [*self._render(turns, views, tools, hidden, at_s), ""][:3]
        except chat_template.TemplateFailed:
            return None
        if self._end:
            end = text.rfind(self._end, len(before), chat_template.common(text, varied))
        else:
            end = len(varied) if text.startswith(varied) else -1
        if not text.startswith(before) or end < 0 or reasoning not in text[len(before) : end]:
            return None
        ids, ending = self._encode(text[end:], hidden), self._encode(self._end, hidden)
        if last_id in (ending or ids[:1]):  # the policy ended its answer itself
            ids = ids[(ending or ids).index(last_id) + 1 :]
        return np.array(ids, dtype=np.int32)

    def branching(self) -> list[str]:
        """Return the roles whose messages the template does not append, so that each turn after one is a branch."""
        asked = Message("user", "2"), Message("assistant", _ANSWER, reasoning=_BECAUSE if self.writes_reasoning else "")
        next_messages = {"tool": Message("tool", "3", name="f"), "user": Message("user", "4")}
        return [role for role, told in next_messages.items() if self.after([*asked, told], 2, (), -1) is None]

    def _reads_calls_as_text(self) -> bool:
        """Return whether the template reads the arguments of calls as JSON text only, as DeepSeek's does."""
        asked = [Message("user", "2").for_template(), Message("assistant", calls=(call("f", {"a": 1}),)).for_template()]
        try:
            self._render(asked, [View(len(asked))], (), {}, None)
        except chat_template.TemplateFailed:
            return True
        return False

    def _end_of_answer(self) -> tuple[str, bool]:
        """Return what follows an answer, and whether its reasoning precedes it."""
        turns = [Message("user", "2"), Message("assistant", _ANSWER, reasoning=_BECAUSE)]
        try:
            (text,) = self._render([turn.for_template() for turn in turns], [View(len(turns))], (), {}, None)
        except chat_template.TemplateFailed as error:
            raise SettingsError(
                f"the chat template of the tokenizer cannot render an answer ({error}): change policy.tokenizer"
            ) from error
        before, answer, end = text.rpartition(_ANSWER)
        if not answer:
            raise SettingsError(
                "expected a chat template that writes the policy's answers, found one that leaves them out: change policy.tokenizer"
            )
        return end, _BECAUSE in before

    def _render(
        self, turns: Sequence[Any], views: Sequence[View], tools: Tools, hidden: dict[str, int], at_s: float | None
    ) -> list[str]:
        given = {"tools": self._hide_value(list(tools), hidden)} if tools else {}
        arguments = {**self._arguments, **given}
        return chat_template.render_views(self._tokenizer, turns, views, arguments=arguments, at_s=at_s)

    def _kept(self, asked: object, ids: Callable[[], Int32Array | None]) -> Int32Array | None:
        """Return the ids of what was asked before, or ``ids()``."""
        key = hashlib.blake2b(json.dumps(asked, default=str).encode(), digest_size=32).digest()
        with self._keeping:
            if key in self._recent:
                self._recent.move_to_end(key)
                return self._recent[key]
        made = ids()
        with self._keeping:
            self._recent[key] = made
            if len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
        return made

    def _hide(self, messages: Sequence[Message], hidden: dict[str, int]) -> list[dict[str, Any]]:
        turns = (message.for_template(as_text=self._calls_as_text) for message in messages)
        return [{**self._hide_value(turn, hidden), "role": turn["role"]} for turn in turns]

    def _hide_value(self, value: Any, hidden: dict[str, int]) -> Any:
        """Return a value whose texts with control tokens are numbers in ``hidden``."""
        if isinstance(value, str):
            value = writable(value)
            if not self._control.search(value):
                return value
            return f"{self._nonce}{hidden.setdefault(value, len(hidden))}x"
        if isinstance(value, dict):
            return {self._hide_value(name, hidden): self._hide_value(inner, hidden) for name, inner in value.items()}
        return [self._hide_value(inner, hidden) for inner in value] if isinstance(value, list) else value

    def _encode(self, text: str, hidden: Mapping[str, int]) -> list[int]:
        ids, texts = list[int](), list(hidden)
        for place, part in enumerate(self._places.split(text)):
            if place % 2:
                ids += _ids(self._plain, texts[int(part)])
            elif part:
                ids += _ids(self._backend, part)
        return ids


def _ids(backend: Any, text: str) -> list[int]:
    """Return the ids of a text, without the offsets that cost a third of the time."""
    (encoded,) = backend.encode_batch_fast([text], add_special_tokens=False)
    return list(encoded.ids)


def _without_control_tokens(tokenizer: Tokenizer) -> tuple[Any, Any, "re.Pattern[str]"]:
    """Return a tokenizer's own encoder, one that has no added token, and the pattern of their texts. Raises SettingsError."""
    from tokenizers import Tokenizer as Backend

    added = getattr(tokenizer, "added_tokens_decoder", {})
    control = {token_id: str(token.content) for token_id, token in added.items() if str(token.content).strip()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SettingsError(
            "expected a fast tokenizer (tokenizer.json) for [episodes], found a slow one: change policy.tokenizer"
        )
    description = json.loads(backend.to_str())
    plain = Backend.from_str(json.dumps({**description, "added_tokens": [], "post_processor": None}))
    for text in control.values():
        if control.keys() & set(plain.encode(text, add_special_tokens=False).ids):
            raise SettingsError(
                f"expected a tokenizer that can write {text!r} in plain tokens, found one whose vocabulary merges it: "
                "change policy.tokenizer"
            )
    longest_first = sorted(control.values(), key=len, reverse=True)
    return backend, plain, re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
