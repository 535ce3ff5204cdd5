"""Hostile completions for ``benchmarks.reward.hostile_rewards``.

A family's weight is its share of the texts; ``at_most`` limits those that always cost a deadline.
"""

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from typing import TypeAlias

from penstock.shared.bus.messages import Json

Maker: TypeAlias = Callable[[random.Random], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """Texts of one attack."""

    name: str
    weight: float
    make: Maker
    at_most: int | None = None


def texts(families: tuple[Family, ...], count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield (family, text) ``count`` times, by family."""
    generator = random.Random(seed)
    limited = {family.name: min(family.at_most, count) for family in families if family.at_most is not None}
    rest = count - sum(limited.values())
    total = sum(family.weight for family in families if family.at_most is None)
    shares = {family.name: int(rest * family.weight / total) for family in families if family.at_most is None}
    for name in list(shares)[:1]:
        shares[name] += rest - sum(shares.values())
    for family in families:
        for _ in range((limited | shares)[family.name]):
            yield family.name, family.make(generator)


# ---------------------------------------------------------------- answers


def _box(text: str) -> str:
    return f"<answer>{text}</answer> \\boxed{{{text}}}"


def _sum(generator: random.Random) -> str:
    letters = generator.sample("abcdxyzpq", 3)
    first, second = (generator.randint(5, 9) for _ in range(2))
    return _box(f"({'+'.join(letters)})^{first}+({letters[0]}+{letters[1]})^{second}-{generator.randint(1, 10**6)}")


def _braces(generator: random.Random) -> str:
    depth = generator.choice((10, 100, 1_000, 4_900, 20_000))
    closed = depth if generator.random() < 0.5 else generator.randint(0, depth)
    return f"\\boxed{{{'{' * depth}{generator.randint(0, 10**9)}{'}' * closed}}}"


def _unicode(generator: random.Random) -> str:
    ranges = (
        (0x300, 0x36F),
        (0xFF00, 0xFFEF),
        (0x1F300, 0x1FAFF),
        (0x0660, 0x0669),
        (0xE0000, 0xE007F),
        (0x10FF00, 0x10FFFF),
    )
    characters = "".join(
        chr(generator.randint(*generator.choice(ranges))) for _ in range(generator.choice((3, 60, 2_000)))
    )
    return _box(f"{generator.randint(0, 99)}{characters}")


def _number(generator: random.Random) -> str:
    digits = generator.choice((50, 99, 4_300, 4_301, 9_000))
    number = str(generator.randint(1, 9)) * digits
    form = generator.choice(("{}", "-{}.{}", "{}/{}", "\\frac{{{}}}{{{}}}", "{}e999", "1e{}", "{}\\%"))
    return _box(form.format(number, number[::-1]))


def _latex(generator: random.Random) -> str:
    depth = generator.choice((20, 200, 1_500))
    opening, closing = generator.choice(
        (
            ("\\frac{1}{", "}"),
            ("\\sqrt{", "}"),
            ("\\left(", "\\right)"),
            ("(", ")"),
            ("x^{", "}"),
            ("|", "|"),
            ("-", ""),
        )
    )
    return _box(f"{opening * depth}{generator.randint(0, 10**6)}{closing * depth}")


def _extraction(generator: random.Random) -> str:
    unit = generator.choice(
        (
            "answer is (",
            "1,234,",
            "1.",
            "####",
            "(A) or ",
            "\\boxed{",
            "answer : ** ",
            "<answer>",
            "</answer>",
            "$\\(",
            "1e1/",
        )
    )
    return f"{unit * generator.choice((100, 3_000, 9_000))}{generator.randint(0, 10**6)}{generator.choice(('', '!', '}', '</answer>'))}"


def _controls(generator: random.Random) -> str:
    characters = "".join(chr(generator.choice((*range(32), 127, *range(128, 160)))) for _ in range(200))
    return _box(f"\x00{characters}\x1b]0;{generator.randint(0, 10**6)}\x07\x1b[2J")


def _template(generator: random.Random) -> str:
    field = generator.choice(
        ("{completion}", "{prompt}", "{answer}", "{0.__class__.__mro__}", "{extra.answer}", "%s%n", "${7*7}")
    )
    return _box(field * generator.choice((1, 50, 4_000)) + str(generator.randint(0, 10**9)))


def _token(generator: random.Random) -> str:
    return generator.choice("cb7\\{ \n\t$") * generator.choice((30_000, 100_000, 300_000)) + str(generator.random())


def _bidi(generator: random.Random) -> str:
    marks = "\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c\ufeff\u2028\u2029"
    return _box(
        "".join(f"{generator.choice(marks)}{generator.randint(0, 9)}" for _ in range(generator.choice((2, 40, 900))))
    )


def _json(generator: random.Random) -> str:
    depth = generator.choice((100, 990, 1_010, 40_000))
    number = generator.randint(0, 10**9)
    content = generator.choice(
        (
            "[" * depth + str(number) + "]" * depth,
            '{"a":' * depth + str(number) + "}" * depth,
            f'{{"answer": {"9" * depth}}}',
            f'{{"answer": {number}, "answer": {number}}}',
            f'{{"answer": 1e{number}, "b": NaN}}',
            json.dumps({"items": [number % 7] * depth}),
        )
    )
    return f"<json>{content}</json> {_box(str(number))}"


def _algebra_bomb(generator: random.Random) -> str:
    number = generator.randint(10, 99)
    return _box(
        generator.choice(
            (
                f"{number}!!!!!",
                f"{number}^{{{10**50}}}",
                f"9^{{9^{{9^{{{number}}}}}}}",
                f"\\binom{{10^9}}{{{number}^5}}",
                f"(1+x)^{{{number}^9}}",
                f"(x+y+z)^{{{number}}}+(x-y)^9",
            )
        )
    )


def _pattern_bomb(generator: random.Random) -> str:
    return f"{'a' * generator.randint(5_000, 9_000)}!<answer>{generator.random()}</answer>"


def _schema_bomb(generator: random.Random) -> str:
    return f"<json>{json.dumps({'word': 'a' * generator.randint(40, 60) + '!'})}</json> {_box(str(generator.random()))}"


ANSWERS = (
    Family("sums", 0.4, _sum),
    Family("braces", 1, _braces),
    Family("unicode", 2, _unicode),
    Family("numbers", 3, _number),
    Family("latex", 1, _latex),
    Family("extraction", 0.6, _extraction),
    Family("controls", 2, _controls),
    Family("templates", 1, _template),
    Family("tokens", 0.1, _token),
    Family("bidi", 2, _bidi),
    Family("json", 1, _json),
    Family("algebra_bombs", 0.2, _algebra_bomb),
    Family("pattern_bombs", 0, _pattern_bomb, at_most=16),
    Family("schema_bombs", 0, _schema_bomb, at_most=12),
)
FORMAT = {
    "kind": "format",
    "tags": ["answer"],
    "pattern": r"(?:a|a)*b|[\s\S]*",
    "scripts": ["Latin"],
    "json_schema": {
        "type": "object",
        "properties": {"word": {"type": "string", "pattern": "^(a|a)+$"}, "items": {"uniqueItems": True}},
    },
    "json_tag": "json",
}
"""With every text rule, and slow patterns."""

# ---------------------------------------------------------------- programs

_PRIME = 2**61 - 1


def _report(generator: random.Random, lines: str) -> str:
    return (
        f"# {generator.random()}\nimport os\ndef f(*a):\n"
        f"    for fd in (1, 3):\n        try: os.write(fd, ({lines}).encode())\n        except OSError: pass\n    return 1\n"
    )


def _forged(generator: random.Random) -> str:
    value = generator.choice(
        (
            "1",
            '{"set": [1, 2, 3]}',
            '{"set": [{"set": []}]}',
            '{"dict": [[1, 2]]}',
            '{"tuple": [1]}',
            "NaN",
            '"\\ud800"',
            "",
            "1e999",
            '{"set"',
        )
    )
    kind = generator.choice(("value", "ready", "error", "value value", "exit"))
    return _report(generator, repr(f"\n{kind} {value}\n{kind} {value}\n"))


def _flood(generator: random.Random) -> str:
    lines = generator.choice((1_000, 20_000, 131_072))
    return _report(generator, f"{chr(10) + 'value 0'!r} * {lines}")


def _collision(generator: random.Random) -> str:
    count = generator.choice((100, 10_000, 40_000))
    numbers = f"[i * {_PRIME} for i in range({generator.randint(0, 9)}, {count})]"
    returned = generator.choice(("{}", "set({})", "dict.fromkeys({}, 1)", "frozenset({})", "[tuple({})]"))
    return f"# {generator.random()}\ndef f(*a):\n    return {returned.format(numbers)}\n"


def _forged_collision(generator: random.Random) -> str:
    count = generator.choice((10_000, 40_000))
    numbers = f'", ".join(str(i * {_PRIME}) for i in range({count}))'
    return _report(generator, f"'\\nvalue {{\"set\": [' + {numbers} + ']}}\\n'")


def _deep(generator: random.Random) -> str:
    depth = generator.choice((100, 900, 990, 1_100, 50_000))
    forms = (
        f"import sys\nsys.setrecursionlimit(10**6)\ndef f(*a):\n    r = 1\n    for _ in range({depth}): r = [r]\n    return r\n",
        _report(generator, f"'\\nvalue ' + '[' * {depth} + ']' * {depth} + '\\n'"),
    )
    return f"# {generator.random()}\n{generator.choice(forms)}"


def _huge(generator: random.Random) -> str:
    digits = generator.choice((4_000, 4_299, 4_301, 100_000))
    value = generator.choice(
        (
            f"10**{digits}",
            f"-(10**{digits})",
            f"'7' * {digits}",
            f"float('1e{digits % 300}')",
            f"[10**{digits // 9}] * 999",
        )
    )
    return f"# {generator.random()}\ndef f(*a):\n    return {value}\n"


def _printed(generator: random.Random) -> str:
    text = generator.choice(
        (
            "'9' * 1_000_000",
            "'\\xff' * 600_000",
            "'1 ' * 400_000",
            "'\\n' * 900_000",
            "'[' * 900_000",
            "'\\0' * 900_000",
        )
    )
    return f"# {generator.random()}\nimport sys\nsys.stdout.write({text})\ndef f(*a): return 6\n"


def _exits(generator: random.Random) -> str:
    ending = generator.choice(
        (
            "os._exit(0)",
            "os._exit(256)",
            "sys.exit('6')",
            "raise SystemExit(0)",
            "os.kill(os.getpid(), 9)",
            "os.abort()",
        )
    )
    return f"# {generator.random()}\nimport os, sys\ndef f(*a):\n    {ending}\n"


def _fenced(make: Maker) -> Maker:
    return lambda generator: f"```python\n{make(generator)}```\n"


PROGRAMS = (
    Family("collisions", 0, _fenced(_collision), at_most=32),
    Family("forged", 4, _fenced(_forged)),
    Family("floods", 1, _fenced(_flood)),
    Family("forged_collisions", 1, _fenced(_forged_collision)),
    Family("deep", 2, _fenced(_deep)),
    Family("huge", 3, _fenced(_huge)),
    Family("printed", 1, _fenced(_printed)),
    Family("exits", 3, _fenced(_exits)),
)
TESTS: tuple[list[Json], ...] = (
    ["assert f(1) == 7", "assert f(1) != 5"],
    ["assert set(f(1)) == {1, 2, 3}"],
    ["assert sorted(f(2))[0] == 4"],
    [{"fn_name": "f", "input": [1], "output": {"a": [1, 2]}}],
    [{"input": "1\n", "output": "6\n"}],
)
