"""Import large libraries without garbage collection, or without torch's compiler."""

import contextlib
import gc
import os
from collections.abc import Iterator

_UNCOMPILED = "TORCHDYNAMO_DISABLE"
"""torch reads it at each call of ``torch.compile``."""


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
    before = os.environ.get(_UNCOMPILED)
    os.environ[_UNCOMPILED] = "1"
    try:
        yield
    finally:
        os.environ.pop(_UNCOMPILED)
        if before is not None:
            os.environ[_UNCOMPILED] = before
