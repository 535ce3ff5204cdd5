"""Load checkpoints without running code in them.

DeepSpeed uses pickle, which can call any function. :func:`restrict_loading` forces torch's weights-only unpickler for
the whole process: tensors, plain data, and the three classes below. torch is imported when it is needed.
"""

import contextlib
import importlib
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from penstock.shared.errors import WeightsError

T = TypeVar("T")
SUFFIX = ".pt"
_GLOBAL = re.compile(r"GLOBAL (\S+)")
_ALLOWED = (
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)
"""DeepSpeed's optimizer state: a scale, an enumeration, a pair of numbers."""


def restrict_loading() -> None:
    """At each load again: torch reads the environment then, which other code can change."""
    import torch

    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    torch.serialization.add_safe_globals([getattr(importlib.import_module(where), name) for where, name in _ALLOWED])


def refusal(path: Path) -> str:
    """The forbidden globals in a torch archive, in words, or ""."""
    if not zipfile.is_zipfile(path):
        return ""
    import torch

    try:
        named = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except (RuntimeError, ValueError, EOFError, IndexError, pickle.UnpicklingError) as error:
        return f"{path.name} is not a file that torch.save wrote for a checkpoint: {str(error).splitlines()[0]}"
    unknown = sorted(named - {f"{where}.{name}" for where, name in _ALLOWED})
    return f"{path.name} would call {', '.join(unknown)}, which no checkpoint contains" if unknown else ""


def loading(folder: Path, load: Callable[[], T]) -> T:
    """``load`` with the weights-only unpickler; WeightsError for forbidden contents.

    Tensors that it keeps are maps of the files, which are read when they are copied: torch reads at 0.7 GB/s else, as it
    computes the archive's checksums.
    """
    restrict_loading()
    files = sorted(folder.rglob(f"*{SUFFIX}"))
    for path in files:
        if reason := refusal(path):
            raise WeightsError(f"refused to load the checkpoint in {folder}: {reason}")
    try:
        with _mapped() if all(map(zipfile.is_zipfile, files)) else contextlib.nullcontext():
            return load()
    except pickle.UnpicklingError as error:
        raise WeightsError(f"refused to load the checkpoint in {folder}: {reason_of(error)}") from error


@contextlib.contextmanager
def _mapped() -> Iterator[None]:
    from torch.utils.serialization import config

    was, config.load.mmap = config.load.mmap, True
    try:
        yield
    finally:
        config.load.mmap = was


def reason_of(error: pickle.UnpicklingError) -> str:
    """Without torch's advice to load it anyway."""
    named = _GLOBAL.search(str(error))
    return f"a pickle there would call {named[1]}" if named else "a pickle there holds more than tensors and plain data"
