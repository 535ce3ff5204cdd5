"""Where the answer stands in a completion. Pure functions on text, linear in its length."""

import re
from typing import Literal, TypeAlias

Place: TypeAlias = Literal["whole", "boxed", "hashes", "last_number", "tag", "auto"]
"""All of the text, in ``\\boxed{}``, after ``####``, the last number, in a tag, or the first of boxed, hashes and whole."""

_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+])?"  # a sign, where it is no operator
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?(?:/[0-9]+)?(?:\\?%)?"
)
_LONGEST_BOXED = 10_000
"""A box that is not closed within so many characters counts as cut off."""
_LAST_NUMBER_WITHIN = 20_000
"""How far from the end the last number is looked for, in characters."""


def extract(text: str, place: Place, tag: str = "answer") -> str | None:
    """Return the answer in ``text``, stripped; None where there is none. ``tag`` counts where the place is a tag.

    >>> extract(r"so it is \\boxed{\\frac{1}{2}}.", "boxed")
    '\\\\frac{1}{2}'
    >>> extract("3 apples and 4 pears: 7 fruits", "last_number")
    '7'
    """
    if place == "whole":
        return text.strip() or None
    if place == "boxed":
        return boxed(text)
    if place == "hashes":
        return hashes(text)
    if place == "last_number":
        return last_number(text)
    if place == "tag":
        return tagged(text, tag)
    return boxed(text) or hashes(text) or text.strip() or None


def boxed(text: str) -> str | None:
    """Return what stands in the last ``\\boxed{…}``, its braces balanced; None where it is missing or cut off."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth, escaped = 1, False
    for index in range(start, min(len(text), start + _LONGEST_BOXED)):
        character = text[index]
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start:index].strip() or None
    return None


def tagged(text: str, tag: str) -> str | None:
    """Return what stands in the last ``<tag>…</tag>``; None where it is missing or not closed.

    >>> tagged("<think>3 + 4</think> <answer>7</answer>", "answer")
    '7'
    """
    start = text.rfind(f"<{tag}>")
    end = text.find(f"</{tag}>", start)
    return text[start + len(tag) + 2 : end].strip() or None if 0 <= start < end else None


def hashes(text: str) -> str | None:
    """Return the rest of the line after the last ``####``, as GSM8K writes its answers."""
    start = text.rfind("####")
    if start < 0:
        return None
    return text[start + 4 :].lstrip("# ").partition("\n")[0].strip() or None


def last_number(text: str) -> str | None:
    """Return the last number, with its sign, thousands separators, exponent, denominator and percent sign."""
    found = None
    for match in _NUMBER.finditer(text[-_LAST_NUMBER_WITHIN:]):
        found = match[0]
    return found
