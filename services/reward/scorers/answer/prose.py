"""Find the answer that sentences state without a box or tag. Linear in the text's length.

::

    "We add 2 and 3, so the answer is 5."  ──▶ "5"        "Maybe $7$, maybe $5$."  ──▶ None: nothing is stated

The last "answer is …" counts; otherwise the last sentence, if it states one formula or number.
"""

import re

from penstock.services.reward.scorers.answer.notation import bare, last

LONGEST = 4_000
"""In characters; only the end of a longer completion is read."""
_LONGEST_STATED = 300

_SAID = re.compile(
    r"(?i)\banswer\b[*_]{0,2}(?:\s+(?!is\b)[a-z]+){0,6}?\s*[*_]{0,2}\s*(?:\bis\b|\bequals\b|[:=])\s*[:*_]{0,3}\s*"
)
_STATES = re.compile(
    r"(?i)(?:\b(?:is|are|equals?|gets?|gives?|makes?|has|have|obtain|yields?|costs?|earns?|(?:must|will|should) be"
    r"|(?:equal|equals|comes?|adds? up|sums? up|amounts?|simplifies|reduces|evaluates|leads) to|takes?)\b(?:\s+(?:us|you)\b)?|[=:])\s*"
)
_OPENING = re.compile(
    r"(?i)(?:\\text\s*\{\s*)?(?:(?:so|thus|hence|therefore|then|finally|altogether|in total|(?:the )?(?:final )?(?:answer|total|result)(?: is)?"
    r"|it|is|equal to|equals?|exactly|precisely|just|simply|about|approximately|a total of)[:,]?(?:\s+|\s*=\s*|\s*(?=\})))+(?:\}\s*)?"
)
"""Words before a number that state it."""
_ANSWER = r"(?:answer|it|this|that|result|number|value|total|sum)"
_ALTERED = re.compile(
    r"(?i)\b(?:half|third|quarter|square|cube|root|factorial|reciprocal|inverse|negative|opposite|multiple|factor|divisor)"
    rf"\s+of\s+(?:the\s+)?{_ANSWER}\b|\b(?:twice|thrice|double|triple|times)\s+(?:the\s+)?{_ANSWER}\b"
    rf"|\b{_ANSWER}\s+(?:minus|plus|times|squared|cubed|doubled|tripled|divided)\b|\bone\s+less\b"
)
"""A sentence about a function of the answer: ``twice the answer is 30``."""
_DISOWNED = re.compile(
    r"(?i)\b(?:doubt\w*|thinks|thought|believe[sd]?|suppos\w*|assum\w*|suspect\w*|hop(?:e|es|ing)|imagin\w*|pretend\w*"
    r"|claim\w*|wrong|false|incorrect\w*|unlikely|impossible|far\s+from)\b"
)
_CLAUSE_START = re.compile(r"[.!?]\s|[\n,;]|\b(?:so|thus|hence|therefore|then)\b")
_INTRODUCES = re.compile(
    r"(?i)(?:^|[,:=]|\b(?:so|thus|hence|therefore|then|that|finds?|found|concludes?|means?|leaves|results?\s+in|(?:total|sum|value|answer)\s+of"
    r"|answer|result|solution|about|exactly|approximately|just|simply))\s*$"
)
"""What may precede a formula that a sentence states, beside a verb."""
_FORMULA = re.compile(r"(?<!\\)\$\$(.{1,600}?)(?<!\\)\$\$|(?<![\\$])\$(?!\$)([^$\n]{1,600}?)(?<!\\)\$|\\\((.{1,600}?)\\\)|\\\[(.{1,600}?)\\\]", re.DOTALL)  # fmt: skip
_NUMBER = re.compile(
    r"(?<![\w.\\])[-+]?(?:\\?\$)?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?(?:\\?%)?(?![\w^])"
)
_HEDGED = re.compile(r"(?i)\b(?:may|maybe|might|could|perhaps|possibly|probably|either|neither|nor|not|never|cannot|or|wrong|incorrect|unless|guess|no|instead|but|except|without)\b|n't\b|\?")  # fmt: skip
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_CLAUSE = re.compile(
    r"(?i)\s*(?:,\s*(?:so|which|because|since|as|where|and)|\b(?:because|since|which|after|when|where|for|in total|altogether|every|each(?!\s+(?:way|side|end)\b)|left|remaining|old|of\s+them)\b).*$"
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
        return None if _is_other(text[: said.end()]) else _claim(_first_sentence(text[said.end() :]))
    sentences = [sentence for sentence in _SENTENCE.split(_one_line_formulas(text)) if sentence.strip()]
    if not sentences or _HEDGED.search(_without_formulas(sentences[-1])) or _is_other(sentences[-1]):
        return None
    return _last_claim(sentences[-1])


def without_opening(text: str) -> str:
    r"""Strip words that state a number.

    >>> without_opening(r"\text{exactly } 7"), without_opening("at most 7")
    ('7', 'at most 7')
    """
    rest = _OPENING.sub("", text, count=1) if _OPENING.match(text) else text
    return rest if re.match(r"[-+=$\\0-9.]", rest) else text


def _is_other(text: str) -> bool:
    """Whether a sentence states another quantity than the answer, or what is not so."""
    clause = _CLAUSE_START.split(text.rstrip(" ,;.!"))[-1]
    return bool(_ALTERED.search(clause) or _DISOWNED.search(clause))


def _first_sentence(text: str) -> str:
    return _SENTENCE.split(_one_line_formulas(text.strip()), maxsplit=1)[0].strip()


def _one_line_formulas(text: str) -> str:
    return _FORMULA.sub(lambda match: match[0].replace("\n", " "), text)


def _without_formulas(text: str) -> str:
    return _FORMULA.sub(" ", text)


def _claim(text: str) -> str | None:
    if not text or _HEDGED.search(_without_formulas(text)):
        return None
    text = without_opening(text)
    formulas = list(_FORMULA.finditer(text))
    if formulas and formulas[0].start() == 0:
        return (
            _with_unit(text, formulas[0], _inside(formulas[0]))
            if len({_inside(match) for match in formulas}) == 1
            else None
        )
    if formulas:
        return None
    claim = bare(_CLAUSE.sub("", text))
    return claim if 0 < len(claim) <= _LONGEST_STATED else None


def _with_unit(text: str, formula: re.Match[str], value: str) -> str | None:
    """Return the value of a formula with the words after it, which may be a unit, or ``million``."""
    after = _CLAUSE.sub("", text[formula.end() :]).strip(" \n.!;:,")
    if not after or text[formula.end() :].lstrip().startswith((",", ";", ":")):
        return value
    return f"{value} {after}" if re.fullmatch(r"[A-Za-z/^0-9 .]{1,60}", after) else None


def _last_claim(sentence: str) -> str | None:
    formulas = list(_FORMULA.finditer(sentence))
    if formulas:
        before = sentence[: formulas[-1].start()]
        several = len({_inside(match) for match in formulas}) > 1
        introduced = "=" in _inside(formulas[-1]) or _INTRODUCES.search(before) is not None
        stated = _ends_stating(before) or (introduced and not several)
        return _with_unit(sentence, formulas[-1], _value(_inside(formulas[-1]))) if stated else None
    states = list(_STATES.finditer(sentence))
    if states:
        claim = bare(_CLAUSE.sub("", without_opening(sentence[states[-1].end() :])))
        if claim and len(_NUMBER.findall(claim)) == 1 and _NUMBER.match(claim):
            return claim
    sentence = without_opening(sentence)
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
