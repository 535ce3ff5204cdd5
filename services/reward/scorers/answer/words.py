"""Compare answers that are words as text, not as products of letters."""

import re

_COMMAND = re.compile(r"\\[A-Za-z]+")
_WRAPPED = re.compile(r"\\text\s*\{([^{}]*)\}")
_FUNCTIONS = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "lg", "exp", "arcsin", "arccos", "arctan", "sinh", "cosh",
    "tanh", "sqrt", "pi", "mod", "gcd", "lcm", "max", "min", "det", "lim",
))  # fmt: skip
_RUN = re.compile(r"[^\W\d_]{2,}")
_VOWELS = frozenset("aeiou")
_TEXT = re.compile(r"[^\W\d_](?:[^\W\d_]|[\s'.,!?&-])*")
_TRIMMED = " \t\n.,"
_QUOTED = re.compile(r"(['\"])(.*)\1")


def unwrapped(text: str) -> str:
    r"""Strip ``\text{…}`` around words and parentheses around the whole."""
    text = re.sub(r"\s+", " ", _WRAPPED.sub(r" \1 ", text)).strip(_TRIMMED)
    text = _QUOTED.sub(r"\2", text) if _QUOTED.fullmatch(text) else text
    if text.startswith("(") and text.endswith(")") and "(" not in text[1:]:
        text = text[1:-1].strip()
    return text


def same_text(reference: str, answer: str) -> tuple[str, ...] | None:
    r"""Return the rules under which two texts are equal; None if they differ.

    >>> same_text("Monday", "\\text{monday}"), same_text("x", "X")
    (('case',), None)
    """
    if reference == answer:
        return ()
    first, second = unwrapped(reference), unwrapped(answer)
    if first == second and first:
        return () if is_text(first) or re.fullmatch(r"[\w\s:/.-]+", first) else None
    if len(first) > 1 and first.casefold() == second.casefold() and (is_text(first) or has_words(first)):
        return ("case",)
    return None


def is_text(text: str) -> bool:
    """Whether ``text`` is letters only, and not a product such as ``xy``.

    >>> is_text("east"), is_text("AB"), is_text("x"), is_text("ab"), is_text("mn")
    (True, True, False, False, False)
    """
    text = unwrapped(text)
    if len(text) < 2 or _TEXT.fullmatch(text) is None or text in _FUNCTIONS:
        return False
    return not (text.isascii() and text.isalpha() and _is_product(text))


def has_words(text: str) -> bool:
    r"""Whether ``text`` contains words, alone or beside mathematics.

    >>> has_words("2 hours and 30"), has_words("2xy+3"), has_words(r"\sin x"), has_words(r"3\text{ if } x")
    (True, False, False, True)
    """
    if any(_RUN.search(words) for words in _WRAPPED.findall(text)):
        return True
    bare = re.sub(r"\\(?:begin|end)\s*\{[a-zA-Z]*\*?\}|\\math[a-z]+\s*\{[A-Za-z]\}", " ", text)
    return any(_is_word(run) for run in _RUN.findall(_COMMAND.sub(" ", bare)))


def _is_word(run: str) -> bool:
    return (
        run not in _FUNCTIONS
        and not _is_product(run)
        and not (run.isascii() and run.islower() and len(run) <= 2 and run not in _SHORT)
    )


_SHORT = frozenset((
    "am", "an", "as", "at", "be", "by", "do", "go", "he", "hi", "if", "in", "is", "it", "me", "my", "no", "of", "oh",
    "ok", "on", "or", "ox", "so", "to", "up", "us", "we",
))  # fmt: skip


def _is_product(letters: str) -> bool:
    """Few lower-case letters that form no word in any order."""
    if not (letters.isascii() and letters.islower()) or len(letters) > 4:
        return False
    return not _VOWELS & set(letters) or (len(letters) <= 3 and set(letters) <= set("abcxyz"))


def swaps_case(reference: str, answer: str) -> bool:
    """Whether a variable is in the other case: ``3X`` for ``3x``."""
    expected, given = (set(_COMMAND.sub(" ", text)) for text in (reference, answer))
    return any(letter.isalpha() and letter.swapcase() in expected for letter in given - expected)
