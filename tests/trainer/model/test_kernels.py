"""Liger is imported without what it does not need, and leaves experts as they are."""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from penstock.services.trainer.model.layers import kernels
from tests.support import tiny

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


def test_experts_stay_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fused = tiny.mixture(), types.SimpleNamespace(forward=lambda *_: None)
    source: Any = sys.modules[type(model).__module__]
    experts, norms = type(model.model.layers[0].mlp.experts), source.Qwen3MoeRMSNorm

    def fuse(model: Any, rms_norm: bool = True) -> None:
        """As Liger's functions do."""
        source.Qwen3MoeRMSNorm = source.Qwen3MoeExperts = types.SimpleNamespace
        for layer in model.model.layers:
            layer.mlp.experts.__dict__ |= {"forward": fused.forward, "_get_name": lambda: "fused"}

    patches = types.SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"qwen3_moe": fuse})
    monkeypatch.setattr(kernels, "liger", lambda module: patches)
    monkeypatch.setattr(kernels, "_missing", lambda model, device: "")
    monkeypatch.setattr(kernels, "_REPLACED", {})
    try:
        assert kernels.install(model, "auto", "cuda")
        assert all(type(layer.mlp.experts) is experts for layer in model.model.layers)
        assert not any({"forward", "_get_name"} & layer.mlp.experts.__dict__.keys() for layer in model.model.layers)
        assert source.Qwen3MoeExperts is experts, "of the next model, such as a reference"
        assert {source.__name__: {"Qwen3MoeRMSNorm": norms}} == kernels._REPLACED
    finally:
        source.Qwen3MoeRMSNorm, source.Qwen3MoeExperts = norms, experts
