"""Lua scripts with named keys and arguments.

The header declares both in order, as Lua locals; ``...`` after the last name makes it a list::

    -- KEYS: stream
    -- ARGV: group consumer entries...

Keys are stream or key objects; declared ones are filled in.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TypeAlias

from penstock.shared.bus.keys import DECLARED, Keys, Named

Argument: TypeAlias = str | bytes | int | float
Given: TypeAlias = Argument | Named | Sequence[Argument] | Sequence[Named]

_DECLARATION = re.compile(r"-- (KEYS|ARGV): (.+)")
_POSITION = re.compile(r"\b(KEYS|ARGV)\b")
_LOCAL = re.compile(r"\b(?:local(?: function)?|for) ([\w, ]+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    name: str
    text: str
    digest: str
    keys: tuple[str, ...]
    arguments: tuple[str, ...]

    def bind(self, keys: Keys, given: Mapping[str, Given]) -> tuple[list[str], list[Argument]]:
        declared = {name: DECLARED[name] for name in self.keys if name in DECLARED}
        asked = [_bare(name) for name in (*self.keys, *self.arguments) if name not in declared]
        if given.keys() != set(asked):
            raise TypeError(
                f"script {self.name}: expected the names {', '.join(asked)}, found {', '.join(given) or 'none'}"
            )
        values = {**declared, **given}
        names = [keys.of(self._key(value)) for name in self.keys for value in self._values(name, values)]
        return names, [self._argument(value) for name in self.arguments for value in self._values(name, values)]

    def _values(self, name: str, values: Mapping[str, Given]) -> Sequence[Argument | Named]:
        value = values[_bare(name)]
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            if name.endswith("..."):
                return value
        elif not name.endswith("..."):
            return (value,)
        raise TypeError(f"script {self.name}: expected a list as {name} only if it ends in ..., found {value!r:.100}")

    def _key(self, value: Argument | Named) -> Named:
        if isinstance(value, (str, bytes, int, float)):
            raise TypeError(f"script {self.name}: expected a key or a stream, found {value!r:.100}")
        return value

    def _argument(self, value: Argument | Named) -> Argument:
        if not isinstance(value, (str, bytes, int, float)):
            raise TypeError(
                f"script {self.name}: expected text, bytes or a number as an argument, found {value!r:.100}"
            )
        return value


def parse(name: str, source: str) -> Script:
    """Parse a script. Raises ValueError: the header does not declare exactly the names used, or the script uses a
    position.
    """
    tables: dict[str, list[str]] = {"KEYS": [], "ARGV": []}
    for table, words in _DECLARATION.findall(source):
        tables[table] += words.split()
    names = [_bare(each) for table in tables.values() for each in table]
    code = re.sub(r"--.*", "", source)
    wrong = [each for each in names if re.search(rf"\b{re.escape(each)}\b", code) is None]
    wrong += [each for table in tables.values() for each in table[:-1] if each.endswith("...")]
    wrong += [each for words in _LOCAL.findall(code) for each in re.split(r"[ ,]+", words) if each in names]
    wrong += [each for each in names if names.count(each) > 1 or not each.isidentifier()]
    wrong += _POSITION.findall(code)
    if wrong or not tables["KEYS"]:
        raise ValueError(
            f"script {name}: expected a header that declares each key and argument once, a list only as the last one, each used in the "
            f"script by its name and not shadowed; wrong: {', '.join(sorted(set(wrong))) or 'no keys'}"
        )
    text = _DECLARATION.sub(lambda line: _locals(line[1], line[2].split(), tables[line[1]]), source)
    digest = hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 (Redis names scripts so)
    return Script(name, text, digest, tuple(tables["KEYS"]), tuple(tables["ARGV"]))


def _bare(name: str) -> str:
    return name.removesuffix("...")


def _locals(table: str, names: Sequence[str], declared: Sequence[str]) -> str:
    """Return the Lua statements for one header line.

    >>> _locals("KEYS", ["input", "output"], ["input", "output"])
    'local input, output = KEYS[1], KEYS[2]'
    >>> _locals("ARGV", ["entries..."], ["group", "entries..."])
    'local entries = {} for i = 2, #ARGV do entries[i - 1] = ARGV[i] end'
    """
    single = [name for name in names if not name.endswith("...")]
    places = [f"{table}[{declared.index(name) + 1}]" for name in single]
    statements = [f"local {', '.join(single)} = {', '.join(places)}"] if single else []
    if len(single) < len(names):
        rest, first = _bare(names[-1]), len(declared)
        statements.append(f"local {rest} = {{}} for i = {first}, #{table} do {rest}[i - {first - 1}] = {table}[i] end")
    return " ".join(statements)


SCRIPTS = {
    path.name.removesuffix(".lua"): parse(path.name.removesuffix(".lua"), path.read_text(encoding="utf-8"))
    for path in resources.files("penstock.shared.bus").joinpath("scripts").iterdir()
    if path.name.endswith(".lua")
}
