"""Only shared/bus uses Redis; each key is declared once and listed."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.shared.bus import keys, streams
from penstock.shared.bus.client.commands import Commands
from penstock.shared.bus.client.lua import SCRIPTS
from penstock.shared.bus.client.server import Server
from penstock.shared.bus.keys import DECLARED, Key
from penstock.shared.bus.streams import Stream

ROOT = Path(__file__).parents[3]
INSIDE = {name for kind in (Server, Commands) for name in vars(kind) if not name.startswith("__")} | {"_client"}
OPEN = {"close", "wait_for_ever", "wait_no_more"}
LISTING = (ROOT / "docs/reference/bus.md").read_text(encoding="utf-8")


def offences(source: str) -> list[str]:
    names_used = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                names_used += [each.name for each in names if each.name.split(".")[0] == "redis"]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "redis":
                names_used.append(module)
            case ast.Attribute(attr=name, value=receiver) if name in INSIDE - OPEN:
                if ast.unparse(receiver).rpartition(".")[2].endswith("bus"):
                    names_used.append(ast.unparse(node))
    return names_used


@pytest.mark.parametrize(
    ("source", "offending"),
    [
        ("import redis.asyncio as r", ["redis.asyncio"]),
        ("from redis import Redis", ["redis"]),
        ("await self._bus.script('admit')", ["self._bus.script"]),
        ("await parts.bus.hget(RUN, 'step')", ["parts.bus.hget"]),
        ("bus._client.get('x'); bus.call(f); bus.write(KEY, 'DEL')", ["bus._client", "bus.call", "bus.write"]),
        ("await bus.close(); await bus.read(PROMPTS); self._client.put_object(); file.write('x')", []),
    ],
)
def test_the_search_finds_what_goes_past_the_door(source: str, offending: list[str]) -> None:
    assert sorted(offences(source)) == offending


def test_nothing_outside_of_shared_bus_speaks_redis() -> None:
    files = [
        file
        for folder in ("services", "shared", "deploy", "benchmarks", "examples")
        for file in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 300
    outside = [file for file in files if not file.is_relative_to(ROOT / "shared/bus")]
    assert {str(file): each for file in outside if (each := offences(file.read_text(encoding="utf-8")))} == {}


def declarations() -> dict[str, str]:
    files = [ROOT / "shared/bus/keys.py", ROOT / "shared/bus/bus.py", *(ROOT / "shared/bus/stores").rglob("*.py")]
    for file in files:
        importlib.import_module(".".join(("penstock", *file.relative_to(ROOT).with_suffix("").parts)))
    sources = [(file.stem, file.read_text(encoding="utf-8")) for file in files]
    return {
        name: stem for stem, text in sources for name in re.findall(r'^[A-Z_]+ = key\(\s*"([^"]+)"', text, re.MULTILINE)
    }


def rows() -> list[str]:
    owners = declarations()
    declared = [DECLARED[name] for name in sorted(owners)]
    assert {each.name for each in DECLARED.values() if isinstance(each, Key)} == owners.keys()
    return [
        f"| `{each.name}` | {each.kind} | {each.lifetime} | {each.content} | `{owners[each.name]}` |"
        for each in declared if isinstance(each, Key)
    ]  # fmt: skip


def test_every_key_is_listed_in_the_documentation_with_its_type_lifetime_and_store() -> None:
    assert len(rows()) > 30
    table = LISTING.partition("| key | type | lifetime | content | module |")[2].partition("\n\n")[0]
    assert table.split("\n")[2:] == rows()


def test_every_stream_is_in_the_map_and_in_the_documentation() -> None:
    for declared in DECLARED.values():
        if isinstance(declared, Stream):
            assert f"    {declared.name}" in (streams.__doc__ or "") or f", {declared.name}" in (streams.__doc__ or "")
            assert f"`{declared.name}`" in LISTING.partition("| key |")[0]


def test_a_second_declaration_of_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one declaration of the key 'run', and there are two"):
        keys.key("run", "hash", "the run's", "again")


def calls() -> Iterator[tuple[str, set[str], bool]]:
    for file in (ROOT / "shared/bus").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(attr="script"), args=[ast.Constant(value=str(name))], keywords=given):
                    yield name, {each.arg for each in given if each.arg}, any(each.arg is None for each in given)


def test_every_call_of_a_script_gives_what_its_header_asks_and_every_script_is_called() -> None:
    declarations()
    for name, given, more in calls():
        script = SCRIPTS[name]
        asked = {each for each in script.keys if each not in DECLARED} | set(script.arguments)
        asked = {each.removesuffix("...") for each in asked}
        assert given <= asked if more else given == asked, name
    assert {name for name, _, _ in calls()} == SCRIPTS.keys()


def test_a_key_is_named_by_its_declaration_only() -> None:
    for file in (ROOT / "shared/bus").rglob("*.py"):
        named = [
            ast.unparse(node)
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "named"
        ]
        assert named == {"keys": ["self.named(named.name)"], "registry": ["Keys(run_id).named('*')"]}.get(file.stem, [])
