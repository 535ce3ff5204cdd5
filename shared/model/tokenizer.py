"""Open a policy's tokenizer, and convert prompts with it; messages use the chat template."""

import contextlib
import dataclasses
import re
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.shared.bus.messages import Int32Array, Json, Prompt
from penstock.shared.errors import PermanentError, SettingsError
from penstock.shared.model.context import own_context, own_vocabulary, read_config
from penstock.shared.model.model_source import check_tokenizer, check_vocabulary
from penstock.shared.model.rendering import chat_template
from penstock.shared.process.importing import importing, without_torch
from penstock.shared.reasoning import Reasoning

if TYPE_CHECKING:
    from penstock.shared.settings import PolicySettings, SamplingSettings, Settings
    from penstock.shared.settings.rewards.reward import RewardSettings

UNUSABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError)
"""Raised by transformers for missing files, no network (OSError), an unknown architecture, a bad name (ValueError),
config.json fields (KeyError, TypeError), shapes (RuntimeError), or a missing package (ImportError).
"""
_RECENT_PROMPTS = 64
_ASKING = ("system", "developer", "user")
_ANSWER = "0815"
_FLAG = re.compile(r"(?<!\S)/(?:no_?)?think\b")
"""What templates read from messages, and leave out."""
_OPENING_TOKENS = 32
"""Tokens of a prompt's end in which an opening of the reasoning is looked for."""


class Tokenizer(Protocol):
    chat_template: object
    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None

    def __len__(self) -> int: ...

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any:
        """Return tokens, as ``input_ids``."""

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
        **arguments: Any,
    ) -> Any:
        """Return a conversation's tokens, or its text; with a generation prompt, up to the next assistant's turn."""

    def batch_decode(self, sequences: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        """Return the texts of token ids."""

    @property
    def all_special_ids(self) -> list[int]: ...


def open_tokenizer(policy: "PolicySettings", *, alone: bool = False) -> Tokenizer:
    """Open the policy's tokenizer; ``alone``: in a process without models, which needs no torch. A folder's own code may."""
    setting, source = policy.tokenizer_source
    check_tokenizer(setting, source, for_messages=False)
    with importing(), without_torch() if alone and not policy.trust_remote_code else contextlib.nullcontext():
        from transformers import AutoTokenizer

    _log_as_we_do()
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=policy.trust_remote_code)
    except UNUSABLE as error:
        raise SettingsError(
            f"could not load a tokenizer from {source!r} ({first_line(error)}): change {setting}"
        ) from error
    return tokenizer


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the tokens that completions' texts lack, by id."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    ids = sorted({*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)})
    return dict(
        zip(ids, tokenizer.batch_decode([[token_id] for token_id in ids], skip_special_tokens=False), strict=True)
    )


class TextDecoder:
    """Decodes completions without special tokens, except those that one of ``markers`` contains, such as ``<think>``."""

    def __init__(self, tokenizer: Tokenizer, markers: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        special = special_tokens(tokenizer) if markers else {}
        self._hidden = frozenset(
            token_id for token_id, text in special.items() if not any(text in marker for marker in markers)
        )
        self._shows = len(self._hidden) < len(special)

    def __call__(self, completions: Sequence[Int32Array | list[int]]) -> list[str]:
        """Return the texts of token ids."""
        ids_of: list[list[int]] = [np.asarray(token_ids).tolist() for token_ids in completions]
        if not self._shows:
            return self._tokenizer.batch_decode(ids_of, skip_special_tokens=True)
        kept = [[token_id for token_id in token_ids if token_id not in self._hidden] for token_ids in ids_of]
        return self._tokenizer.batch_decode(kept, skip_special_tokens=False)


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text, with those that the tokenizer puts before it (``<s>``) once, also if the text has them."""
    whole: list[int] = tokenizer(text)["input_ids"]
    if whole.count(whole[0] if whole else 0) < 2:
        return whole  # nothing is there twice
    bare: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    added = next((n for n in range(len(whole) - len(bare), 0, -1) if whole[n : n + len(bare)] == bare), 0)
    while added and whole[added : 2 * added] == whole[:added]:
        whole = whole[added:]
    return whole


def stop_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a completion: the tokenizer's, and where its chat template ends answers with another special
    token (Gemma's ``<end_of_turn>``), that one.
    """
    ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    if not tokenizer.chat_template:
        return ends
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = chat_template.render(tokenizer, turns)
    except chat_template.TemplateEndless as error:
        raise SettingsError(
            f"the chat template of the tokenizer cannot be used ({error}): change policy.tokenizer or policy.model"
        ) from error
    except chat_template.TemplateFailed:
        return ends  # which messages it renders is said of each prompt
    _, answer, end = text.rpartition(_ANSWER)
    known = special_tokens(tokenizer) if answer else {}
    special = [token_id for token_id in tokenizer(end, add_special_tokens=False)["input_ids"] if token_id in known]
    return (*ends, *special[:1]) if special and not {*ends} & {*special} else ends


def check_stop_texts(tokenizer: Tokenizer, sampling: "SamplingSettings", markers: Sequence[str] = ()) -> None:
    """Raise SettingsError if a text that ends completions has a special token, which decoded completions lack."""
    decode = TextDecoder(tokenizer, markers)
    texts = [*sampling.stop, *(text for source in sampling.by_dataset for text in sampling.of(source).stop)]
    for text in texts:
        token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if decode([token_ids]) != tokenizer.batch_decode([token_ids], skip_special_tokens=False):
            raise SettingsError(
                f"expected texts without special tokens in sampling.stop, found {text!r}, which no completion's text "
                "contains: leave it out if it is one of the model's own end tokens, which end completions anyway"
            )


def clock_of(prompt: Prompt) -> float:
    """Return the time that chat templates write, which is that of the prompt's admission, in seconds since the epoch.

    So all replicas render the same tokens for the samples of a group, after midnight and in other time zones.
    """
    return prompt.admitted_at_s or time.time()


UNLIMITED = 1 << 30


class PromptReader(Protocol):
    @property
    def context_tokens(self) -> int:
        """Maximum tokens of a prompt plus its completion."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """A :class:`PromptReader` without an engine: a model's limits, as far as they are known without opening it."""

    context_tokens: int = UNLIMITED
    vocabulary: int = UNLIMITED

    @staticmethod
    def of(settings: "Settings") -> "Limits":
        config = read_config(settings.policy.model)
        context = settings.rollout.max_model_len or own_context(config)
        return Limits(context or UNLIMITED, own_vocabulary(config) or UNLIMITED)


class TokenizerCodec:
    """Prompts to tokens, and tokens to texts.

    Args:
        template_arguments: of the chat template.
        reward: what of a completion its scorers look for.

    Raises:
        SettingsError: the tokenizer is another model's.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reader: PromptReader,
        template_arguments: Mapping[str, Any] | None = None,
        reward: "RewardSettings | None" = None,
    ) -> None:
        # without added tokens, which a model may lack
        check_vocabulary(getattr(tokenizer, "vocab_size", 0), reader.vocabulary)
        self._template_arguments = dict(template_arguments or {})
        self._tokenizer = tokenizer
        self.decode = TextDecoder(tokenizer, reward.markers if reward else ())
        """Returns the texts of token ids."""
        special = sorted(special_tokens(tokenizer).values(), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, filter(None, special))) or r"(?!)")
        self._reasoning = Reasoning(reward.reasoning_markers if reward else {})
        self._context_tokens = reader.context_tokens
        self._vocabulary = reader.vocabulary
        self._say_nothing = {tokenizer.pad_token_id, tokenizer.unk_token_id}
        self._recent: OrderedDict[Any, Int32Array] = OrderedDict()
        self._prepared: OrderedDict[Any, str] = OrderedDict()

    def prepare(self, prompt: Prompt) -> None:
        """Render the messages that :meth:`encode` needs, which may take seconds; for a thread. Raises PermanentError."""
        if prompt.messages is not None and self._tokenizer.chat_template is not None:
            self.rendered(prompt, add_generation_prompt=True)

    def encode(self, prompt: Prompt) -> Int32Array:
        """Return the token ids, read-only; the samples of a group share them."""
        content = prompt.text, prompt.messages, prompt.sampling.max_new_tokens, prompt.admitted_at_s
        token_ids = self._recent.get(content)
        if token_ids is None:
            token_ids = self._recent[content] = self.checked(prompt, self._token_ids(prompt))
            token_ids.setflags(write=False)
            if len(self._recent) > _RECENT_PROMPTS:
                self._recent.popitem(last=False)
        return token_ids

    def checked(self, prompt: Prompt, ids: list[int]) -> Int32Array:
        """Return a prompt's token ids as an array. Raises PermanentError: a model cannot read them."""
        token_ids = np.array(ids, dtype=np.int32)
        if len(token_ids) == 0:
            raise PermanentError(f"expected a prompt of at least one token in {prompt.problem}, found an empty one")
        longest = self._context_tokens - prompt.sampling.max_new_tokens
        if len(token_ids) > longest:
            raise PermanentError(
                f"expected a prompt of at most {longest} tokens in {prompt.problem} (a context of "
                f"{self._context_tokens}, the model's or rollout.vllm.max_model_len, less sampling.max_new_tokens = "
                f"{prompt.sampling.max_new_tokens}), found {len(token_ids)}: shorten it, or change one of them"
            )
        if int(token_ids.max()) >= self._vocabulary:
            raise PermanentError(
                f"expected token ids under the model's {self._vocabulary} in {prompt.problem}, found "
                f"{int(token_ids.max())}: the tokenizer is another model's; change policy.tokenizer"
            )
        if self._say_nothing.issuperset(token_ids.tolist()):
            raise PermanentError(
                f"expected tokens that hold the text of {prompt.problem}, found unknown ones and padding only: the "
                "tokenizer cannot read it; change policy.tokenizer"
            )
        return token_ids

    def texts(self, prompt_token_ids: Int32Array, completions: Sequence[Int32Array]) -> list[str]:
        """Return completions' texts, which begin with the reasoning's opening if the prompt ends with it."""
        (end,) = self._tokenizer.batch_decode([prompt_token_ids[-_OPENING_TOKENS:].tolist()], skip_special_tokens=False)
        opening = self._reasoning.opening(end)
        return [opening + text for text in self.decode(completions)]

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if prompt.text is not None:
            return encode_text(self._tokenizer, prompt.text)
        if prompt.messages is None:
            raise PermanentError(f"expected text or messages in {prompt.problem}, found other content")
        self._check_whole(prompt)
        return self.tokens(self.rendered(prompt, add_generation_prompt=True))

    def _check_whole(self, prompt: Prompt) -> None:
        rendered = self.plain(self.rendered(prompt, add_generation_prompt=True))
        for message in prompt.messages or ():
            if message.role in _ASKING and self.plain(message.content) not in rendered:
                raise PermanentError(
                    f"expected a chat template that renders every message of {prompt.problem}, but it leaves out the "
                    f"{message.role}'s: use a tokenizer with another one (policy.tokenizer), or give prompts as texts"
                )

    def plain(self, text: str) -> str:
        """Return ``text`` without white space, special tokens, and what chat templates read from messages."""
        return "".join(self._special.sub("", _FLAG.sub("", text)).split())

    def is_unframed(self, text: str) -> bool:
        """Whether a text is not rendered, and the tokenizer has a chat template that would."""
        return self._tokenizer.chat_template is not None and self._special.search(text) is None

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a rendered conversation."""
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids

    def rendered(self, prompt: Prompt, *, add_generation_prompt: bool) -> str:
        """Return the text of a prompt's messages; raises PermanentError."""
        key = prompt.messages, prompt.admitted_at_s, add_generation_prompt
        if (text := self._prepared.get(key)) is not None:
            return text
        turns = [{"role": message.role, "content": message.content} for message in prompt.messages or ()]
        text = self._prepared[key] = self.conversation(turns, prompt, add_generation_prompt=add_generation_prompt)
        if len(self._prepared) > _RECENT_PROMPTS:
            self._prepared.popitem(last=False)
        return text

    def conversation(
        self, turns: Sequence[Mapping[str, Json]], prompt: Prompt, *, add_generation_prompt: bool, tools: Json = None
    ) -> str:
        """Return the text of ``turns``, at the time of ``prompt``; raises PermanentError."""
        if self._tokenizer.chat_template is None:
            raise PermanentError(
                f"expected a text in {prompt.problem}, as this tokenizer has no chat template, but found "
                "messages: change data.prompt_field or policy.tokenizer"
            )
        try:
            return chat_template.render(
                self._tokenizer,
                turns,
                add_generation_prompt=add_generation_prompt,
                arguments={**self._template_arguments, "tools": tools} if tools else self._template_arguments,
                at_s=clock_of(prompt),
            )
        except chat_template.TemplateFailed as error:
            raise PermanentError(
                f"the chat template cannot render the messages of {prompt.problem}: {error}"
            ) from error


def _log_as_we_do() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.disable_default_handler()
    logging.enable_propagation()


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
