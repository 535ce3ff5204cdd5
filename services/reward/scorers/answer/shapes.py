"""Brackets of an answer: list, set, point or interval, matrix, ratio."""

import re
from collections.abc import Iterator
from math import gcd
from typing import Literal, TypeAlias

from penstock.services.reward.scorers.answer.notation import split

Shape: TypeAlias = Literal["single", "list", "set", "round", "other", "matrix"]
_MATRIX = re.compile(r"\\begin\{[pb]matrix\}(?P<inside>.*)\\end\{[pb]matrix\}", re.DOTALL)
_LITERAL = re.compile(r"[0-9]+(?:-[0-9]+){2,}|[0-9]+(?:/[0-9]+){2,}|[0-9]{1,2}(?::[0-9]{2}){1,2}(?:\s*(?:[ap]\.?m\.?))?|[0-9]+(?:\.[0-9]+){2,}|0[xXbBoO][0-9A-Fa-f]+", re.IGNORECASE)  # fmt: skip
_CLOCK = re.compile(r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?")
_RATIO = re.compile(r"[0-9]{1,12}(?:\s*:\s*[0-9]{1,12}){1,5}")
_RATIO_VALUE = re.compile(r"(?P<above>[0-9]{1,12})\s*/\s*(?P<below>[0-9]{1,12})|\\frac\s*\{\s*(?P<up>[0-9]{1,12})\s*\}\s*\{\s*(?P<down>[0-9]{1,12})\s*\}|\\frac(?P<digits>[0-9]{2})")  # fmt: skip
_SPACED = re.compile(r"[-+]?[0-9./]+(?:\s+[-+]?[0-9./]+)+")
_INFINITE = re.compile(r"[-+]?\s*\\infty")
_ENDS = re.compile(r"[,;()\[\]]|\\[{}]|\\(?:cup|cap|setminus)(?![A-Za-z])")
_THOUSANDS = re.compile(
    r"(?P<before>[^,()\[\]]*?(?<![0-9]))(?P<number>[0-9]{1,3}(?:,[0-9]{3})+)(?P<after>(?![0-9,])[^,]*)"
)
_LONGEST_LIST = 64


def closed(text: str) -> bool:
    """Whether no ``)`` in ``text`` comes before its ``(``."""
    depth = 0
    for bracket in re.findall(r"[()]", text):
        depth += 1 if bracket == "(" else -1
        if depth < 0:
            return False
    return depth == 0


def shape(text: str) -> Shape:
    r"""Classify the brackets of ``text``.

    >>> shape("(1,2)"), shape("1,2"), shape(r"\{1,2\}"), shape("[1,2)"), shape("5")
    ('round', 'list', 'set', 'other', 'single')
    """
    if _MATRIX.fullmatch(text):
        return "matrix"
    if len(split(text)) > 1:
        return "list"
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "set"
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and len(split(text[1:-1])) > 1:
        return "round" if text[0] == "(" and text[-1] == ")" else "other"
    return "single"


def fitting(reference: str, answer: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the answer in the reference's brackets, with the rules that this takes."""
    expected, given = shape(reference), shape(answer)
    if expected == given or {expected, given} <= {"set", "list"} or {expected, given} == {"set", "single"}:
        yield answer, ()
    elif {expected, given} == {"matrix", "round"}:
        yield _as_matrix(reference, answer) if expected == "matrix" else _as_point(answer), ()
    elif {expected, given} == {"other", "single"} and r"\cup" in reference + answer:
        yield answer, ()
    elif {expected, given} <= {"round", "list", "set"}:
        yield _rebracketed(reference, answer), ("brackets",)


def _as_matrix(reference: str, answer: str) -> str:
    separator = r"\\" if r"\\" in reference else "&"
    return r"\begin{pmatrix}" + separator.join(split(answer[1:-1])) + r"\end{pmatrix}"


def _as_point(answer: str) -> str:
    match = _MATRIX.fullmatch(answer)
    inside = match["inside"] if match else answer
    return (
        "(" + ",".join(part.strip() for part in re.split(r"\\\\|&", inside) if part.strip()) + ")"
        if not (r"\\" in inside and "&" in inside)
        else answer
    )


def _rebracketed(reference: str, answer: str) -> str:
    inside = answer[2:-2] if answer.startswith(r"\{") else answer[1:-1] if shape(answer) == "round" else answer
    kind = shape(reference)
    return rf"\{{{inside}\}}" if kind == "set" else f"({inside})" if kind == "round" else inside


def without_thousands(text: str) -> str:
    """Remove thousands separators if ``text`` is one number.

    >>> without_thousands("1,234 cm"), without_thousands("12,34"), without_thousands("1,234, 5")
    ('1234 cm', '12,34', '1,234, 5')
    """
    match = _THOUSANDS.fullmatch(text)
    return text if match is None else match["before"] + match["number"].replace(",", "") + match["after"]


def plus_minus(text: str) -> str:
    r"""Expand ``1 \pm 2`` to ``1 + 2, 1 - 2``."""
    if text.count(r"\pm") != 1 or len(split(text)) > 1 or shape(text) not in ("single", "set"):
        return text
    inside = text[2:-2] if shape(text) == "set" else text
    name, equals, value = inside.rpartition("=")
    before, _, after = value.partition(r"\pm")
    plus = "+" if before.strip() else ""
    return f"{name}{equals}{before}{plus}{after}, {name}{equals}{before}-{after}"


def spaced_list(reference: str, answer: str) -> str:
    """Insert commas between the answer's numbers if the reference lists as many."""
    inside = reference[2:-2] if shape(reference) == "set" else reference
    parts = split(inside)
    if 1 < len(parts) <= _LONGEST_LIST and _SPACED.fullmatch(answer) and len(answer.split()) == len(parts):
        return ",".join(answer.split())
    return answer


def is_literal(text: str) -> bool:
    """Whether ``text`` is a date, time or version."""
    return _LITERAL.fullmatch(text.strip()) is not None


def same_ratio(reference: str, answer: str) -> bool | None:
    """Return whether two ratios are equal; None unless both are ratios."""
    if _CLOCK.fullmatch(reference):
        return None
    expected = _ratio(reference)
    given = _ratio(answer)
    if expected is None or given is None or ":" not in reference + answer:
        return None
    return expected == given


def _ratio(text: str) -> tuple[int, ...] | None:
    if _RATIO.fullmatch(text):
        parts = tuple(int(part) for part in text.split(":"))
    elif (match := _RATIO_VALUE.fullmatch(text)) is not None:
        digits = match["digits"] or (match["above"] or match["up"], match["below"] or match["down"])
        parts = int(digits[0]), int(digits[1])
    else:
        return None
    divisor = gcd(*parts)
    return tuple(part // divisor for part in parts) if divisor else None


def beyond_infinity(text: str) -> bool:
    r"""Whether ``text``, or a member of it, computes with ``\infty``.

    >>> beyond_infinity(r"(-\infty, 3)"), beyond_infinity(r"0\cdot\infty"), beyond_infinity(r"(\infty-\infty, 1)")
    (False, True, True)
    """
    if r"\infty" not in text:
        return False
    parts = [text] if shape(text) == "single" and r"\cup" not in text else _ENDS.split(text)
    return any(r"\infty" in part and _INFINITE.fullmatch(part.strip()) is None for part in parts)
