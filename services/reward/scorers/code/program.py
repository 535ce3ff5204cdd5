"""Find the program in a completion: its last fenced block in Python.

A fence is a line of three or more backticks or tildes, then maybe a language; the block ends at the next line of at least as
many of the same alone (CommonMark). The rules, in order:

1. blocks in another language than Python are passed over; one that names none counts as Python;
2. of those that are left the last one is the program, however many there are;
3. if the last one is not closed there is no program: a completion that was cut must not be judged by an earlier draft;
4. without any block there is no program, unless ``needs_block`` is off: then all of the text is.

Nothing here reads Python: what a model wrote is not parsed in this process.
"""

import dataclasses
import re

LANGUAGES = frozenset({"", "python", "python3", "py", "py3"})
_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([^`]*)$")


class NoProgram(Exception):
    """The completion holds no program; the message says what was expected and what was found."""


@dataclasses.dataclass(slots=True)
class _Block:
    language: str
    fence: str
    indent: int
    lines: list[str] = dataclasses.field(default_factory=list)
    closed: bool = False

    def take(self, line: str) -> None:
        """Add a line, without as much of its indentation as the fence itself has; or close the block."""
        stripped = line.strip()
        if stripped.startswith(self.fence) and not stripped.strip(self.fence[0]):
            self.closed = True
            return
        indent = len(line) - len(line.lstrip(" \t"))
        self.lines.append(line[min(indent, self.indent) :])


def program_of(text: str, *, needs_block: bool = True) -> str:
    r"""Return the program in ``text``.

    >>> program_of("So:\n```python\nprint(1)\n```\nDone.")
    'print(1)\n'

    Raises:
        NoProgram: there is none, by the rules above.
    """
    blocks = _blocks(text)
    if not blocks and not needs_block:
        return text
    ours = [block for block in blocks if block.language in LANGUAGES]
    if not ours:
        found = f"{len(blocks)} in other languages" if blocks else "none"
        raise NoProgram(f"expected a fenced block of Python, found {found}")
    if not ours[-1].closed:
        raise NoProgram("expected the last fenced block to be closed, found its end missing")
    return "".join(f"{line}\n" for line in ours[-1].lines)


def _blocks(text: str) -> list[_Block]:
    blocks: list[_Block] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        if blocks and not blocks[-1].closed:
            blocks[-1].take(line)
        elif found := _FENCE.match(line):
            indent, fence, language = found.groups()
            word = language.split(maxsplit=1)[0].lower() if language.strip() else ""
            blocks.append(_Block(word, fence, len(indent)))
    return blocks
