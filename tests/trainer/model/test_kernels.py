"""Liger is imported without what it does not need."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest

from penstock.services.trainer.model.layers import kernels

LIGER = """
try:
    import peft
    found = True
except ImportError:
    found = False
"""


def test_liger_does_not_import_peft_and_later_imports_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "__init__.py").touch()
    (tmp_path / "liger_kernel" / "ops.py").write_text(LIGER)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] in {"liger_kernel", "peft"}]:
        monkeypatch.delitem(sys.modules, name)
    assert importlib.util.find_spec("peft") is not None
    try:
        assert kernels.liger("ops").found is False
        assert "peft" not in sys.modules
        assert importlib.util.find_spec("peft") is not None
    finally:
        for name in ("liger_kernel", "liger_kernel.ops"):
            sys.modules.pop(name, None)


def test_a_peft_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = types.ModuleType("peft")
    monkeypatch.setitem(sys.modules, "peft", kept)
    with pytest.raises(ModuleNotFoundError):
        kernels.liger("no_such_module")
    assert sys.modules["peft"] is kept
