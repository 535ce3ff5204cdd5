"""Texts that end a completion (``sampling.stop``): at the token that completes one of them, after ``min_new_tokens``."""

from collections.abc import Callable, Sequence

import numpy as np

from penstock.shared.bus.messages import Int32Array

TokenIds = Int32Array | Sequence[int]
_TOKENS_PER_CHARACTER, _MORE = 4, 8
"""A character may take four byte tokens; tokens before a text's first decide whether its space is kept."""


class StopTexts:
    """Finds the end of a completion by its decoded text; the first ``minimum`` tokens complete no text, as in vLLM."""

    def __init__(
        self, decode: Callable[[Sequence[Int32Array]], list[str]], texts: Sequence[str], minimum: int = 0
    ) -> None:
        self._decode = decode
        self._texts = tuple(texts)
        self._minimum = minimum
        self._window = _TOKENS_PER_CHARACTER * max(map(len, texts)) + _MORE

    def end(self, token_ids: TokenIds, searched: int = 0) -> int:
        """Return the length after which ``token_ids`` end, or 0; the first ``searched`` tokens complete no text.

        All further tokens are decoded together, and one by one if they have a text; of those before, only a few are read.
        """
        searched = max(searched, self._minimum)
        if len(token_ids) <= searched or not self._has_one(token_ids, searched + 1 - self._window, len(token_ids)):
            return 0
        lengths = range(searched + 1, len(token_ids) + 1)
        return next((length for length in lengths if self._has_one(token_ids, length - self._window, length)), 0)

    def _has_one(self, token_ids: TokenIds, start: int, end: int) -> bool:
        start = max(0, start)
        parts = (token_ids[start : max(start, self._minimum)], token_ids[start:end])
        early, text = self._decode([np.asarray(part, dtype=np.int32) for part in parts])
        return any(text.find(stop, max(0, len(early) - len(stop) + 1)) >= 0 for stop in self._texts)
