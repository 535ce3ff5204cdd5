"""Large libraries come in without a look for garbage: of the objects that an import makes, nearly all stay."""

import contextlib
import gc
from collections.abc import Iterator


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
