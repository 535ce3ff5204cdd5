"""Find the answer in a completion."""

import re
from collections import deque
from functools import lru_cache

from penstock.services.reward.scorers.answer.notation import JOINT, JOINT_WORD, SCALE_WORDS, ascii_signs, last
from penstock.shared.settings.rewards.scorers import AnswerPlace

_ARROW = r"[-=]{1,3}+>|[→⇒]|\\(?:to|[Rr]ightarrow|longrightarrow|implies)(?![A-Za-z])"
_EMPHASIS = r"(?<![\w*)\]}\\])(\*{1,3}+|_{1,3}+)(?=[^\s*])((?:(?!\1)[^\n]){1,300}+)(?<!\s)\1(?![\w*])"
_MARKUP = (
    (re.compile(r"<sup>"), "^"),
    (re.compile(r"</?[A-Za-z][A-Za-z0-9]{0,15}+(?:\s[^<>\n]{0,100}+)?/?>"), " "),
    (re.compile(r"^[ \t]*+(?:>[ \t]?)++", re.MULTILINE), ""),
    (re.compile(_ARROW), " "),
    (re.compile(_EMPHASIS), r"\2"),
    (re.compile(_EMPHASIS), r"\2"),
    (re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,!])(?=[0-9]{3}(?![0-9]))"), ","),
)
_DIGITS = r"(?>(?>[0-9]{1,3}(?:,[0-9]{3}(?![0-9]))++|[0-9]++)(?:\.[0-9]++)*+|(?<!\.)\.[0-9]++)"
_NUMBER = re.compile(
    r"(?<![A-Za-z_0-9\\])(?<![0-9]\.)"
    r"(?:(?<![)\]}.])[-+](?=(?:\\?[$€£¥₹])?[0-9.]|\\[dtc]?frac)(?:\\?[$€£¥₹])?|(?<==\s)-\s(?=[0-9.]))?+"  # sign
    r"(?:(?P<date>[0-9]{1,4}(?P<dash>[-/])[0-9]{1,2}(?P=dash)[0-9]{1,4}(?![0-9]))"
    r"|(?:[0-9]++\s?)?+\\[dtc]?frac(?:[0-9]{2}(?![0-9])|\{[0-9]{1,40}+\}\{[0-9]{1,40}+\})"
    rf"|(?:[0-9]++\s(?=[0-9]++/[0-9]))?+{_DIGITS}(?:[eE][-+]?[0-9]{{1,3}}+(?![0-9]))?+(?:\s?/\s?[0-9]++(?:\.[0-9]++)?+)?+)"
    rf"(?:\s?\\?%|\s(?:hundred\s)?(?:{SCALE_WORDS})s?\b)?+"
)
"""Whatever may be a number, whole: no part of its digits is taken for it."""
_OPERAND = r"(?:[0-9)\]}]|(?<![A-Za-z])[A-Za-z])"
_INSIDE = r"(?:[^{}\n]|\{[^{}\n]*+\})*+"
_NOT_AFTER = re.compile(
    r"(?:(?:\b(?:not|not be|than|least|most)|n['’]t|[0-9]\$? or)\s+|[<>≠≤≥]=?\s*|\\(?:n?eq|ne|[lg]eq?|[lg]eqslant|[lg]t|pm)\s*)\$?$"
    r"|(?<![A-Za-z\\])[A-Za-z0-9]++\([^()\n]*+$"  # an argument
    rf"|{_OPERAND}[ \t]?(?:\*\*?|/|\\times|\\cdot|\\div)[ \t]{{0,2}}$"
    rf"|\\(?:sqrt(?:\[[^\]\n]*+\])?|[dtc]?frac|binom)\s?(?:\{{{_INSIDE}\}}\s?)?\{{{_INSIDE}$"
)
_NOT_BEFORE = re.compile(
    r"\s?\^(?!\{?\\circ)|\)\s?\^|!\s*[-+*/^=<>\\]|![\w$)}\](!]|\s?[-+*/]?\s?(?:[xyznk]|pi)(?![A-Za-z])"
    r"|(?![mgshlLVWNJCFA])[A-Za-z](?![A-Za-z])|[xyz]{2,3}(?![A-Za-z])|\s?\*\*?\s?[0-9(]"
    r"|\s?\\(?:pi|sqrt|[dtc]?frac|times|cdot|div|pm|binom|sin|cos|tan|log|ln|theta|alpha|beta)(?![A-Za-z])"
)
"""What makes a number a part of something else: a power, a factorial, a coefficient."""
_EXPONENT = re.compile(r"\^\{?$")
_OF_UNIT = re.compile(r"[0-9](?:\s|\\[, ]|\\(?:text|mathrm)\s?\{)*+[A-Za-z][A-Za-z/ ]{0,30}+\}?\^\{?$|_\{$")
"""Before the exponent of a unit, or an index: no number of its own."""
_MOST_SKIPPED, _CONTEXT = 16, 60
_BOX = re.compile(
    r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*"
    r"(?:\{|(?P<bare>[-+]?[0-9][0-9.,]*(?<![.,])|[A-Za-z](?=\s*(?:[$.,;)\]]|\\[)\]]|\Z))))"
)
_PLACEHOLDER = re.compile(r"(?:[.…\s]|\\[lcv]?dots)+|(?i:(?:(?:your|the|final)\s+)*(?:answer|result))")
"""Contents of a box that sentences only talk about."""
_BETWEEN_BOXES = re.compile(rf"(?:{JOINT}|[A-Za-z](?:_\{{?\w++\}}?)?+\s*+=)*+")
_LONGEST_JOINT = 60
_MOST_BOXES = 16
_COMMENT = re.compile(r"(?<=\s)%[^\n]*\n")
_LONGEST_BOXED = 10_000
"""In characters; a longer unclosed box counts as cut off."""
_HASHES = re.compile(r"(?<!#)####(?!#)")
_LAST_NUMBER_WITHIN = 20_000

_CHOICE_WITHIN = 20_000
_LONGEST_LETTER = 40
"""In characters, markup included."""


def extract(text: str, place: AnswerPlace, tag: str = "answer", letters: str = "ABCDE") -> str | None:
    r"""Return the answer in ``text``, stripped; None if there is no answer.

    >>> extract(r"so it is \boxed{\frac{1}{2}}.", "boxed")
    '\\frac{1}{2}'
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
    r"""Return the contents of the last box, or of the boxes that are listed there; None if missing or cut off.

    >>> boxed(r"$\boxed5$"), boxed(r"\fbox {5}"), boxed(r"\boxed{1} and $\boxed{-2}$"), boxed(r"\boxed{1}. So \boxed{2}.")
    ('5', '5', '1, -2', '2')
    """
    listed = list[str]()
    start = -1
    for match in reversed(deque(_BOX.finditer(text), _MOST_BOXES)):
        contents, end = _contents(text, match)
        between = text[end:start]
        if listed and not _joins(between):
            break
        if not contents:
            return ", ".join(listed) or None
        if _PLACEHOLDER.fullmatch(contents) is None:
            listed[:0] = [contents] if contents not in listed else []
            start = match.start()
    return ", ".join(listed) or None


def _joins(text: str) -> bool:
    return len(text) <= _LONGEST_JOINT and bool(JOINT_WORD.search(text) and _BETWEEN_BOXES.fullmatch(text))


def _contents(text: str, box: re.Match[str]) -> tuple[str | None, int]:
    """Return the contents of a box, None if it is cut off, and its end."""
    if box["bare"] is not None:
        return box["bare"], box.end()
    start = box.end()
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
                return _COMMENT.sub("\n", text[start:index]).strip(), index + 1
    return None, len(text)


def tagged(text: str, tag: str) -> str | None:
    """Return the text in the last closed ``<tag>…</tag>``.

    >>> tagged("<think>3 + 4</think> <answer>7</answer>", "answer")
    '7'
    """
    start = text.rfind(f"<{tag}>")
    end = text.find(f"</{tag}>", start)
    return text[start + len(tag) + 2 : end].strip() or None if 0 <= start < end else None


def hashes(text: str) -> str | None:
    """Return the rest of the line after the last ``####`` (GSM8K)."""
    match = last(_HASHES, text)
    if match is None:
        return None
    return text[match.end() :].partition("\n")[0].strip() or None


def last_number(text: str) -> str | None:
    """Return the last number, with sign, separators, exponent, denominator and percent sign.

    None if the last is only a part (a power, a coefficient, a factor) or a bound: never an earlier one.

    >>> last_number("3 of ５"), last_number("v5"), last_number("5²"), last_number("3, so it is **5**!")
    ('5', None, None, '5')
    """
    text = text[-_LAST_NUMBER_WITHIN:]
    text = text if text.isascii() else ascii_signs(text)
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    for number in reversed(deque(_NUMBER.finditer(text), _MOST_SKIPPED)):
        before = text[max(0, number.start() - _CONTEXT) : number.start()]
        if _OF_UNIT.search(before):
            continue
        is_part = number["date"] or number[0].count(".") > 1 + number[0].count("/")
        is_part = is_part or _EXPONENT.search(before) or _NOT_AFTER.search(before)
        return None if is_part or _NOT_BEFORE.match(text, number.end()) else number[0]
    return None


def letter_alone(text: str, letters: str = "ABCDE") -> str | None:
    """Return the letter that is the whole last box or the whole text.

    >>> letter_alone("**(B)**"), letter_alone("The answer is B")
    ('B', None)
    """
    box = boxed(text)
    if box is not None:
        return _bare_letter(box, letters)
    return _bare_letter(text, letters) if len(text) <= _LONGEST_LETTER else None


def choice(text: str, letters: str = "ABCDE") -> str | None:
    """Return the chosen letter; None unless there is exactly one.

    It is in the last box; or after the last "answer is", "answer:" or "option"; or it is the whole text, its last line,
    or the only letter in parentheses. Since "a" is a word, lower case counts only in boxes and right after
    "answer is (".

    >>> choice("Paris is in France, so the answer is (B).")
    'B'
    """
    box = boxed(text)
    if box is not None and (letter := _bare_letter(box, letters)) is not None:
        start = max(match.start() for match in _BOX.finditer(text))
        later = last(_said(letters), text[start:][-_CHOICE_WITHIN:])
        if later is None or "answer" not in later[0].lower():
            return letter
        return _decided(later["letter"].upper(), later.string[later.end() :], letters)
    if box is not None and re.fullmatch(rf"(?:[{letters}]|[\W_]|\b(?:text|or|and)\b)*", box):
        return None  # several letters
    text = text[-_CHOICE_WITHIN:]
    statement = last(_said(letters), text)
    if statement is not None:
        return _decided(statement["letter"].upper(), text[statement.end() :], letters)
    if (alone := letter_alone(text, letters)) is not None:
        return alone
    lines = [line for line in text.splitlines() if line.strip()]
    listed = {letter for line in lines if (letter := _leading_letter(line, letters))}
    if lines and len(listed) == 1 and (leading := _leading_letter(lines[-1], letters)):
        return leading
    in_parentheses = set(re.findall(rf"\(([{letters}])\)", text))
    return in_parentheses.pop() if len(in_parentheses) == 1 and len(listed) < 2 else None


def _decided(letter: str, rest: str, letters: str) -> str | None:
    """Return the stated letter or the one that corrects it; None if a second one remains."""
    corrected = re.match(
        rf"\W{{0,8}}(?i:no|wait)\b[:,.]?\s*(?i:it\s?(?:is|'s)\s)?\(?([{letters}])\)?(?![A-Za-z0-9'’])", rest
    )
    if corrected is not None:
        return corrected[1]
    another = rf"\(?[{letters}](?![A-Za-z0-9'’])"
    joint = rf"(?:[/,;&|+–-]|(?i:or|and)\b(?:\s+not\b)?)\s*{another}"
    if re.match(rf"[)\]*_.}}$\s]{{0,6}}(?:\?|{joint}|\([{letters}]\))", rest):
        return None
    sentence = re.split(
        r"\b(?:because|since|not|rather|instead)\b|\n(?!\s{0,4}+(?i:or)\b)|[.!?]\s(?!\s{0,4}+(?i:or|maybe|perhaps|alternatively|no|it|could)\b)",
        rest,
        maxsplit=1,
    )[0]
    hedged = re.search(
        rf"(?i:\b(?:or|also|alternatively|maybe|perhaps|could|might|may|either|no)\b)[^\n]{{0,60}}?(?<![A-Za-z])\(?[{letters}](?![A-Za-z0-9'’])",
        sentence,
    )
    return None if hedged else letter


@lru_cache(maxsize=8)
def _said(letters: str) -> re.Pattern[str]:
    dressed = r"[\s*_`:$\"'(\[]{0,8}(?:\\(?:textbf|text|mathrm|mathbf)\{\s*\(?)?"
    article = r"(?!A\s+(?!because|since|as\b|and\b|or\b|by\b|for\b|with\b|in\b|which\b|due\b)[a-z])"
    letter = rf"{article}(?P<letter>[{letters}]|(?<=\()[{letters.lower()}](?=\)))(?![A-Za-z0-9'’])"
    surely = r"(?i:(?:definitely|clearly|certainly|therefore|thus|then|obviously|indeed|simply)\s)?"
    before = (
        r"(?i:\banswer\s{1,4}is|\banswer\s?[*_]{0,2}\s?[:=]|\b(?:choice|option)(?:\s{1,4}is)?)\s{0,4}"
        rf"{surely}(?i:(?:option|choice|letter)\s)?"
    )
    return re.compile(before + dressed + letter)


def _bare_letter(text: str, letters: str) -> str | None:
    r"""Match ``\text{(b)}``, ``B.``, ``(B) 7``, ``**B**``."""
    bare = re.sub(r"\\(?:textbf|textit|text|mathrm|mathbf)\s*|[{}$*`]", "", text).strip()
    match = re.fullmatch(rf"\(?([{letters}{letters.lower()}])(?:[).:](?P<option>\s.*)?)?\.?", bare)
    if match is None or re.search(
        rf"^\s*\(?[{letters}]\)?\s*$|(?:^|[\s(])[{letters}][).:]|^\s*(?:or|and|[/,&|])"
        rf"|(?:[,;.]\s*or|\b(?:maybe|perhaps|possibly|alternatively))\s+\(?[{letters}](?![A-Za-z0-9'’])",
        match["option"] or "",
    ):
        return None
    return match[1].upper()


def _leading_letter(line: str, letters: str) -> str | None:
    """Match ``B``, ``(B) 7``, ``B) 7``, ``**B.** 7``."""
    match = re.match(rf"\s*[*_`]{{0,2}}(?:\(([{letters}])\)|([{letters}])(?:[).:]|[*_`\s.]*$))", line)
    return (match[1] or match[2]) if match else None
