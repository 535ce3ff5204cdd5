"""Overlap of held-out problems with the training data, by 16-byte prompt digests: exact, or but for case and spacing."""

import dataclasses
import hashlib
from collections.abc import Iterable

from penstock.services.coordinator.admission.dataset import Problem


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """Held-out problems that are also in the training data."""

    set: str
    problems: int
    exact: int
    similar: int
    """Equal but for case and spacing."""
    example: str
    """First match, ``file:line``."""

    def sentence(self, setting: str) -> str:
        both = self.exact + self.similar
        return (
            f"{both} of the {self.problems} held-out problems of {self.set!r} are in the training data too ({self.exact} word for "
            f"word, {self.similar} but for case and spacing; the first is {self.example}): their accuracy measures memory. Remove "
            f"them from one of the two: change {setting} or data.path"
        )


class Training:
    def __init__(self, problems: Iterable[Problem]) -> None:
        self._exact: set[bytes] = set()
        self._normal: set[bytes] = set()
        for problem in problems:
            self._exact.add(_digest(_prompt(problem)))
            self._normal.add(_digest(_normalised(_prompt(problem))))

    def overlap(self, name: str, held_out: Iterable[Problem]) -> Overlap:
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
    if problem.messages is None:
        return problem.text or ""
    if len(problem.messages) == 1 and problem.messages[0].role == "user":
        return problem.messages[0].content  # equals this text in a prompt column
    return "\x1e".join(f"{turn.role}\x1f{turn.content}" for turn in problem.messages)


def _normalised(prompt: str) -> str:
    return " ".join(prompt.casefold().split())


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
