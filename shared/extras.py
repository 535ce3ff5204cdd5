"""Optional packages: which extra of Penstock brings one, by the metadata of the installed distribution.

Penstock is on no package index, where anybody may register its name: nothing says to install it from one.
"""

import importlib.metadata
import importlib.util
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

_REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[([\w,-]+)\])?.*;.*\bextra\s*==\s*['"]([\w-]+)['"]""")
_BROUGHT_BY = {"tokenizers": "transformers", "flash_attn": "flash-attn-4", "sympy": "math-verify", "zmq": "pyzmq"}
"""Packages that no extra names, by what brings them."""
_NAME = "penstock"
_ROOT = Path(__file__).parents[2]


def missing(packages: Iterable[str]) -> list[str]:
    """Return those of ``packages`` that are not installed, without importing any."""
    return [package for package in dict.fromkeys(packages) if importlib.util.find_spec(package) is None]


def install_advice(packages: Iterable[str]) -> str:
    """Return the command that installs ``packages`` with Penstock's extras; "" if none of them is of an extra."""
    extras = {extra for package in packages for extra in _extra_of(package)}
    return install_command(*sorted(extras)) if extras else ""


def install_command(*extras: str) -> str:
    """Return the command that installs extras: from the checkout, or without one package by package."""
    if (_ROOT / "pyproject.toml").is_file():
        return f"pip install '.[{','.join(extras)}]' in {_ROOT}"
    return f"pip install {shlex.join(sorted({need for extra in extras for need in _needs(extra)}))}"


def _needs(extra: str) -> Iterator[str]:
    for line in _requirements():
        if (match := _REQUIREMENT.match(line)) and match[3] == extra:
            if match[1] == _NAME:
                for inner in match[2].split(","):
                    yield from _needs(inner)
            else:
                yield line.partition(";")[0].strip()


def advice_on(error: ImportError) -> str:
    """Return the command that installs the package that could not be imported; "" if it is Penstock's own, or no extra has it."""
    package = (error.name or "").partition(".")[0]
    return "" if package == _NAME else install_advice([package])


def _extra_of(package: str) -> list[str]:
    """Return ``all`` if it includes the package, else the first extra that does."""
    requirements = [match.groups() for line in _requirements() if (match := _REQUIREMENT.match(line))]
    distribution = _normal(_BROUGHT_BY.get(package, package))
    within = {
        inner for name, inners, extra in requirements if name == _NAME and extra == "all" for inner in inners.split(",")
    }
    extras = [extra for name, _, extra in requirements if _normal(name) == distribution and extra != "dev"]
    return ["all"] if within & set(extras) else extras[:1]


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires(_NAME) or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return []


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
