"""Records each token's logprob and version in a vLLM worker.

vLLM returns logprobs as Python lists, which costs nearly half of the throughput. Here they stay on the device until
their request is finished::

    step of the runner      sampler ─▶ (processed logits, token) ─▶ token logprob ─▶ scatter ─▶ buffer, row × position
    a request finished      its row ─▶ pinned host memory (no wait) ─▶ :class:`Finished`
    a swap                  every held request: (tokens drawn so far, new version)

Rows survive preemption. Positions are scheduler counts (exact without speculative decoding), so redrawn tokens
overwrite discarded ones. Partially read prompts write to a spill cell. Logprobs are float32, after temperature.

Of requests with truncated sampling, the ids that remain possible at each position are copied to the host in every step,
for which the host waits. With ``routes``, the experts of the token that was read are kept as the logprobs are
(:mod:`penstock.services.rollout.engines.vllm.routing`).

Legend: n requests of a step, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.services.rollout.engines.vllm.routing.route_record import RouteRecord, sent

Versions = list[tuple[int, int]]
Supports = dict[int, npt.NDArray[np.int32]]
"""Possible token ids by position."""
_ROWS, _TOKENS = 64, 1024


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """Finished requests; read ``logprobs`` (float32, host) after ``ready``."""

    requests: tuple[str, ...]
    lengths: tuple[int, ...]
    """Logprobs per request; asynchronous scheduling may draw one past the stop."""
    versions: tuple[Versions, ...]
    """Per request: (first token, version), ascending."""
    logprobs: torch.Tensor
    ready: Callable[[], None]
    supports: tuple[Supports, ...] = ()
    """Per request; empty without truncation."""
    routes: tuple[torch.Tensor, ...] = ()
    """Per request, as many as logprobs or none; read them after ``ready``."""

    def rows(self) -> Iterable[tuple[str, bytes, Versions, Supports]]:
        """Wait for the logprobs; yield (request, float32 bytes, versions, supports)."""
        self.ready()
        values, start = self.logprobs.numpy(), 0
        for request, length, versions, supports in zip(
            self.requests, self.lengths, self.versions, self.supports, strict=True
        ):
            yield request, values[start : start + length].tobytes(), versions, supports
            start += length


@dataclasses.dataclass(slots=True)
class _Step:
    """A step in which every request drew, and that the next one may repeat with one more token each."""

    requests: list[str]
    row_n: npt.NDArray[np.int64]
    read_n: npt.NDArray[np.int64]
    index_n: torch.Tensor
    repeats: int
    """Steps until a request has more tokens than there is room for."""


class TokenRecord:
    """Records of one worker, for the thread that steps the model only."""

    def __init__(self, device: torch.device, logprobs: bool = True, routes: RouteRecord | None = None) -> None:
        self._device = device
        self._keeps_logprobs = logprobs
        self._routes = routes
        self._read_n: npt.NDArray[np.int64] | None = None
        """Places of the tokens that were read last, in the step; None: one each."""
        self._rows: dict[str, int] = {}
        self._versions: dict[str, Versions] = {}
        self._free: list[int] = []
        self._capacity, self._tokens = 0, _TOKENS
        self._prompt, self._known, self._drawn = (np.zeros(0, dtype=np.int64) for _ in range(3))
        self._logprobs = torch.zeros(1, dtype=torch.float32, device=device)
        self._index_n: torch.Tensor | None = None
        self._last: _Step | None = None
        """None after a change of any request."""
        self._supports: dict[str, Supports] = {}
        self._truncated: list[tuple[int, int, Supports]] = []
        self._version: int | None = None
        self._grow(_ROWS, _TOKENS)

    @property
    def held(self) -> dict[str, int]:
        """Tokens drawn so far, per held request."""
        return {request: int(self._drawn[row]) for request, row in self._rows.items()}

    def admit(
        self, request: str, prompt_tokens: int, known_tokens: int, max_new_tokens: int, truncated: bool = False
    ) -> None:
        """Add a request, or re-add it after preemption; ``known_tokens`` are read before the next draw."""
        self._last = None
        if truncated and self._keeps_logprobs:
            self._supports.setdefault(request, {})
        row = self._rows.get(request)
        if row is None:
            if not self._free:
                self._grow(2 * self._capacity, self._tokens)
            row = self._rows[request] = self._free.pop()
            self._versions[request] = [] if self._version is None else [(0, self._version)]
        if max_new_tokens > self._tokens:
            self._grow(self._capacity, 1 << (max_new_tokens - 1).bit_length())
        self._prompt[row] = prompt_tokens
        self._rewind(request, row, known_tokens)

    def resume(self, request: str, completion_tokens: int) -> None:
        """Continue a preempted request; tokens after ``completion_tokens`` are redrawn."""
        self._last = None
        row = self._rows.get(request)
        if row is not None:
            self._rewind(request, row, int(self._prompt[row]) + completion_tokens)

    def _rewind(self, request: str, row: int, known_tokens: int) -> None:
        drawn = known_tokens - int(self._prompt[row])
        self._known[row], self._drawn[row] = known_tokens, drawn
        self._versions[request] = [(min(first, drawn), version) for first, version in self._versions[request]]

    def step(self, requests: Sequence[str], computed_n: npt.NDArray[Any], scheduled_n: npt.NDArray[Any]) -> None:
        """Announce a step's requests, with tokens read before and now; the next logits are theirs."""
        if self._repeat(requests, computed_n, scheduled_n):
            return
        self._last = None
        row_n = np.fromiter((self._rows.get(request, -1) for request in requests), dtype=np.int64, count=len(requests))
        read_n = np.asarray(computed_n, dtype=np.int64) + scheduled_n
        position_n = read_n - self._prompt[row_n]
        draws_n = (read_n >= self._known[row_n]) & (row_n >= 0)
        self._drawn[row_n[draws_n]] = position_n[draws_n] + 1
        if self._keeps_logprobs:
            kept_n = draws_n & (position_n < self._tokens)
            slot_n = np.where(kept_n, row_n * self._tokens + position_n, len(self._logprobs) - 1)
            repeats = self._tokens - 1 - int(position_n.max(initial=0))
            if self._routes is not None:
                repeats = min(repeats, self._routes.reserve(slot_n[kept_n], self._tokens))
                self._read_n = None if (scheduled_n == 1).all() else np.cumsum(scheduled_n, dtype=np.int64) - 1
            index_n = self._index_n = sent(slot_n, self._device)
            if len(requests) and bool(kept_n.all()) and not self._supports:
                self._last = _Step(list(requests), row_n, read_n, index_n, repeats)
            if self._supports:
                self._truncated = [
                    (place, int(position_n[place]), self._supports[request])
                    for place, request in enumerate(requests)
                    if draws_n[place] and request in self._supports
                ]

    @torch.inference_mode()
    def _repeat(self, requests: Sequence[str], computed_n: npt.NDArray[Any], scheduled_n: npt.NDArray[Any]) -> bool:
        """Announce the last step once more, with one more token of each request, if that is what this step is."""
        last = self._last
        if (
            last is None
            or last.repeats < 1
            or last.requests != requests
            or not np.array_equal(last.read_n, computed_n)
            or not bool((scheduled_n == 1).all())
        ):
            return False
        last.repeats -= 1
        last.read_n += 1
        self._drawn[last.row_n] += 1
        self._read_n = None
        self._index_n = last.index_n.add_(1)
        return True

    @torch.inference_mode()
    def store(self, logits_nV: torch.Tensor, token_n: torch.Tensor) -> None:
        """Record logprobs of tokens drawn from ``logits_nV``, if a :meth:`step` was announced."""
        index_n, self._index_n = self._index_n, None
        if index_n is not None:
            self._store(index_n, token_logprobs(logits_nV, token_n.view(-1)))
            self._store_supports(logits_nV)

    @torch.inference_mode()
    def store_logprobs(self, logprob_n: torch.Tensor) -> None:
        """Record logprobs, if a :meth:`step` was announced, of requests without truncated sampling."""
        index_n, self._index_n = self._index_n, None
        if index_n is not None:
            self._store(index_n, logprob_n)

    def _store(self, index_n: torch.Tensor, logprob_n: torch.Tensor) -> None:
        self._logprobs.scatter_(0, index_n, logprob_n)
        if self._routes is not None:
            self._routes.store(index_n, self._read_n)

    def _store_supports(self, logits_nV: torch.Tensor) -> None:
        announced, self._truncated = self._truncated, []
        if not announced:
            return
        places_m = torch.tensor([place for place, _, _ in announced], device=self._device)
        possible_mV = logits_nV.index_select(0, places_m) > -torch.inf
        counts_m, ids = possible_mV.sum(1), possible_mV.nonzero()[:, 1].to(torch.int32)
        parts = np.split(ids.cpu().numpy(), np.cumsum(counts_m.cpu().numpy())[:-1])
        for (_, position, supports), part in zip(announced, parts, strict=True):
            supports[position] = part.copy()  # not a view, which would keep those of all requests

    def swap(self, version: int) -> None:
        """Record that later tokens are of ``version``."""
        self._version = version
        for request, drawn in self.held.items():
            self._versions[request].append((drawn, version))

    def release(self, requests: Iterable[str]) -> Finished | None:
        """Release finished requests; return their records, if any."""
        rows = {request: self._rows.pop(request) for request in requests if request in self._rows}
        if not rows:
            return None
        self._last = None
        longest = self._tokens if self._keeps_logprobs else 0
        lengths = tuple(min(int(self._drawn[row]), longest) for row in rows.values())
        on_gpu = self._device.type == "cuda"
        host = torch.empty(sum(lengths), dtype=torch.float32, pin_memory=on_gpu)
        start = 0
        for row, length in zip(rows.values(), lengths, strict=True):
            begin = row * self._tokens
            host[start : start + length].copy_(self._logprobs[begin : begin + length], non_blocking=True)
            start += length
        routes: tuple[torch.Tensor, ...] = ()
        if self._routes is not None:
            of_rows = zip(rows.values(), lengths, strict=True)
            routes = tuple(self._routes.release(row * self._tokens, length, self._tokens) for row, length in of_rows)
        self._free.extend(rows.values())
        versions = tuple(list(dict(self._versions.pop(request)).items()) for request in rows)
        supports = tuple(self._supports.pop(request, {}) for request in rows)
        ready = _copied(self._device) if on_gpu else _nothing
        return Finished(tuple(rows), lengths, versions, host, ready, supports, routes)

    @torch.inference_mode()
    def _grow(self, rows: int, tokens: int) -> None:
        self._last = None
        grown = torch.zeros(rows * tokens + 1, dtype=torch.float32, device=self._device)
        if self._capacity:
            old = self._logprobs[:-1].view(self._capacity, self._tokens)
            grown[:-1].view(rows, tokens)[: self._capacity, : self._tokens].copy_(old)
        if self._routes is not None:
            self._routes.grow(rows, tokens, (self._capacity, self._tokens))
        self._prompt, self._known, self._drawn = (
            np.concatenate([array, np.zeros(rows - self._capacity, dtype=np.int64)])
            for array in (self._prompt, self._known, self._drawn)
        )
        self._free.extend(range(self._capacity, rows))
        self._logprobs, self._capacity, self._tokens = grown, rows, tokens


def token_logprobs(logits_nV: torch.Tensor, token_n: torch.Tensor) -> torch.Tensor:
    """Return log softmax(logits)[token] in float32, on GPUs without a copy of the logits."""
    token_n1 = token_n.to(torch.int64).unsqueeze(1)
    if logits_nV.is_cuda:
        from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

        logprobs_n1: torch.Tensor = compute_token_logprobs(logits_nV, token_n1)
        return logprobs_n1.squeeze(1)
    logits_nV = logits_nV.float()
    return logits_nV.gather(1, token_n1).squeeze(1) - logits_nV.logsumexp(1)


def _copied(device: torch.device) -> Callable[[], None]:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def _nothing() -> None:
    pass
