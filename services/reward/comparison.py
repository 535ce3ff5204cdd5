"""The program of one matcher process: read pairs of answers, say whether they are the same mathematics.

::

    standard input   {"reference": "\\\\frac{1}{2}", "answer": "0.5"}          one JSON object a line
    standard output  {"ready": true}                                      once, when everything slow is loaded
                     {"status": "ok", "equal": true, "detail": ""}        one for each line read

It is started by its path, as a process of its own, because the computer algebra behind ``math-verify`` can run for ever
or take all memory on what a model writes: whoever started it kills it when it is late (so math-verify's own deadlines,
which are signals, are off), and the kernel kills it when whoever started it is gone. This is the only file that knows
``math-verify``, and it knows nothing of Penstock.
"""

import contextlib
import ctypes
import json
import logging
import os
import re
import resource
import signal
import sys
from itertools import product
from typing import Any

LONGEST_PROSE = 4_000
"""Of a longer completion only its end is read, from the beginning of a line, in characters."""
LONGEST_FORMULA = 1_000
"""A longer formula is not read, in characters: no reference is so long, and reading one takes minutes."""
_MEMORY_BYTES = 2 * 1024**3
_MATHEMATICS = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed|\\begin\{(?:equation|align|math)")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}[,.:;]?\s+[A-Za-z]+(?![A-Za-z{])|\n")
_WARM_UP = (
    (r"\frac{1}{2}", "0.5"),
    ("(1,2]", "[1,2]"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"50\%", "the answer is 1/2"),
)


def is_prose(text: str) -> bool:
    """Whether ``text`` is language with mathematics in it, rather than one bare formula."""
    return _MATHEMATICS.search(text) is not None or _PROSE.search(text) is not None


def read(text: str) -> list[Any]:
    """Return what math-verify understands of ``text``: expressions of sympy, and the text that it read them from."""
    from math_verify import parse

    found: list[Any] = []
    if is_prose(text):
        text = _end(text)
        found = parse(text, parsing_timeout=None, raise_on_error=True)
    if found or len(text) > LONGEST_FORMULA:
        return found
    return list(parse(f"${text}$", parsing_timeout=None, raise_on_error=True))


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
    references: list[Any] = [reference]
    with contextlib.suppress(Exception):
        references = read(reference) or references
    try:
        return _verdict("ok", any(_same(*pair) for pair in product(references, candidates)), "")
    except (MemoryError, RecursionError) as error:
        return _verdict("crashed", False, f"comparing it ended in {type(error).__name__}")


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


def _confine(parent: int) -> None:
    """Die with the parent, leave Ctrl-C to it, and never take the machine's memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(0)


def main() -> None:
    """Answer until standard input ends."""
    _confine(int(sys.argv[1]))
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not look like a verdict
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for reference, answer in _WARM_UP:
        compare(reference, answer)
    print(json.dumps({"ready": True}), file=output, flush=True)
    for line in sys.stdin.buffer:
        print(json.dumps(compare(**json.loads(line))), file=output, flush=True)


if __name__ == "__main__":
    main()
