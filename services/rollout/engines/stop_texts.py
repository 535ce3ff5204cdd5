"""Texts that end a completion (``sampling.stop``): at the token that completes one of them."""

from collections.abc import Callable, Sequence

from shared.bus.messages import Int32Array

_TOKENS_PER_CHARACTER, _MORE = 4, 8
"""A character may take four byte tokens; tokens before a text's first decide whether its space is kept."""


class StopTexts:
    """Finds the end of a completion by its decoded text."""

    def __init__(self, decode: Callable[[Sequence[Int32Array]], list[str]], texts: Sequence[str]) -> None:
        self._decode = decode
        self._texts = tuple(texts)
        self._window = _TOKENS_PER_CHARACTER * max(map(len, texts)) + _MORE

    def end(self, token_ids: Int32Array, searched: int = 0) -> int:
        """Return the length after which ``token_ids`` end, or 0; the first ``searched`` tokens complete no text."""
        for length in range(searched + 1, len(token_ids) + 1):
            (text,) = self._decode([token_ids[max(0, length - self._window) : length]])
            if any(stop in text for stop in self._texts):
                return length
        return 0
