"""Source files of modules, without importing them."""

import hashlib
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path


def digest(reference: str) -> str:
    """Return the SHA-256 of the file of the module in ``package.module:function``; "" if it has no file.

    Modules that it imports are not included.
    """
    file = _file(reference.partition(":")[0])
    try:
        return "" if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def _file(module: str) -> Path | None:
    """Return the file of a module; unlike ``importlib.util.find_spec``, this runs none of its packages."""
    name, where, spec = "", None, None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        try:
            spec = _find(name, where)
        except KeyError:  # a folder without __init__.py in another one, which importlib finds once that is imported
            files = (Path(folder, *module.split(".")).with_suffix(".py") for folder in sys.path)
            return next((file for file in files if file.is_file()), None)
        if spec is None:
            return None
        where = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _find(name: str, where: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, where)
        if spec is not None:
            return spec
    return None
