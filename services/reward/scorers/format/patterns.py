r"""Bound the work of a pattern on one text, so that safe ones are matched in the service.

A *sequence* is a pattern of literals, character classes and dots, repeated or not, in groups that are not::

    \s*<think>.*</think>\s*<answer>(.*)</answer>

Backtracking can end a repetition only where the literal after it occurs: the work is at most the text's length times
the product of these counts. Other patterns and texts go to a process that can be killed.
"""

import dataclasses
import math

import regex

MOST_STEPS = 400_000
_ESCAPED = {"n": "\n", "t": "\t"}
_TOKEN = regex.compile(
    r"""(?: (?P<literal>[^\\.^$*+?{}\[\]|()]) | \\(?P<escaped>[^\w\s]|[nt])
    | (?P<set>\.|\\[sSdDwW]|\[\^?(?:\\[sSdDwW]|\\[^\w\s]|[^\[\]\\^])+\]) )(?P<repeat>[*+?]\??)?(?![*+?{])
    | (?P<opening>\((?:\?:|\?P<\w+>)?)(?!\?) | (?P<closing>\))(?![*+?{])""",
    regex.VERBOSE,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Sequence:
    length: int
    literals: tuple[str, ...]
    """Of each repetition: the literal after it; "" for the end of the text or a set."""
    ends: bool
    """Whether the last repetition ends the pattern."""

    @classmethod
    def read(cls, pattern: str) -> "Sequence | None":
        """Return the sequence that ``pattern`` is, or None."""
        pattern = pattern.removeprefix("^").removesuffix("" if pattern.endswith("\\$") else "$")
        literals: list[str] = []
        grows, position = False, 0
        while position < len(pattern):
            token = _TOKEN.match(pattern, position)
            if token is None:
                return None
            position = token.end()
            literal = token["literal"] or _ESCAPED.get(token["escaped"], token["escaped"])
            if token["repeat"]:
                literals.append("")
                grows = True
            elif literal and grows:
                literals[-1] += literal
            elif token["set"]:
                grows = False
        return cls(len(pattern), tuple(literals), ends=grows and literals[-1:] == [""])

    def steps(self, text: str) -> int:
        """Return the most steps that a match of the whole ``text`` can take."""
        literals = self.literals[:-1] if self.ends else self.literals
        return (len(text) + self.length) * math.prod(_ends(text, literal) for literal in literals)


def _ends(text: str, literal: str) -> int:
    """Return in how many places a repetition before ``literal`` can end."""
    if not literal:
        return len(text) + 1
    overlaps = any(literal.startswith(literal[start:]) for start in range(1, len(literal)))
    return max(1, (len(literal) if overlaps else 1) * text.count(literal))
