"""Bound what a model hub may answer to its library, whose transport is its own.

Files are streamed to disk and may have one gzip layer, as hubs send texts; answers of the API are read into memory, so
they may have none, and are bounded in bytes and time. Not bounded: a head that comes a byte at a time within the
library's read timeout.
"""

import functools
import importlib
import time
from typing import Any

API_TIMEOUT_S = 60.0
_API_BYTES = 16 * 1024**2
_API_PATH, _FILES = "/api/", ("/resolve/", "/api/resolve-cache/")


@functools.cache
def bound_hub() -> None:
    """Install the bounds, once per process. Libraries older than huggingface_hub 1.0 have no place for them."""
    try:
        from huggingface_hub import set_client_factory
        from huggingface_hub.utils._http import default_client_factory
    except ImportError:
        return

    def make() -> Any:
        client = default_client_factory()
        base = importlib.import_module(type(client).__module__.partition(".")[0]).SyncByteStream
        hooks = client.event_hooks
        hooks["request"] = [*hooks["request"], _ask_plain]
        hooks["response"] = [*hooks["response"], functools.partial(_check, base)]
        client.event_hooks = hooks
        return client

    set_client_factory(make)


def _ask_plain(request: Any) -> None:
    request.headers["Accept-Encoding"] = "identity"


def _check(base: Any, response: Any) -> None:
    """Raise OSError, as the hub's library does itself, for an answer that is not bounded."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    path = response.url.path  # HF_ENDPOINT may have one too
    is_api = _API_PATH in path and not any(part in path for part in _FILES)
    if encoding != "identity" and (is_api or encoding != "gzip"):
        raise OSError(f"expected an answer of the hub without content encoding, found {encoding[:40]!r}")
    if is_api:
        response.stream = _bounded(base, response.stream)


def _bounded(base: Any, stream: Any) -> Any:
    class Bounded(base):  # type: ignore[misc]  # the library decides whose class it is
        """At most ``_API_BYTES`` within ``API_TIMEOUT_S``."""

        def __iter__(self) -> Any:
            left, until_s = _API_BYTES, time.monotonic() + API_TIMEOUT_S
            for part in stream:
                left -= len(part)
                if left < 0 or time.monotonic() > until_s:
                    raise OSError(
                        f"the hub's answer has more than {_API_BYTES} bytes, or took over {API_TIMEOUT_S:g} s"
                    )
                yield part

        def close(self) -> None:
            stream.close()

    return Bounded()
