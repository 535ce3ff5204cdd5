"""Separate a completion's reasoning from its answer (docs/rewards.md, "Reasoning").

::

    prompt … <think>\\n | First, 2 plus 2.\\n</think>\\n\\boxed{4}      the prompt ends with the opening: text begins with it
                        | <think>First, 2 plus                        cut before the closing: there is no answer
"""

import re
from collections.abc import Mapping

KNOWN: Mapping[str, str] = {
    "<think>": "</think>",
    "<|channel|>": "<|channel|>final<|message|>",
    "<|channel>": "<channel|>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "<|plamo:begin_think:plamo|>": "<|plamo:end_think:plamo|>",
}
"""Closing by opening, as vLLM's reasoning parsers name them: DeepSeek, GLM, Nemotron and Qwen; gpt-oss; Gemma 4; Mistral;
Cohere; Seed; MiniMax; PLaMo."""

_MOST_INDENT = 8


class Reasoning:
    """Finds reasoning by ``markers``, closing by opening.

    >>> Reasoning(KNOWN).answer("<think>5? No.</think> It is 7."), Reasoning(KNOWN).answer("<think> 5")
    (' It is 7.', '')
    """

    def __init__(self, markers: Mapping[str, str]) -> None:
        self._closings = dict(markers)
        longest_first = sorted({*markers, *markers.values()}, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def opening(self, prompt: str) -> str:
        """Return the end of ``prompt`` that opens the reasoning, such as ``<think>\\n``, or nothing."""
        last = max(self._marker.finditer(prompt), key=re.Match.start, default=None)
        if last is None or last[0] not in self._closings or prompt[last.end() :].strip():
            return ""
        return prompt[last.start() :]

    def answer(self, text: str) -> str:
        """Return ``text`` without its reasoning.

        What precedes a closing without an opening is reasoning, and so is what follows an opening without its closing.
        After a closing, an opening within a line is only mentioned.
        """
        answer, start, closing, mentioned, closed = "", 0, "", "", False
        for marker in self._marker.finditer(text):
            opens = self._closings.get(marker[0], "")
            if closing and marker[0] != closing:
                continue
            if opens and not closing:
                if closed and not _begins_line(text, marker.start(), start):
                    mentioned = opens
                    continue
                answer += text[start : marker.start()]
            elif marker[0] == mentioned:
                mentioned = ""
                continue
            start, closing, closed = marker.end(), opens, closed or not opens
        return answer if closing else answer + text[start:]


def _begins_line(text: str, place: int, start: int) -> bool:
    return place == start or text[max(0, place - _MOST_INDENT) : place].rstrip(" \t")[-1:] in ("", "\n")
