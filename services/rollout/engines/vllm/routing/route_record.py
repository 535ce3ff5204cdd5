"""Records the experts of the token that was read at each draw, in a vLLM worker.

Beside the logprobs of :mod:`penstock.services.rollout.engines.vllm.token_record`, in pages that a request gets as it
grows: an id is a byte, but there are hundreds of a token::

    draw at place p of row r    slot = r × tokens + p ─▶ page of slot // PAGE, place slot % PAGE
    a request finished          its pages ─▶ pinned host memory (no wait)

So a sample has the experts of its prompt's last token and of all its own but the last, as they were when its logprobs
were computed; a prompt that is read again after preemption, or not read at all as it is cached, changes nothing.

Shapes: ``T`` tokens of a pass, ``L`` decoder layers, ``K`` experts per token, ``n`` requests of a step.
"""

import contextlib
import functools
from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import torch

from penstock.shared.peers.frames import PART_BYTES, Frame

PAGE = 64
"""Places of a page; a request has one more than it needs."""
_FIRST_PAGES = 64


def sent(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Return a copy of ``array`` on ``device``, for which the host does not wait."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.clone()


class RouteRecord:
    """Experts by slot, for the thread that steps the model only."""

    def __init__(self, chosen_TLK: torch.Tensor, kind: str, silent: Collection[int] = ()) -> None:
        """``chosen_TLK``: those of the last pass, whose bytes are of the type ``kind``; ``silent`` layers have no choice."""
        self._silent = silent
        self._kind = kind
        self._chosen_TW = chosen_TLK.view(len(chosen_TLK), -1)
        self._shape = chosen_TLK.shape[1:]
        self._sent = functools.partial(sent, device=chosen_TLK.device)
        self._pool = self._pages(_FIRST_PAGES)
        self._free = list(range(1, _FIRST_PAGES))  # the first takes what is not kept
        self._table = np.zeros(1, dtype=np.int64)
        self._device_table = self._sent(self._table)

    def _pages(self, count: int) -> torch.Tensor:
        chosen_TW = self._chosen_TW
        return torch.zeros(count * PAGE, chosen_TW.shape[1], dtype=chosen_TW.dtype, device=chosen_TW.device)

    @torch.inference_mode()
    def grow(self, rows: int, tokens: int, before: tuple[int, int]) -> None:
        """Change from ``before`` to ``rows`` of ``tokens`` places each, a multiple of PAGE."""
        old = self._table[:-1].reshape(before[0], before[1] // PAGE)
        table = np.zeros((rows, tokens // PAGE), dtype=np.int64)
        table[: len(old), : old.shape[1]] = old
        self._table = np.append(table.ravel(), 0)  # the last is of what is not kept
        self._device_table = self._sent(self._table)

    @torch.inference_mode()
    def reserve(self, slot_n: npt.NDArray[np.int64], tokens: int) -> int:
        """Have pages for ``slot_n`` in rows of ``tokens``, and the next ones; return for how many more steps they do.

        Where the device has no memory for them, the experts of these slots are not kept.
        """
        page_n = slot_n // PAGE
        is_last_n = (page_n + 1) % (tokens // PAGE) == 0
        needed = np.unique(np.concatenate([page_n, page_n[~is_last_n] + 1]))
        missing = needed[self._table[needed] == 0]
        if len(missing):
            self._extend(len(missing))
            missing = missing[: len(self._free)]
            self._table[missing] = [self._free.pop() for _ in missing]
            self._device_table.index_copy_(0, self._sent(missing), self._sent(self._table[missing]))
        return 2 * PAGE - 1 - int((slot_n % PAGE).max(initial=0))

    def _extend(self, count: int) -> None:
        """Have ``count`` free pages, or as many as there are where the device has no memory for more."""
        pages = len(self._pool) // PAGE
        if count <= len(self._free):
            return
        for more in (max(count, pages), count - len(self._free)):
            with contextlib.suppress(torch.OutOfMemoryError):
                pool = self._pages(pages + more)
                pool[: len(self._pool)] = self._pool
                self._pool = pool
                self._free.extend(range(pages, pages + more))
                return

    @torch.inference_mode()
    def store(self, slot_n: torch.Tensor, read_n: npt.NDArray[np.int64] | None) -> None:
        """Keep the experts of the tokens at ``read_n`` of the last pass; None: of its first n."""
        chosen_nW = self._chosen_TW[: len(slot_n)] if read_n is None else self._chosen_TW[self._sent(read_n)]
        place_n = self._device_table[slot_n // PAGE] * PAGE + slot_n % PAGE
        self._pool.index_copy_(0, place_n, chosen_nW)

    @torch.inference_mode()
    def release(self, slot: int, length: int, tokens: int) -> torch.Tensor:
        """Return the experts at ``length`` slots from ``slot`` on (length × L × K, host), soon, or none if one was not
        kept; free the row's pages.
        """
        own = slice(slot // PAGE, (slot + tokens) // PAGE)
        pages, used = self._table[own][self._table[own] > 0], self._table[own][: -(-length // PAGE)]
        used = used[:0] if self._silent or not used.all() else used
        places = (used[:, None] * PAGE + np.arange(PAGE)).ravel()[:length]
        chosen_TW, on_gpu = self._pool[self._sent(places)], self._pool.is_cuda
        host = torch.empty(chosen_TW.shape, dtype=chosen_TW.dtype, pin_memory=on_gpu)
        host.copy_(chosen_TW, non_blocking=on_gpu)
        self._free.extend(pages.tolist())
        self._table[own] = 0
        return host.view(len(host), *self._shape)

    def frame(self, routes: torch.Tensor, beside_bytes: int = 0) -> Frame | None:
        """Return a part of a worker's message, that has ``beside_bytes`` of supports; None: not kept, or too large."""
        if not len(routes) or routes.nbytes + beside_bytes > PART_BYTES:
            return None
        return {"kind": self._kind, "shape": list(routes.shape), "ids": routes.numpy().tobytes()}
