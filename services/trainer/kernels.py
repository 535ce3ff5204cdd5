"""Fused kernels for what lies between a model's matrix products: RMS norm, rotary embedding and gated MLP, one Triton kernel each.

They are Liger's (Hsu et al. 2024, arXiv:2410.10989; extra ``fused-kernels``), put into a model that was loaded, on a GPU. The rotary one
is put into transformers' module of that model type, so all its models in this process use it. Attention (``attention``) and the way from
logits to logprobs (``shared.logits``) are ours.
"""

import importlib.util
import inspect
import logging
from typing import Any, Literal

from shared.errors import SettingsError

log = logging.getLogger(__name__)

Kind = Literal["auto", "torch", "liger"]
_UNWANTED = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""The logits' own kernels: see ``logits``."""


def install(model: Any, kind: Kind, device: str) -> bool:
    """Fuse what can be fused in ``model``; return whether anything was.

    Args:
        model: a Hugging Face model, or its trunk; not yet in an engine.
        kind: ``auto`` fuses where it can be done, ``torch`` does not.
        device: ``cuda`` or ``cpu``.

    Raises:
        SettingsError: ``liger`` is asked for and cannot be had.
    """
    if kind == "torch":
        return False
    missing = _missing(model, device)
    if missing and kind == "liger":
        raise SettingsError(f'expected {missing} for trainer.kernels = "liger": change it to "auto" or "torch"')
    if missing:
        return False
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    fuse = MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    known = inspect.signature(fuse).parameters
    fuse(model=model, **{name: value for name, value in _UNWANTED.items() if name in known})
    log.info("fused kernels installed", extra={"model_type": model.config.model_type})
    return True


def _missing(model: Any, device: str) -> str:
    if device != "cuda":
        return f"a GPU, found {device},"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel, found none (install penstock[fused-kernels]),"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    found = model.config.model_type
    return "" if found in MODEL_TYPE_TO_APPLY_LIGER_FN else f"a model type that Liger knows, found {found!r},"
