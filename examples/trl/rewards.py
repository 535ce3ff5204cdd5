"""Reward functions, as TRL's GRPOTrainer and the scorer kind `trl` call them."""

from typing import Any


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the right sum, else 0."""
    return [float(text.strip() == expected) for text, expected in zip(completions, answer, strict=True)]


def length(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    """Minus the number of digits that are missing or too many; nothing to say of a completion without a digit."""
    return [
        -float(abs(len(text.strip()) - len(expected))) if any(map(str.isdigit, text)) else None
        for text, expected in zip(completions, answer, strict=True)
    ]
