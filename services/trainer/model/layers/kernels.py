"""Fused RMS norm, rotary embedding and gated MLP, and joint query, key and value products (``projections``).

Except for the plain RMS norm (``norms``) the kernels are Liger's (Hsu et al. 2024, arXiv:2410.10989), for GPUs. Experts
of a mixture are not Liger's (``routing/expert_groups``).
"""

import contextlib
import importlib
import importlib.util
import inspect
import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from penstock.services.trainer.model.layers import norms, projections
from penstock.shared.errors import SettingsError
from penstock.shared.extras import install_command
from penstock.shared.model.routes import mixtures_of

log = logging.getLogger(__name__)

KernelKind = Literal["auto", "torch", "liger"]
_UNWANTED = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""``logits`` has its own kernels."""
_REPLACED: dict[str, dict[str, Any]] = {}
_IMPORTING = threading.Lock()


def install(model: Any, kind: KernelKind, device: str) -> bool:
    """Return whether anything was fused. ``model`` is not yet in an engine."""
    if kind == "torch":
        return False
    joined = device == "cuda" and projections.join(model) > 0
    missing = _missing(model, device)
    if missing and kind == "liger":
        raise SettingsError(f'expected {missing} for trainer.kernels = "liger": change it to "auto" or "torch"')
    if missing:
        return joined
    fuse = liger("transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    known = inspect.signature(fuse).parameters
    source = vars(sys.modules[type(model).__module__])
    before = dict(source)
    experts = mixtures_of(model).values()
    fuse(model=model, **{name: value for name, value in _UNWANTED.items() if name in known})
    _restore_experts(experts, source, before)
    _REPLACED.setdefault(
        type(model).__module__, {name: value for name, value in before.items() if source[name] is not value}
    )
    norms.replace(model)
    log.info("fused kernels installed", extra={"model_type": model.config.model_type})
    return True


def liger(module: str) -> Any:
    """Return Liger's ``module``, imported without peft, which takes most of the time (it imports bitsandbytes).

    Liger uses peft to look into its wrappers, and here adapters are added after kernels.
    """
    with _IMPORTING, contextlib.ExitStack() as restored:
        if "peft" not in sys.modules:
            sys.modules["peft"] = None  # type: ignore[assignment]  # an import of it fails
            restored.callback(sys.modules.pop, "peft")
        return importlib.import_module(f"liger_kernel.{module}")


def _restore_experts(experts: Iterable[Any], source: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Undo Liger's experts: at the first pass of each start Triton compiles and times 240 variants of their kernels, which
    takes minutes, and a function of a module itself would hide that of grouped and divided experts.
    """
    for module in experts:
        for name in ("forward", "_get_name"):
            module.__dict__.pop(name, None)
        name = type(module).__name__
        if name in source:
            source[name] = before[name]


@contextlib.contextmanager
def unfused(model: Any) -> Iterator[None]:
    """Restore ``model``'s original functions within the block."""
    own = [module for module in model.modules() if _is_fused(module.__dict__.get("forward"))]
    forwards = [module.__dict__.pop("forward") for module in own]
    source = vars(sys.modules[type(model).__module__])
    replaced = _REPLACED.get(type(model).__module__, {})
    fused = {name: source[name] for name in replaced}
    source.update(replaced)
    try:
        yield
    finally:
        source.update(fused)
        for module, forward in zip(own, forwards, strict=True):
            module.__dict__["forward"] = forward


def _is_fused(forward: Any) -> bool:
    function = getattr(forward, "func", forward)
    return str(getattr(function, "__module__", "")).startswith(("liger_kernel", projections.__name__, norms.__name__))


def fuses_logits(kind: KernelKind) -> bool:
    return kind != "torch"


def _missing(model: Any, device: str) -> str:
    if device != "cuda":
        return f"a GPU, found {device},"
    if importlib.util.find_spec("liger_kernel") is None:
        return f"liger-kernel ({install_command('fused-kernels')}),"
    known, model_type = liger("transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN, model.config.model_type
    return "" if model_type in known else f"a model type that Liger knows, found {model_type!r},"
