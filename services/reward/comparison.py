"""The program of one matcher process: asked about pairs of answers, it says whether they are the same mathematics.

::

    question   {"reference": "\\\\frac{1}{2}", "answer": "0.5"}
    answer     {"status": "ok", "equal": true, "detail": ""}

It is a process of its own because the computer algebra behind ``math-verify`` can run for ever or take all memory on what a
model writes: whoever started it kills it when it is late (so math-verify's own deadlines, which are signals, are off). This
is the only file that knows ``math-verify``; it knows neither messages nor settings.
"""

import contextlib
import logging
import re
import sys
from functools import lru_cache
from itertools import product
from typing import Any

from services.reward import answering, latex_parser

LONGEST_PROSE = 4_000
"""Of a longer completion only its end is read, from the beginning of a line, in characters."""
LONGEST_FORMULA = 1_000
"""A longer formula is not read, in characters: no reference is so long, and reading one takes minutes."""
_DEEPEST = 16
"""Mathematics nested deeper is not read: the parser's time grows exponentially with the depth, to minutes at 20."""
_MEMORY_BYTES = 2 * 1024**3
_MATHEMATICS = re.compile(r"(?<!\\)(?:\$|\\\(|\\\[)|\\boxed|\\begin\{(?:equation|align|math)")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}[,.:;]?\s+[A-Za-z]+(?![A-Za-z{])|\n")
_WARM_UP = (
    (r"\frac{1}{2}", "0.5"),
    ("(1,2]", "[1,2]"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"50\%", "the answer is 1/2"),
    (r"x^2+5x+6", "(x+2)(x+3)"),
    (r"\{1,2,-3\}", r"\{-3, 2, 1\}"),
    (r"[1,\infty)", r"\left[1, +\infty\right)"),
    (r"\begin{pmatrix}1&0\\1&2\end{pmatrix}", r"\begin{bmatrix} 1 & 0 \\ 1 & 2 \end{bmatrix}"),
    (r"2\pi", r"\pi\cdot 2"),
)
"""Pairs of the usual forms: what the parser learns of the grammar from them it need not learn from the first answers."""


def is_prose(text: str) -> bool:
    """Whether ``text`` is language with mathematics in it, rather than one bare formula."""
    return _MATHEMATICS.search(text) is not None or _PROSE.search(text) is not None


def read(text: str) -> list[Any]:
    """Return what math-verify understands of ``text``: expressions of sympy, and the text that it read them from."""
    from math_verify import parse

    found: list[Any] = []
    prose = is_prose(text)
    text = _end(text) if prose else text
    if depth(text) > _DEEPEST:
        raise ValueError(f"nested deeper than {_DEEPEST}")
    if prose:
        found = parse(text, parsing_timeout=None, raise_on_error=True)
    if found or len(text) > LONGEST_FORMULA:
        return found
    return list(parse(f"${text}$", parsing_timeout=None, raise_on_error=True))


def depth(text: str) -> int:
    """Return how deep brackets of any kind are nested in ``text``, closed or not.

    >>> depth(r"\\frac{1}{(2+x)}")
    2
    """
    deepest = level = 0
    for character in text:
        level += (character in "([{") - (character in ")]}")
        level = max(level, 0)
        deepest = max(deepest, level)
    return deepest


def _end(text: str) -> str:
    if len(text) <= LONGEST_PROSE:
        return text
    tail = text[-LONGEST_PROSE:]
    return tail[tail.find("\n") + 1 :]


def compare(reference: str, answer: str) -> dict[str, object]:
    """Return the verdict on ``answer``: its status, whether it equals ``reference``, and why not."""
    try:
        candidates = read(answer)
    except (MemoryError, RecursionError) as error:
        return _verdict("crashed", False, f"reading it ended in {type(error).__name__}")
    except Exception as error:  # noqa: BLE001 (the edge of the process: any complaint of the library is a verdict)
        return _verdict("wrong_format", False, f"cannot be read: {type(error).__name__}")
    if not candidates:
        return _verdict("wrong_format", False, "no mathematics found")
    try:
        return _verdict("ok", any(_same(*pair) for pair in product(_read_reference(reference), candidates)), "")
    except (MemoryError, RecursionError) as error:
        return _verdict("crashed", False, f"comparing it ended in {type(error).__name__}")


@lru_cache(maxsize=256)
def _read_reference(text: str) -> tuple[Any, ...]:
    """Return what a reference may mean, kept for the next samples of its group; the text itself where it cannot be read."""
    with contextlib.suppress(Exception):
        return tuple(read(text)) or (text,)
    return (text,)


def _same(reference: Any, candidate: Any) -> bool:
    from math_verify import verify

    try:
        return bool(verify(reference, candidate, timeout_seconds=None, raise_on_error=True))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 (what sympy cannot compare is not shown to be equal)
        return False


def _verdict(status: str, equal: bool, detail: str) -> dict[str, object]:
    return {"status": status, "equal": equal, "detail": detail}


def _prepare() -> answering.Answerer:
    """Load math-verify and everything that it loads late."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    latex_parser.predict_quickly()
    for reference, answer in _WARM_UP:
        compare(reference, answer)
    return lambda question: compare(**question)


if __name__ == "__main__":
    answering.serve(_prepare, parent=int(sys.argv[1]), memory_bytes=_MEMORY_BYTES)
