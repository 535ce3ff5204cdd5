"""Find the answer that sentences state without a box or tag. Linear in the text's length.

::

    "We add 2 and 3, so the answer is 5."  ──▶ "5"        "Maybe $7$, maybe $5$."  ──▶ None: nothing is stated

The last "answer is …" counts; otherwise the last sentence, if it states one formula or number.
"""

import re

from services.reward.scorers.answer.notation import bare, last

LONGEST = 4_000
"""In characters; only the end of a longer completion is read."""
_LONGEST_STATED = 300

_SAID = re.compile(
    r"(?i)\banswer\b[*_]{0,2}(?:\s+(?!is\b)[a-z]+){0,6}?\s*[*_]{0,2}\s*(?:\bis\b|\bequals\b|[:=])\s*[:*_]{0,3}\s*"
)
_STATES = re.compile(
    r"(?i)(?:\b(?:is|are|equals?|gets?|gives?|makes?|has|have|obtain|yields?|costs?|earns?|(?:must|will|should) be"
    r"|(?:equal|equals|comes?|adds? up|sums? up|amounts?|simplifies|reduces|evaluates|leads) to)\b|[=:])\s*"
)
_FORMULA = re.compile(r"(?<!\\)\$\$(.{1,600}?)(?<!\\)\$\$|(?<![\\$])\$(?!\$)([^$\n]{1,600}?)(?<!\\)\$|\\\((.{1,600}?)\\\)|\\\[(.{1,600}?)\\\]", re.DOTALL)  # fmt: skip
_NUMBER = re.compile(
    r"(?<![\w.\\])[-+]?(?:\\?\$)?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?(?:\\?%)?(?![\w^])"
)
_HEDGED = re.compile(r"(?i)\b(?:may|maybe|might|could|perhaps|possibly|probably|either|neither|nor|not|never|cannot|or|wrong|incorrect|unless|guess|no|instead|but|except|without)\b|n't\b|\?")  # fmt: skip
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_CLAUSE = re.compile(
    r"(?i)\s*(?:,\s*(?:so|which|because|since|as|where|and)|\b(?:because|since|which|after|when|where|for|in total|altogether|every|each|left|remaining)\b).*$"
)
_EMPHASIS = re.compile(r"(?<![\w)}\]])\*\*|\*\*(?![\w({\[])")
"""Markdown bold, opened or closed; not a power as in ``2**3``."""
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}[,.:;]?\s+\S|\n|\$.+\$|\\\(|\\\[")


def is_prose(text: str) -> bool:
    """Whether ``text`` may be prose rather than one bare formula."""
    return _PROSE.search(_EMPHASIS.sub("", text)) is not None


def stated(text: str) -> str | None:
    """Return the answer that ``text`` states; None if it states none, or hedges.

    >>> stated("There are 3 apples and 4 pears. So the total is 7 fruits.")
    '7 fruits'
    """
    text = re.sub(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}", r" \1 ", _EMPHASIS.sub("", text[-LONGEST:]))
    text = re.sub(r"\n\s*", "\n", re.sub(r"[^\S\n]+", " ", text)).strip()
    said = last(_SAID, text)
    if said is not None:
        return _claim(_first_sentence(text[said.end() :]))
    sentences = [sentence for sentence in _SENTENCE.split(_one_line_formulas(text)) if sentence.strip()]
    if not sentences or _HEDGED.search(_without_formulas(sentences[-1])):
        return None
    return _last_claim(sentences[-1])


def _first_sentence(text: str) -> str:
    return _SENTENCE.split(_one_line_formulas(text.strip()), maxsplit=1)[0].strip()


def _one_line_formulas(text: str) -> str:
    return _FORMULA.sub(lambda match: match[0].replace("\n", " "), text)


def _without_formulas(text: str) -> str:
    return _FORMULA.sub(" ", text)


def _claim(text: str) -> str | None:
    if not text or _HEDGED.search(_without_formulas(text)):
        return None
    formulas = [_inside(match) for match in _FORMULA.finditer(text)]
    if text.startswith(("$", r"\(", r"\[")) and formulas:
        return formulas[0] if len(set(formulas)) == 1 else None
    if formulas:
        return None
    claim = bare(_CLAUSE.sub("", text))
    return claim if 0 < len(claim) <= _LONGEST_STATED else None


def _last_claim(sentence: str) -> str | None:
    formulas = list(_FORMULA.finditer(sentence))
    if formulas:
        before = sentence[: formulas[-1].start()]
        several = len({_inside(match) for match in formulas}) > 1
        return None if several and not _ends_stating(before) else _value(_inside(formulas[-1]))
    states = list(_STATES.finditer(sentence))
    if states:
        claim = bare(_CLAUSE.sub("", sentence[states[-1].end() :]))
        if claim and len(_NUMBER.findall(claim)) == 1 and _NUMBER.match(claim):
            return claim
    numbers = list(_NUMBER.finditer(sentence))
    return bare(_CLAUSE.sub("", sentence)) if len(numbers) == 1 and numbers[0].start() == 0 else None


def _ends_stating(text: str) -> bool:
    last = list(_STATES.finditer(text))
    return bool(last) and last[-1].end() == len(text)


def _inside(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def _value(formula: str) -> str:
    r"""Return the result of an equation: 12 of ``3 \cdot 4 = 12``."""
    left, equals, _ = formula.partition("=")
    return (
        formula.rpartition("=")[2].strip() if equals and re.search(r"[0-9]", left) and "<" not in formula else formula
    )
