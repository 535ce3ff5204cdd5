"""Find the program in a completion: its last fenced Python block (CommonMark fences).

1. Blocks in another language are skipped; a block without a language counts as Python.
2. The last remaining block is the program.
3. If it is not closed there is no program: a truncated completion is not scored by an earlier draft.
4. Without a block there is no program, or the whole text if ``needs_block`` is off.
"""

import dataclasses
import re

LANGUAGES = frozenset({"", "python", "python3", "py", "py3"})
_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([^`]*)$")


class NoProgram(Exception):
    """The completion contains no program."""


@dataclasses.dataclass(slots=True)
class _Block:
    language: str
    fence: str
    indent: int
    lines: list[str] = dataclasses.field(default_factory=list)
    closed: bool = False

    def take(self, line: str) -> None:
        """Add a line, dedented by at most the fence's indentation, or close the block."""
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
        NoProgram: the completion has no program.
    """
    blocks = _blocks(text)
    if not blocks and not needs_block:
        return text
    ours = [block for block in blocks if block.language in LANGUAGES]
    if not ours:
        others = f"{len(blocks)} in other languages" if blocks else "none"
        raise NoProgram(f"expected a fenced block of Python, found {others}")
    if not ours[-1].closed:
        raise NoProgram("expected the last fenced block to be closed, found its end missing")
    return "".join(f"{line}\n" for line in ours[-1].lines)


def _blocks(text: str) -> list[_Block]:
    blocks: list[_Block] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        if blocks and not blocks[-1].closed:
            blocks[-1].take(line)
        elif opening := _FENCE.match(line):
            indent, fence, language = opening.groups()
            word = language.split(maxsplit=1)[0].lower() if language.strip() else ""
            blocks.append(_Block(word, fence, len(indent)))
    return blocks
