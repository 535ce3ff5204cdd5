"""Convert prompts to token ids and token ids to text; messages use the chat template."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from services.rollout.engines.transformers.loading import Tokenizer
from shared.bus.messages import Int32Array, Prompt
from shared.errors import PermanentError


class Codec(Protocol):
    def encode(self, prompt: Prompt) -> Int32Array:
        """Return a prompt's token ids; raises PermanentError if it can never be generated."""

    def decode(self, completions: Sequence[Int32Array]) -> list[str]:
        """Return completions' texts, without special tokens."""


class Reader(Protocol):
    @property
    def context_tokens(self) -> int:
        """Maximum tokens of a prompt plus its completion."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""


class TokenizerCodec:
    def __init__(
        self, tokenizer: Tokenizer, reader: Reader, template_arguments: Mapping[str, Any] | None = None
    ) -> None:
        self._template_arguments = dict(template_arguments or {})
        self._tokenizer = tokenizer
        self._context_tokens = reader.context_tokens
        self._vocabulary = reader.vocabulary
        self._say_nothing = {tokenizer.pad_token_id, tokenizer.unk_token_id}

    def encode(self, prompt: Prompt) -> Int32Array:
        token_ids = np.array(self._token_ids(prompt), dtype=np.int32)
        if len(token_ids) == 0:
            raise PermanentError(f"expected a prompt of at least one token in {prompt.problem}, found an empty one")
        longest = self._context_tokens - prompt.sampling.max_new_tokens
        if len(token_ids) > longest:
            raise PermanentError(
                f"expected a prompt of at most {longest} tokens in {prompt.problem} (the model's context of "
                f"{self._context_tokens} less {prompt.sampling.max_new_tokens} new ones), found {len(token_ids)}: "
                "shorten it, or lower sampling.max_new_tokens"
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

    def decode(self, completions: Sequence[Int32Array]) -> list[str]:
        return self._tokenizer.batch_decode([ids.tolist() for ids in completions], skip_special_tokens=True)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if prompt.text is not None:
            token_ids: list[int] = self._tokenizer(prompt.text)["input_ids"]
            return token_ids
        if prompt.messages is None:
            raise PermanentError(f"expected text or messages in {prompt.problem}, found other content")
        if self._tokenizer.chat_template is None:
            raise PermanentError(
                f"expected a text in {prompt.problem}, as this tokenizer has no chat template, but found "
                "messages: change data.prompt_field or policy.tokenizer"
            )
        return self._apply_template(prompt)

    def _apply_template(self, prompt: Prompt) -> list[int]:
        from jinja2 import TemplateError

        turns = [{"role": message.role, "content": message.content} for message in prompt.messages or ()]
        try:
            return self._tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=True, return_dict=False, **self._template_arguments
            )
        except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
            raise PermanentError(
                f"the chat template cannot render the messages of {prompt.problem}: {error}"
            ) from error


class CharacterCodec:
    """Character codes as token ids, 0 to stop."""

    stop = 0

    def encode(self, prompt: Prompt) -> Int32Array:
        if not prompt.text:
            raise PermanentError(f"there is no text in {prompt.problem}")
        return np.array([ord(character) for character in prompt.text], dtype=np.int32)

    def decode(self, completions: Sequence[Int32Array]) -> list[str]:
        return ["".join(chr(code) for code in ids.tolist() if code != self.stop) for ids in completions]
