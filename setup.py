"""Build a wheel with one importable package: `services` and `shared` become `penstock.services` and `penstock.shared`.

A checkout, an editable install and the images, which copy neither this file nor `penstock`, keep both names as they are.
"""

import re
import sys
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

INNER = ("services", "shared")
EDITABLE = any("editable" in word for word in sys.argv)
_INNER = rf"(?=(?:{'|'.join(INNER)})\b)"
_IMPORT = re.compile(rf"^(\s*(?:from|import) ){_INNER}", re.MULTILINE)
_NAMED = re.compile(rf"""((?<=["'])|(?<=-m )){_INNER}(?=\w+\.[a-z_{{])""")


def moved(source: str) -> str:
    """Return Python code with its imports, and the modules that it names in strings, below `penstock`.

    >>> moved('from shared.bus.encoding import wire; run("-m", "services.rollout", f"services.{name}")')
    'from penstock.shared.bus import wire; run("-m", "penstock.services.rollout", f"penstock.services.{name}")'
    """
    return _NAMED.sub(r"\1penstock.", _IMPORT.sub(r"\1penstock.", source))


def _name(package: str) -> str:
    return f"penstock.{package}" if package.partition(".")[0] in INNER else package


class OnePackage(Distribution):
    """The project's packages under one name."""

    def parse_config_files(self, *arguments: Any, **options: Any) -> None:
        """Read pyproject.toml, then rename its packages."""
        super().parse_config_files(*arguments, **options)
        if not EDITABLE:
            self.package_dir = {f"penstock.{name}": name for name in INNER}
            self.packages = [_name(package) for package in self.packages]
            self.package_data = {_name(package): files for package, files in self.package_data.items()}


class MoveImports(build_py):
    """Copy modules with their imports moved."""

    def build_module(self, module: Any, module_file: Any, package: Any) -> Any:
        """Copy one module."""
        built, copied = super().build_module(module, module_file, package)
        if not EDITABLE:
            path = Path(built)
            path.write_text(moved(path.read_text(encoding="utf-8")), encoding="utf-8")
        return built, copied


setup(distclass=OnePackage, cmdclass={"build_py": MoveImports})
