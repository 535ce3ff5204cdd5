"""Normalise notation without changing meaning.

Digits of any script, Unicode signs (``√3``, ``x²``, ``–5``), cosmetic LaTeX and delimiters become plain LaTeX.
"""

import re
import unicodedata
from collections import deque
from fractions import Fraction
from itertools import pairwise

LONGEST = 1_000
"""In characters; longer text is not rewritten."""

_SIGNS = {
    **dict.fromkeys("−–‒﹣－", "-"),
    **dict.fromkeys("\u00a0\u2007\u2008\u2009\u200a\u202f\u3000", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u200e\u200f", ""),
    **{
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": r"\div ",
        "∕": "/",
        "⁄": "/",
        "∗": "*",
        "＋": "+",
        "＝": "=",
    },
    **{"≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "±": r"\pm ", "∞": r"\infty ", "π": r"\pi "},
    **{"∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "°": r"^\circ ", "（": "(", "）": ")", "，": ",", "．": "."},
    **{
        "％": r"\%",
        "｛": r"\{",
        "｝": r"\}",
        "［": "[",
        "］": "]",
        "／": "/",
        "：": ":",
        "ℝ": r"\mathbb{R}",
        "＄": r"\$",
    },
    **{"‘": "'", "’": "'", "“": '"', "”": '"'},
    **{"½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"},
    **{"⅕": r"\frac{1}{5}", "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}"},
}
_TRANSLATION = str.maketrans(_SIGNS)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_ROOT = re.compile(r"([√∛])\s*(?:\(([^()]{1,40})\)|([0-9]+(?:\.[0-9]+)?|[A-Za-z]))")
_SIZES = "tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge"
_DRESSED = r"\\(?:(?:text)?color\s*\{[A-Za-z0-9!]{1,40}\}|u(?:nder)?line(?=\s*\{))\s*"
_LOOKS = (
    (re.compile(rf"(?<![0-9A-Za-z^_]){_DRESSED}\{{([^{{}}]*)\}}|(?<=[0-9]){_DRESSED}\{{([0-9.]+)\}}"), r"\1\2"),
    (re.compile(rf"(?<![0-9A-Za-z^_]){_DRESSED}\{{([^{{}}]*)\}}"), r"\1"),
    (re.compile(_DRESSED), ""),
    (re.compile(rf"\\(?:bf|it|rm|sf|tt|bfseries|itshape|{_SIZES})(?![A-Za-z])\s*(?!\{{)"), ""),
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?=[()\[\]|.\\/])"), ""),
    (re.compile(r"\\(?:displaystyle|textstyle|limits|nolimits|phantom\{\})(?![A-Za-z])\s*"), ""),
    (re.compile(r"\\!|(?<!\\)\\(?=\s)"), ""),
    (re.compile(r"\\[;:>]|\\(?:thinspace|enspace|quad|qquad)(?![A-Za-z])|~"), " "),
    (re.compile(r"\\(?:[dtc]frac)(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:textbf|textit|textrm|textsf|textnormal|mbox|mathrm|mathit|mathsf|operatorname|emph)\s*\{"), r"\\text{"),
    (re.compile(r"\\(?:mathbf|boldsymbol|bm|bf|rm)\s*\{([^{}]{0,80})\}"), r"\1"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\le(?![A-Za-z])|\\leqslant(?![A-Za-z])"), r"\\leq "),
    (re.compile(r"\\ge(?![A-Za-z])|\\geqslant(?![A-Za-z])"), r"\\geq "),
    (re.compile(r"\\ne(?![A-Za-z])"), r"\\neq "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\degree(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])"), r"^\\circ"),
    (re.compile(r"\\langle(?![A-Za-z])([^<>|]{1,200}?,[^<>|]{1,200}?)\\rangle(?![A-Za-z])"), r"(\1)"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
)  # fmt: skip
_WRITTEN = (
    (re.compile(r"([-+]?[0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]{1,3})"), r"\1\\times 10^{\2}"),
    (
        re.compile(
            r"([-+]?[0-9]*\.[0-9]{0,20}?)(?!00)([1-9]|[0-9]{2,8}?)(?:\2){2,}(?:\.\.\.|…|\\[lc]?dots(?![A-Za-z]))"
        ),
        r"\1\\overline{\2}",
    ),
)
"""Whole texts: 1e100, and a decimal whose last digits are written three times before its dots."""
_DRESS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
_SCALES: dict[str, int | Fraction] = {
    **{"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12},
    **{"half": Fraction(1, 2), "halve": Fraction(1, 2), "third": Fraction(1, 3), "fifth": Fraction(1, 5)},
    **{"sixth": Fraction(1, 6), "eighth": Fraction(1, 8), "tenth": Fraction(1, 10), "hundredth": Fraction(1, 100)},
    **{"thousandth": Fraction(1, 1000), "millionth": Fraction(1, 10**6)},
}
SCALE_WORDS = "|".join(_SCALES)
"""Words after a number that multiply it."""
_SCALED = re.compile(
    r"(?<![\w.,/^])(?<![/^0-9]\s)(?<!\\div\s)([0-9][0-9,]*(?:\.[0-9]+)?)((?:\s|\\[,; ]|\\text\s*\{)*)"
    rf"(hundred\s+(?=(?:thousand|[mbtr]+illion)s?\b))?({SCALE_WORDS})s?\b"
)
"""A plain number that is scaled as a whole: not the end of a fraction, power or mixed number."""
_WORD = r"\\text\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|[,;、]"
JOINT_WORD = re.compile(_WORD)
"""What joins the members of a list."""
JOINT = rf"(?:{_WORD}|[\s$&]|\\[,;:!()\[\] ]|\\q?quad(?![A-Za-z]))"
_SPAN = r"(?<!\\)\$[^$]+\$|\\\((?:(?!\\\)).)+\\\)"
_MEMBER = rf"(?:{_SPAN}|[-+]?[0-9]+(?:\.[0-9]+)?)"
_SPANS = re.compile(rf"{_MEMBER}(?:\s*(?:{_WORD})\s*{_MEMBER})*")
_BOXES = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{(?P<inside>.*)\}", re.DOTALL)


def plain(text: str) -> str:
    r"""Return ``text`` in plain notation.

    >>> plain("$2√3$."), plain("–５"), plain(r"\dfrac12")
    ('2\\sqrt{3}', '-5', '\\frac12')
    """
    text = text.strip()
    if len(text) > LONGEST:
        return text
    text = re.sub(r"\s+", " ", text)
    if not text.isascii():
        text = ascii_signs(text)
    text = bare(_list_of_spans(text))
    if _SCALED.search(text) is not None:
        text = _SCALED.sub(_scaled, text)
    if "\\" in text or "~" in text or "{" in text:
        text = text.replace(r"\text{}", "")
        for pattern, replacement in _LOOKS:
            text = pattern.sub(replacement, text)
        text = bare(text)
    for pattern, replacement in _WRITTEN:
        if (match := pattern.fullmatch(text)) is not None:
            text = match.expand(replacement)
    return text


def _list_of_spans(text: str) -> str:
    """Return the list of which each member is mathematics between delimiters of its own: ``5 or 9`` of ``$5$ or $9$``."""
    listed = text.rstrip(".")
    if text.count("$") + text.count(r"\(") < 2 or _SPANS.fullmatch(listed) is None:
        return text
    ends = [(match.start(), match.end()) for match in re.finditer(_MEMBER, listed)]
    joints = [listed[end:start].strip() for (_, end), (start, _) in pairwise(ends)]
    members = [bare(listed[start:end]) for start, end in ends]
    words = [f" {joint} " if joint[-1:].isalpha() or joint.startswith("\\") else ", " for joint in joints]
    return "".join(part for pair in zip(members, [*words, ""], strict=True) for part in pair)


def _scaled(match: re.Match[str]) -> str:
    value = Fraction(match[1].replace(",", "")) * _SCALES[match[4]] * (100 if match[3] else 1)
    written = f"{value.numerator}" if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    return written + (r"\text{" if r"\text" in match[2] else "")


def ascii_signs(text: str) -> str:
    text = _ROOT.sub(_root, text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda match: f"^{{{match[0].translate(_RAISED)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda match: f"_{{{match[0].translate(_LOWERED)}}}", text)
    return "".join(map(_digit, text.translate(_TRANSLATION)))


def _root(match: re.Match[str]) -> str:
    index = "[3]" if match[1] == "∛" else ""
    return rf"\sqrt{index}{{{match[2] or match[3]}}}"


def _digit(character: str) -> str:
    if character.isascii():
        return character
    value = unicodedata.decimal(character, None)
    return character if value is None else str(value)


def bare(text: str) -> str:
    """Strip mathematics delimiters, emphasis and a full stop.

    >>> bare("**$5$**.")
    '5'
    """
    for _ in range(6):
        before = text
        text = _without_end(text)
        for opening, closing in _DRESS:
            inside = text[len(opening) : -len(closing)]
            if (
                len(text) > 2 * len(opening)
                and text.startswith(opening)
                and text.endswith(closing)
                and opening not in inside.replace("\\$", "")
            ):
                text = inside.strip()
        box = _BOXES.fullmatch(text)
        if box is not None and balanced(box["inside"]):
            text = box["inside"]
        elif text.startswith("{") and text.endswith("}") and balanced(text[1:-1]):
            text = text[1:-1]
        if text == before:
            break
    return text.strip()


def _without_end(text: str) -> str:
    while True:
        before, text = text, text.strip().rstrip(",;")
        text = text.removesuffix("\\\\")
        text = text if text.endswith("..") else text.removesuffix(".")
        if text == before:
            return text


def last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


def balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0


_OPENING, _CLOSING = ("(", "[", "{", r"\{"), (")", "]", "}", r"\}")
_PIECE = re.compile(r"\\begin\{[a-z]*matrix\}|\\end\{[a-z]*matrix\}|\\[A-Za-z]+|\\.|[()\[\]{},;]", re.DOTALL)


def split(text: str) -> list[str]:
    """Split ``text`` at commas and semicolons outside brackets.

    >>> split("(1,2), [3,4)")
    ['(1,2)', '[3,4)']
    """
    if "," not in text and ";" not in text:
        return [text.strip()]
    parts, start, depth = list[str](), 0, 0
    for match in _PIECE.finditer(text):
        piece = match[0]
        if piece in _OPENING or piece.startswith(r"\begin{"):
            depth += 1
        elif piece in _CLOSING or piece.startswith(r"\end{"):
            depth -= 1
        elif depth <= 0 and piece in (",", ";"):
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]
