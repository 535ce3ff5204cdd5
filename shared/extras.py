"""Optional packages: which extra of Penstock brings one, by the metadata of the installed distribution."""

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable

_REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[([\w,-]+)\])?.*;.*\bextra\s*==\s*['"]([\w-]+)['"]""")
_BROUGHT_BY = {"tokenizers": "transformers", "flash_attn": "flash-attn-4", "sympy": "math-verify"}
"""Packages that no extra names, by what brings them."""
_NAME = "penstock"


def missing(packages: Iterable[str]) -> list[str]:
    """Return those of ``packages`` that are not installed, without importing any."""
    return [package for package in dict.fromkeys(packages) if importlib.util.find_spec(package) is None]


def install_advice(packages: Iterable[str]) -> str:
    """Return the command that installs ``packages`` with Penstock's extras; "" if none of them is of an extra."""
    extras = {extra for package in packages for extra in _extra_of(package)}
    return f"pip install '{_NAME}[{','.join(sorted(extras))}]'" if extras else ""


def advice_on(error: ImportError) -> str:
    """Return the command that installs the package that could not be imported; "" if no extra has it."""
    return install_advice([(error.name or "").partition(".")[0]])


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
