"""Convert prompts to token ids and token ids to text."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.shared.bus.messages import Int32Array, Prompt
from penstock.shared.errors import PermanentError


class Codec(Protocol):
    def prepare(self, prompt: Prompt) -> None:
        """Do what of :meth:`encode` may take seconds, in a thread; raises PermanentError."""

    def encode(self, prompt: Prompt) -> Int32Array:
        """Return a prompt's token ids; raises PermanentError if it can never be generated."""

    def decode(self, completions: Sequence[Int32Array]) -> list[str]:
        """Return the texts of token ids, without special tokens that no scorer looks for."""

    def texts(self, prompt_token_ids: Int32Array, completions: Sequence[Int32Array]) -> list[str]:
        """Return completions' texts, which begin with the reasoning's opening if the prompt ends with it."""


class CharacterCodec:
    """Character codes as token ids, 0 to stop."""

    stop = 0

    def prepare(self, prompt: Prompt) -> None:
        """Do nothing."""

    def encode(self, prompt: Prompt) -> Int32Array:
        if not prompt.text:
            raise PermanentError(f"there is no text in {prompt.problem}")
        return np.array([ord(character) for character in prompt.text], dtype=np.int32)

    def decode(self, completions: Sequence[Int32Array]) -> list[str]:
        return ["".join(chr(code) for code in ids.tolist() if code != self.stop) for ids in completions]

    def texts(self, prompt_token_ids: Int32Array, completions: Sequence[Int32Array]) -> list[str]:
        return self.decode(completions)
