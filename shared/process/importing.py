"""Large libraries come in without a look for garbage, and without torch's compiler where nobody compiles.

Of the objects that an import makes, nearly all stay. It knows no library.
"""

import contextlib
import gc
import os
from collections.abc import Iterator

_UNCOMPILED = "TORCHDYNAMO_DISABLE"
"""torch reads it at each call of ``torch.compile``."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import in the body; later looks for garbage leave out what is there by then.

    torch, transformers and DeepSpeed are thousands of modules, and each look goes through all that came before.
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
    """Leave as it is what asks torch to compile it in the body.

    A decorator ``@torch.compile`` imports all of torch's compiler, about two seconds of a processor, although nothing is compiled before
    the function is called.
    """
    before = os.environ.get(_UNCOMPILED)
    os.environ[_UNCOMPILED] = "1"
    try:
        yield
    finally:
        os.environ.pop(_UNCOMPILED)
        if before is not None:
            os.environ[_UNCOMPILED] = before
