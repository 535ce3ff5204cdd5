"""Import large libraries without garbage collection, without torch's compiler, or without torch."""

import contextlib
import gc
import os
import sys
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


def leave_out_torch() -> None:
    """Import transformers without torch in this process from now on, as if it were not installed: two of three seconds of CPU
    and 350 MB, which tokenizers do not need. Without effect once either is imported.
    """
    if not {"torch", "transformers"} & sys.modules.keys():
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that only tokenizers work
