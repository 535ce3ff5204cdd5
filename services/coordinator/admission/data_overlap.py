"""Overlap of held-out problems with the training data: an accuracy over problems that were trained on measures memory.

::

    prompt, word for word ──────────────────▶ exact
    prompt, without case and spacing ───────▶ the same problem, written otherwise

It compares prompts alone, by digest: 16 bytes a problem.
"""

import dataclasses
import hashlib
from collections.abc import Iterable

from services.coordinator.admission.dataset import Problem


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """How many problems of a held-out set are in the training data too."""

    set: str
    problems: int
    """Of the held-out set."""
    exact: int
    """Whose prompt is there word for word."""
    similar: int
    """Whose prompt is there but for case and spacing; ``exact`` are not counted again."""
    example: str
    """``file:line`` of the first of them."""

    def sentence(self, setting: str) -> str:
        """Say it in words; ``setting`` names the setting of the held-out set."""
        both = self.exact + self.similar
        return (
            f"{both} of the {self.problems} held-out problems of {self.set!r} are in the training data too ({self.exact} word for "
            f"word, {self.similar} but for case and spacing; the first is {self.example}): their accuracy measures memory. Remove "
            f"them from one of the two: change {setting} or data.path"
        )


class Training:
    """The prompts of the training data, to be looked up."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self._exact: set[bytes] = set()
        self._normal: set[bytes] = set()
        for problem in problems:
            self._exact.add(_digest(_prompt(problem)))
            self._normal.add(_digest(_normalised(_prompt(problem))))

    def overlap(self, name: str, held_out: Iterable[Problem]) -> Overlap:
        """Return how much of the held-out set ``name`` is in the training data."""
        count = exact = similar = 0
        example = ""
        for problem in held_out:
            count += 1
            prompt = _prompt(problem)
            same = _digest(prompt) in self._exact
            alike = not same and _digest(_normalised(prompt)) in self._normal
            exact, similar = exact + same, similar + alike
            example = example or (problem.source if same or alike else "")
        return Overlap(name, count, exact, similar, example)


def _prompt(problem: Problem) -> str:
    """Return what is asked: the text, or roles and contents of the messages."""
    if problem.messages is None:
        return problem.text or ""
    if len(problem.messages) == 1 and problem.messages[0].role == "user":
        return problem.messages[0].content  # the same as this text in a prompt's column
    return "\x1e".join(f"{turn.role}\x1f{turn.content}" for turn in problem.messages)


def _normalised(prompt: str) -> str:
    return " ".join(prompt.casefold().split())


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
