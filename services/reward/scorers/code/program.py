"""Find the program among a completion's fenced blocks (CommonMark fences), by label and content.

1. No programs: blocks in another language, of literals (``4``: an output), or that begin with a prompt (``>>> f(2)``);
   without a language also those without a call, an assignment or a definition, and where one is labelled as Python,
   all, unless they define what is under test or what the labelled ones only use.
2. The program is the last that defines the function under test, or else the last but examples, which define nothing and
   use what an earlier block defines (``print(f(2))``).
3. If the last program is not closed, no other is chosen: a truncated completion is not scored by an earlier draft.
4. Without a block there is no program, or the whole text if ``needs_block`` is off.
"""

import dataclasses
import re

LANGUAGES = frozenset({"", "python", "python3", "py", "py3"})
_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([^`]*)$")
_MOST_INDENT = 3
"""Spaces before a closing fence, beyond those of the opening."""
_WORKS = re.compile(r"[\w\])][ \t]*\(|(?<![=!<>])=(?!=)|^[ \t]*(?:def|class|import|from)[ \t]", re.MULTILINE)
_LITERALS = re.compile(r"(?:[\s\d\[\](){},.:+-]|True|False|None|'[^'\n]*'|\"[^\"\n]*\")*")
_OUTPUT = re.compile(
    r"\b(?:in|out)puts?\b|\b(?:results?|prints?|printed|returns?|returned|gives|displays?)\b", re.IGNORECASE
)
_DEFINED = re.compile(r"^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_BOUND = re.compile(
    r"^[ \t]*((?:async[ \t]+)?(?:def|class)[ \t]+)?(\w+)[ \t]*(\(|:[^=\n]*=(?!=)|=(?!=))(?:[ \t]*(lambda)\b)?",
    re.MULTILINE,
)
_NO_CODE = re.compile(
    r"#[^\n]*|(?<![fF\w])(?:\'\'\'.*?(?:\'\'\'|\Z)|\"\"\".*?(?:\"\"\"|\Z)|'(?:\\.|[^'\\\n])*'?|\"(?:\\.|[^\"\\\n])*\"?)",
    re.DOTALL,
)
"""Comments and strings, also unclosed ones, so that no text is searched twice."""
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t][^\n]*", re.MULTILINE)
_NAME = re.compile(r"(?<![\w.])[^\W\d]\w*")


class NoProgram(Exception):
    """The completion contains no program."""


@dataclasses.dataclass(slots=True)
class _Block:
    language: str
    fence: str
    indent: str
    introduction: str
    lines: list[str] = dataclasses.field(default_factory=list)
    closed: bool = False

    def take(self, line: str) -> None:
        """Add a line, dedented by at most the fence's indentation, or close the block."""
        stripped = line.strip()
        indent = line[: len(line) - len(line.lstrip(" \t"))]
        further = len(indent.expandtabs(4)) - len(self.indent.expandtabs(4))
        if stripped.startswith(self.fence) and not stripped.strip(self.fence[0]) and further <= _MOST_INDENT:
            self.closed = True
            return
        self.lines.append(line[min(len(indent), len(self.indent)) :])

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)

    @property
    def is_program(self) -> bool:
        text = self.text
        if self.language not in LANGUAGES or text.lstrip().startswith(">>>"):
            return False
        return not _LITERALS.fullmatch(text) if self.language else bool(_WORKS.search(text))


def program_of(text: str, *, needs_block: bool = True, function: str = "") -> str:
    r"""Return the program in ``text``; it may define ``function``.

    >>> program_of("So:\n```python\nprint(1)\n```\nDone.")
    'print(1)\n'

    Raises:
        NoProgram: the completion has no program.
    """
    blocks = _blocks(text)
    if not blocks and not needs_block:
        return text
    programs = [block for block in blocks if block.is_program]
    likely = [block for block in programs if block.language or not _OUTPUT.search(block.introduction)]
    labelled = [block for block in likely if block.language]
    is_elsewhere = _defined_elsewhere(labelled, likely, function)
    programs = (labelled if not is_elsewhere else likely) or likely or programs
    if not programs:
        others = f"{len(blocks)} in other languages, or of outputs" if blocks else "none"
        raise NoProgram(f"expected a fenced block of Python, found {others}")
    if not blocks[-1].closed and (blocks[-1].is_program or blocks[-1].language in LANGUAGES - {""}):
        raise NoProgram("expected the last fenced block to be closed, found its end missing")
    return _chosen([block.text for block in programs], function)


def _defined_elsewhere(labelled: list[_Block], likely: list[_Block], function: str) -> bool:
    """Whether the program is a block without a label, and those with one are examples of its use."""
    if function:
        ranks = [_rank(block.text, function) for block in labelled]
        return max(ranks, default=0) < 2 and any(_rank(block.text, function) == 2 for block in likely)
    own = set().union(*(_DEFINED.findall(block.text) for block in labelled))
    used = {name for block in labelled for name in _NAME.findall(_NO_CODE.sub("", block.text))}
    return not own and any(used & {*_DEFINED.findall(block.text)} for block in likely)


def _chosen(programs: list[str], function: str) -> str:
    if function and (best := max(_rank(program, function) for program in programs)):
        return [program for program in programs if _rank(program, function) == best][-1]
    defined = [{*_DEFINED.findall(program)} for program in programs]
    for place in range(len(programs) - 1, 0, -1):
        imported = " ".join(_IMPORT.findall(programs[place]))
        used = {*_NAME.findall(_NO_CODE.sub("", programs[place]))} - {*_NAME.findall(imported)}
        if defined[place] or not used & set().union(*defined[:place]):
            return programs[place]
    return programs[0]


def _rank(program: str, name: str) -> int:
    """Return 2 if the program defines ``name`` as a function, class or method, 1 if as another variable, or else 0."""
    ranks = (
        2 if match[1] or match[4] else 1
        for match in _BOUND.finditer(program)
        if match[2] == name and (match[1] or match[3] != "(")
    )
    return max(ranks, default=0)


def last_block(text: str) -> str:
    """Return what is between the last two lines with a fence, as LiveCodeBench does. Raises NoProgram."""
    lines = text.split("\n")
    fences = [place for place, line in enumerate(lines) if "```" in line]
    if len(fences) < 2:
        raise NoProgram("expected two lines with ```, as LiveCodeBench reads them, found fewer")
    return "\n".join(lines[fences[-2] + 1 : fences[-1]])


def _blocks(text: str) -> list[_Block]:
    blocks: list[_Block] = []
    introduction = ""
    for line in text.replace("\r\n", "\n").split("\n"):
        if blocks and not blocks[-1].closed:
            blocks[-1].take(line)
        elif opening := _FENCE.match(line):
            indent, fence, language = opening.groups()
            word = language.split(maxsplit=1)[0].lower() if language.strip() else ""
            blocks.append(_Block(word, fence, indent, introduction))
            introduction = ""
        elif line.strip():
            introduction = line
    return blocks
