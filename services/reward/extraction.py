"""Where the answer stands in a completion. Pure functions on text, linear in its length."""

import re
from functools import lru_cache
from typing import Literal, TypeAlias

Place: TypeAlias = Literal["whole", "boxed", "hashes", "last_number", "choice", "tag", "auto"]
"""All of the text, in ``\\boxed{}``, after ``####``, the last number, the letter of a multiple choice, in a tag, or the first of
boxed, hashes and whole."""

_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+])?"  # a sign, where it is no operator
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?(?:/[0-9]+)?(?:\\?%)?"
)
_LONGEST_BOXED = 10_000
"""A box that is not closed within so many characters counts as cut off."""
_LAST_NUMBER_WITHIN = 20_000
"""How far from the end the last number is looked for, in characters."""

_CHOICE_WITHIN = 20_000
"""How far from the end a chosen letter is looked for, in characters."""
_LONGEST_LETTER = 40
"""Text that is nothing but a chosen letter is no longer, dress and all, in characters."""


def extract(text: str, place: Place, tag: str = "answer", letters: str = "ABCDE") -> str | None:
    """Return the answer in ``text``, stripped; None where there is none.

    ``tag`` counts where the place is a tag, ``letters`` where it is a choice.

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
    if place == "choice":
        return choice(text, letters)
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


def choice(text: str, letters: str = "ABCDE") -> str | None:
    """Return the letter that is chosen; None where there is none, or where more than one is left standing.

    It stands in the last box; or after the last "answer is", "answer:" or "option"; or it is all of the text, its last line,
    or its last letter in parentheses. Capital letters, but in boxes and parentheses, since "a" is a word.

    >>> choice("Paris is in France, so the answer is (B).")
    'B'
    """
    box = boxed(text)
    if box is not None:
        return _bare_letter(box, letters)
    text = text[-_CHOICE_WITHIN:]
    said = list(_said(letters).finditer(text))
    if said:
        return None if said[-1]["more"] else said[-1]["letter"].upper()
    if (alone := _bare_letter(text[:_LONGEST_LETTER], letters)) is not None and len(text) <= _LONGEST_LETTER:
        return alone
    lines = [line for line in text.splitlines() if line.strip()]
    listed = {letter for line in lines if (letter := _leading_letter(line, letters))}
    if lines and len(listed) == 1 and (last := _leading_letter(lines[-1], letters)):
        return last
    in_parentheses = re.findall(rf"\(([{letters}{letters.lower()}])\)", text)
    return in_parentheses[-1].upper() if in_parentheses and len(listed) < 2 else None


@lru_cache(maxsize=8)
def _said(letters: str) -> re.Pattern[str]:
    """Return what finds "the answer is (B)", with ``more`` where other letters follow."""
    dressed = r"[\s*_`:$\"'(\[]{0,8}(?:\\(?:textbf|text|mathrm|mathbf)\{\s*\(?)?"
    letter = rf"(?P<letter>[{letters}]|(?<=\()[{letters.lower()}](?=\)))(?![A-Za-z0-9'’])"
    before = r"(?i:\banswer\s{1,4}is|\banswer\s?[*_]{0,2}\s?[:=]|\b(?:choice|option)(?:\s{1,4}is)?)\s{0,4}(?i:(?:option|choice|letter)\s)?"
    more = rf"(?P<more>[)\]*_.}}\s]{{0,4}}(?:\s(?:or|and)\s|[/,&])\s*\(?[{letters}](?![A-Za-z0-9'’]))?"
    return re.compile(before + dressed + letter + more)


def _bare_letter(text: str, letters: str) -> str | None:
    """Return the letter that ``text`` is but for its dress: ``\\text{(b)}``, ``B.``, ``(B) 7``, ``**B**``."""
    bare = re.sub(r"\\(?:textbf|textit|text|mathrm|mathbf)\s*|[{}$*`]", "", text).strip()
    match = re.fullmatch(rf"\(?([{letters}{letters.lower()}])(?:[).:](?:\s.*)?)?\.?", bare)
    return match[1].upper() if match else None


def _leading_letter(line: str, letters: str) -> str | None:
    """Return the letter that a line begins with as the choices are listed: ``B``, ``(B) 7``, ``B) 7``, ``**B.** 7``."""
    match = re.match(rf"\s*[*_`]{{0,2}}(?:\(([{letters}])\)|([{letters}])(?:[).:]|[*_`\s.]*$))", line)
    return (match[1] or match[2]) if match else None
