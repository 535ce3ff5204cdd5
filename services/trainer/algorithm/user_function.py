"""Functions of the user's own, by import path."""

import functools
import pkgutil
from collections.abc import Callable
from typing import Any


@functools.cache
def load(name: str) -> Callable[..., Any]:
    """Return the function ``package.module:function``; raises its import's error."""
    target = pkgutil.resolve_name(name)
    if not callable(target):
        raise TypeError(f"it is no function but {type(target).__name__}")
    function: Callable[..., Any] = target
    return function
