"""Stream order for CUDA and the CPU, where all work is done at once."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class Point:
    """A point in the order of a stream of ``device``; reached if unset."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """Set it behind all work on the current stream."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def reached(self) -> bool:
        """Return whether the device has reached it, without waiting."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait for it in this thread."""
        if self._event is not None:
            self._event.synchronize()

    def follow(self) -> None:
        """Make the current stream, but not this thread, wait for it."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class Lane:
    """A private stream on ``device``, created once because torch recycles its 32 streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make it the current stream for the block."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield
