r"""Cut long texts, and escape characters that control a terminal, or reorder its text, as ``\u001b`` (valid in JSON).

C0 and C1 except newline and tab, DEL, bidirectional and invisible formatting, line and paragraph separators, tags, and
surrogates.
"""

import re

LONGEST = 20_000
"""Characters of a log value or an error's message."""
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e0fff]"
)


def cut(text: str, longest: int = LONGEST) -> str:
    """Return ``text`` without its middle if it is longer than ``longest`` characters.

    >>> cut("abcdefgh", 4)
    'ab… (4 characters left out) …gh'
    """
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}… ({len(text) - 2 * half} characters left out) …{text[-half:]}"


def escaped(text: str) -> str:
    r"""Return ``text`` safe for a terminal.

    >>> escaped("a\x1b[2Jb\u202ec"), escaped("two\nlines")
    ('a\\u001b[2Jb\\u202ec', 'two\nlines')
    """
    return _STEERING.sub(_escape, text)


def escaped_line(text: str) -> str:
    r"""Return ``text`` as one line safe for a terminal.

    >>> escaped_line("a\r\nb")
    'a\\u000d\\nb'
    """
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))
