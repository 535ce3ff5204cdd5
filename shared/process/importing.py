"""Import large libraries without garbage collection, without torch's compiler, or without torch."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

_UNCOMPILED = "TORCHDYNAMO_DISABLE"
"""torch reads it at each call of ``torch.compile``."""
_UNADVISED = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
"""Of torch that is missing."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Pause garbage collection while importing, then freeze the new objects.

    torch, transformers and DeepSpeed are thousands of modules, and each collection scans all earlier ones.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Disable torch.compile in the body: its decorator alone imports torch's compiler, about two seconds of CPU."""
    with _with_variable(_UNCOMPILED):
        yield


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Import transformers as if torch were not installed, which it then believes until the process ends: two of three seconds
    of CPU and 350 MB, which tokenizers do not need. Without effect once either is imported. Others may import torch after it.
    """
    if {"torch", "transformers"} & sys.modules.keys():
        yield
        return
    with _with_variable(_UNADVISED):
        sys.modules["torch"] = None  # type: ignore[assignment]
        try:
            yield
        finally:
            del sys.modules["torch"]


@contextlib.contextmanager
def _with_variable(name: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
