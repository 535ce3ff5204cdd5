"""Points in the order of a device's work, and a stream of one's own. On a CPU everything is done when it is called.

All of torch's CUDA events and streams that weights need are here, so that the rest reads the same for both devices.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class Point:
    """A point in the order of a stream of ``device``; one that was never set counts as reached."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """Set it behind all work that was given to the current stream."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def reached(self) -> bool:
        """Return whether the device has come so far; never blocks."""
        return self._event is None or bool(self._event.query())

    def follow(self) -> None:
        """Let the current stream go on only behind it; does not block this thread."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class Lane:
    """A stream of one's own on ``device``, made once: torch has 32 of them and hands them out again and again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make it the current stream of this thread for the block."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield
