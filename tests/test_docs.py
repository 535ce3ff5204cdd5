"""Laws of the documents and of names."""

import ast
import doctest
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from penstock.services.cli.__main__ import app
from penstock.services.cli.settings_help import entries
from penstock.shared.settings import loads

ROOT = Path(__file__).parent.parent
KINDS = ("Counter", "Gauge", "Histogram", "Info", "Summary")
GENERATED = {"docs/models.md"}
PAGES = [
    path
    for path in (
        *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "benchmarks/results/index.md",
    )
    if str(path.relative_to(ROOT)) not in GENERATED
]
EXAMPLES = [*sorted((ROOT / "examples").glob("*/README.md"))]
MAX_COLUMNS = 120
IDIOMS = {
    r"^#+ (?:What|Who) .*": "a noun phrase or an imperative verb as a heading",
    r"nobody|everybody|somebody|whoever": "the process, user or role",
    r"(?:lies|lie|stands|stand) (?:in|on|at|aside|beside|behind|there|with|still|under|by)": "'is', 'is stored'",
    r"(?:goes|go|went|gone|going) on": "'continues'",
    r"(?:is|are|was|were|be|been) told": "'is notified', 'is reported'",
    r"so many|so long(?! as)|so often": "the number or the timeout",
    r"(?:is|are) (?-i:none)|(?-i:none) is": "'does not exist', 'is not set'",
    r"passed over|left out": "'skipped', 'dropped'",
    r"there is nothing to|as many now": "a plain sentence",
    r"anew|again and again": "'again', 'repeatedly'",
    r"expected .{1,60}, found": "a plain sentence",
    r"÷": "'Penstock vs. TRL: 3.9× (101 vs. 26 samples/s)'",
}
"""Idioms, with what to write instead."""
CODE = ("services", "shared", "penstock", "deploy", "benchmarks", "examples", "tests", ".ci")
EMPTY_NAMES = {"found", "one", "everything", "wanted", "what", "them", "it", "this", "that"}
"""Names of variables and parameters that do not say what they hold."""


@cache
def prose(page: Path) -> tuple[str, ...]:
    lines, fenced = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = line.lstrip().startswith("```")
        lines.append("" if fenced or fence else line)
        fenced ^= fence
    return tuple(lines)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=name_of)
def test_prose_is_wrapped(page: Path) -> None:
    exempt = ("|", "![")
    lines = enumerate(prose(page), 1)
    long = [number for number, line in lines if len(line) > MAX_COLUMNS and not line.startswith(exempt)]
    assert long == [], f"expected prose of at most {MAX_COLUMNS} columns in {name_of(page)}: wrap these lines"


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=name_of)
def test_prose_is_free_of_idioms(page: Path) -> None:
    assert list(idioms(page)) == []


@pytest.mark.parametrize("top", ["services", "shared", "penstock", "deploy", "benchmarks", "examples"])
def test_docstrings_are_free_of_idioms(top: str) -> None:
    assert [hit for path in sorted((ROOT / top).rglob("*.py")) for hit in idioms_of_docstrings(path)] == []


def idioms_of_docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text)), lineno=line):
                yield from idioms_in(text, name_of(path), line)


def idioms(page: Path) -> Iterator[str]:
    yield from idioms_in("\n".join(prose(page)), name_of(page), 1)


def idioms_in(text: str, name: str, first_line: int) -> Iterator[str]:
    """Yield each idiom and its replacement. Code, doctests and quoted messages are exempt."""
    text = re.sub(r"^ *>>> (?:.+\n?)+|`+[^`]*`+|\"[^\"\n]*\"", blank, text, flags=re.MULTILINE)
    for idiom, better in IDIOMS.items():
        pattern = rf"(?<!\w)(?:{idiom})(?!\w)".replace(" ", r"[ \n]+")
        for hit in re.finditer(pattern, text, re.IGNORECASE | re.MULTILINE):
            line = text.count("\n", 0, hit.start()) + first_line
            yield f"{name}:{line}: '{' '.join(hit[0].split())}': write {better}"


def blank(hit: re.Match[str]) -> str:
    return re.sub(r"[^\n]", ".", hit[0])


@pytest.mark.parametrize(
    "idiom",
    ["nobody has to be told", "the run goes\non", "none is left", "so many tokens", "a row is passed over", "2 ÷ 1"],
)
def test_an_idiom_is_noticed(idiom: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"A sentence.\n\n```\n{idiom}\n```\n\n`{idiom}` and {idiom}.\n", encoding="utf-8")
    line = 7 + 2 * idiom.count("\n")  # fenced and backquoted ones are exempt
    assert {said.split(": ")[0] for said in idioms(page)} == {f"page.md:{line}"}
    module = tmp_path / "module.py"
    module.write_text(f'X = 1\n"""Idioms are {idiom}, `{idiom}`."""\n', encoding="utf-8")
    assert {said.split(": ")[0] for said in idioms_of_docstrings(module)} == {"module.py:2"}


@pytest.mark.parametrize("top", CODE)
def test_variables_and_parameters_say_what_they_hold(top: str) -> None:
    assert [
        hit for path in sorted((ROOT / top).rglob("*.py")) for hit in empty_names(path.read_text(), name_of(path))
    ] == []


def empty_names(source: str, name: str) -> Iterator[str]:
    tree = ast.parse(source)
    methods = {id(node) for kind in ast.walk(tree) if isinstance(kind, ast.ClassDef) for node in kind.body}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=bound, ctx=ast.Store()) | ast.arg(arg=bound) | ast.alias(asname=str(bound)):
                pass
            case ast.ExceptHandler(name=str(bound)) | ast.MatchAs(name=str(bound)) | ast.MatchStar(name=str(bound)):
                pass
            case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) if id(node) not in methods:
                pass
            case _:
                continue
        if bound in EMPTY_NAMES:
            yield f"{name}:{node.lineno}: {bound}"


@pytest.mark.parametrize(
    "source",
    [
        "one = 1", "def f(*, one): ...", "def one(): ...", "[1 for one, n in x]", "lambda one: 1", "import a as one",
        "with x as one: ...", "try: ...\nexcept X as one: ...", "(one := 1)",
    ],
)  # fmt: skip
def test_a_name_that_says_nothing_is_noticed(source: str) -> None:
    assert [hit.rpartition(" ")[2] for hit in empty_names(source, "module.py")] == ["one"]
    assert list(empty_names("class C:\n    def one(self): ...\nprint(one, x.one, f(one=1))", "module.py")) == []


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES, ROOT / "docs/models.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", "\n".join(prose(page))):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            dead.append(target)
    assert dead == []


@cache
def anchors(page: Path) -> set[str]:
    headings = [line.lstrip("#").strip() for line in prose(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = "\n".join(prose(page))
    named = set(re.findall(r"`((?:services|shared|tests|benchmarks|deploy|config|examples)/[\w./-]+)`", text))
    assert [path for path in sorted(named) if not (ROOT / path.rstrip("/")).exists()] == []
    modules = set(re.findall(r"`(?:[\w]+/)*(\w+\.(?:py|lua))`", text)) - {"my_scorers.py", "core_algos.py"}
    assert sorted(modules - files()) == []


@cache
def files() -> set[str]:
    tops = ("services", "shared", "tests", "benchmarks", "deploy", "examples")
    return {path.name for top in tops for path in (ROOT / top).rglob("*.*")}


def test_every_result_is_in_the_index_and_says_what_it_measured() -> None:
    index = (ROOT / "benchmarks/results/index.md").read_text(encoding="utf-8")
    results = sorted((ROOT / "benchmarks/results").glob("*.json"))
    assert [path.name for path in results if f"({path.name})" not in index] == []
    keys = {"date", "commit", "hardware"}
    assert [path.name for path in results if not keys <= json.loads(path.read_text(encoding="utf-8")).keys()] == []


def test_the_life_of_a_group_names_code_that_exists() -> None:
    text = (ROOT / "docs/life-of-a-group.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", text))
    assert len(named) > 20
    defined = {pair for top in ("services", "shared") for path in (ROOT / top).rglob("*.py") for pair in methods(path)}
    assert sorted(named - defined) == []


def methods(path: Path) -> set[tuple[str, str]]:
    classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {(kind.name, node.name) for kind in classes for node in kind.body if isinstance(node, functions)}


def test_every_metric_that_the_documents_name_is_declared() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in documents for name in re.findall(r"`(penstock_[a-z_]+)`", page.read_text())}
    declared = {name for top in ("services", "shared") for path in (ROOT / top).rglob("*.py") for name in metrics(path)}
    assert named, "expected the documents to name metrics"
    assert named - declared == set()


def metrics(path: Path) -> set[str]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args]
    made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in KINDS]
    return {str(call.args[0].value) for call in made if isinstance(call.args[0], ast.Constant)}


def fragments(page: Path) -> list[tuple[str, str]]:
    """Return the fenced fragments of a page, each with its language."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=name_of)
def test_fragments_are_valid(page: Path) -> None:
    for language, text in fragments(page):
        match language:
            case "toml" if "first(code, answer)" in text:  # its scorers are of other fragments
                tomllib.loads(text)
            case "toml":
                loads(text, name_of(page))
            case "json":
                assert [json.loads(line) for line in text.splitlines()]
            case "yaml":
                yaml.safe_load(text)
            case "python":
                compile(text, name_of(page), "exec")


def commands(page: Path) -> Iterator[tuple[str, bool]]:
    """Yield the commands of a page, and whether one is complete: prose may leave arguments out."""
    for _, text in fragments(page):
        yield from ((line.partition(" # ")[0], True) for line in text.replace("\\\n", " ").splitlines())
    spans = re.findall(r"`([^`]+)`", "\n".join(prose(page)))
    yield from ((" ".join(span.split()), False) for span in spans)


def refusal(words: list[str]) -> str:
    """Return the name of the error with which the command line refuses ``words``, or ""."""
    command = get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = vars(command)["commands"][words[0]], words[1:]
    if words and not words[0].startswith("-") and hasattr(command, "commands"):
        return "NoSuchCommand"
    try:
        command.make_context("penstock", words)
    except Exception as error:  # Typer brings a copy of click, without public names for its errors
        return type(error).__name__
    return ""


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=name_of)
def test_commands_are_those_of_the_command_line(page: Path) -> None:
    for line, complete in commands(page):
        if match := re.fullmatch(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?penstock ([a-z].*)", line.strip()):
            allowed = {"", "Exit"} if complete else {"", "Exit", "MissingParameter", "BadOptionUsage"}
            assert refusal(shlex.split(re.sub(r"\bN\b", "1", match[1]))) in allowed, line


def test_what_is_no_command_is_noticed() -> None:
    assert refusal(["rollback", "forty"]) == "BadParameter"
    assert refusal(["rollback"]) == "MissingParameter"
    assert refusal(["rollbak", "40"]) == "NoSuchCommand"
    assert refusal(["rollback", "40", "--reasons", "x"]) == "NoSuchOption"


def test_flags_that_the_documents_name_are_settings() -> None:
    keys = {entry.key for entry in entries()}
    named = {
        (name_of(page), flag) for page in PAGES for flag in re.findall(r"--([a-z]+(?:\.[a-z_0-9]+)+)", page.read_text())
    }
    assert len(named) > 30
    assert [flag for flag in sorted(named) if flag[1] not in keys] == []


def test_settings_that_the_documents_name_exist() -> None:
    keys = {entry.key for entry in entries()}
    tables, files = {key.partition(".")[0] for key in keys}, (".py", ".md", ".toml", ".json", ".jsonl", ".yaml", ".log")
    pages = [page for page in PAGES if page.name not in ("kubernetes.md", "index.md")]  # values of the chart; the past
    named = {(name_of(page), name) for page in pages for name in re.findall(r"`(\w+(?:\.\w+)+)[` ]", page.read_text())}
    named = {(page, name) for page, name in named if name.partition(".")[0] in tables and not name.endswith(files)}
    assert len(named) > 100
    assert [
        hit for hit in sorted(named)
        if not any(f"{key}.".startswith(f"{hit[1]}.") or hit[1].startswith(f"{key}.") for key in keys)
    ] == []  # fmt: skip


def test_modules_that_the_documents_run_exist() -> None:
    pattern = r"python -m ((?:penstock|benchmarks|examples)(?:\.\w+)+)(?![.\w])"
    pages = [page for page in [*PAGES, *EXAMPLES] if page.name != "index.md"]  # the journal names removed ones
    named = {name for page in pages for name in re.findall(pattern, page.read_text())}
    paths = {name: ROOT / name.replace(".", "/") for name in named}
    assert len(paths) > 10
    assert [
        name for name, path in sorted(paths.items())
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists()
    ] == []  # fmt: skip


def test_requests_that_the_documents_name_are_of_the_api() -> None:
    paths = json.loads((ROOT / "docs/openapi.json").read_text(encoding="utf-8"))["paths"]
    known = [f"{method.upper()} {re.sub('{[^}]+}', '[^/]+', path)}" for path in paths for method in paths[path]]
    requests = r"\b((?:GET|POST|PATCH|PUT|DELETE) /[\w/{}.-]*)"
    named = {request.rstrip(".") for page in PAGES for request in re.findall(requests, page.read_text())}
    assert len(named) > 25
    assert [request for request in sorted(named) if not any(re.fullmatch(path, request) for path in known)] == []


MODULES_WITH_EXAMPLES = [
    name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    for top in ("services", "shared", "penstock")
    for path in sorted((ROOT / top).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES_WITH_EXAMPLES)
def test_the_examples_of_docstrings_are_true(module: str) -> None:
    results = doctest.testmod(pytest.importorskip(module, reason="needs an optional package", exc_type=ImportError))
    assert results.failed == 0
