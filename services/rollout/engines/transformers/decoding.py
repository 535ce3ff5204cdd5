"""Decode a batch of groups in lockstep: one prefill per prompt, then one token per row at a time.

::

    prompts, left-padded         prefill once a prompt     repeat the cache        decode, drop finished rows
      · · 1 2 +                ┌──────────────────────┐   row 0 ┐                  row 0  4  6  ⏎
      3 4 5 + 6           ──▶  │ logits of last token │─▶ row 1 ┘ of prompt 0  ─▶ row 1  4  ⏎
                               └──────────────────────┘   row 2 ─ of prompt 1      row 2  9  ⏎

Once half of the rows are finished, they are dropped (compaction).

Shapes: P prompts, N rows of the whole batch, n remaining rows, L padded prompt tokens, T new tokens, V vocabulary.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.services.rollout.engines.engine import GeneratedSample, GenerationRequest, unstopped
from penstock.services.rollout.engines.transformers.cache import make_room, select
from penstock.services.rollout.engines.transformers.choice import Choice, Support, Truncation
from penstock.services.rollout.engines.transformers.routes import RouteRecorder
from penstock.shared.bus.messages import FinishReason, Int32Array, PolicyVersion
from penstock.shared.model.routes import RouteArray


class Cache(Protocol):
    """Required operations of a key-value cache."""

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Select rows in order, with repetition."""


class ModelOutput(Protocol):
    logits: torch.Tensor
    past_key_values: Cache


class LanguageModel(Protocol):
    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        past_key_values: Cache | None,
        use_cache: bool,
        logits_to_keep: int,
    ) -> ModelOutput:
        """Return the last ``logits_to_keep`` logits and the extended cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """Ids that end a completion, and one for padding."""

    stop: tuple[int, ...]
    padding: int = 0


class Batch:
    """A decoding batch, used under ``torch.inference_mode``. ``recorder``: keeps the experts of each token."""

    def __init__(
        self,
        model: LanguageModel,
        requests: Sequence[GenerationRequest],
        tokens: Tokens,
        device: torch.device,
        recorder: RouteRecorder | None = None,
    ) -> None:
        self._model, self._device, self._recorder = model, device, recorder
        self._seed_N = seeds_of_rows(requests)
        samplings = [request.sampling for request in requests]
        samples = np.array([sampling.samples for sampling in samplings])
        self._first_row = np.concatenate([[0], samples.cumsum()])
        self._group_n = np.repeat(np.arange(len(requests)), samples)
        limits_N = np.repeat([sampling.max_new_tokens for sampling in samplings], samples)
        temperatures_N = np.repeat([sampling.temperature for sampling in samplings], samples)
        self._greedy_N = temperatures_N == 0
        rows, longest = len(limits_N), int(limits_N.max())
        self.unfinished = rows
        """Rows that the next step draws a token of."""

        self._stop = torch.tensor(tokens.stop, dtype=torch.long, device=device)
        self._limit_n = torch.from_numpy(limits_N).to(device)
        self._choice_n = Choice.of(torch.from_numpy(temperatures_N).to(device, torch.float32))
        self._samplings = samplings
        self._stop_texts = {place: request.stop for place, request in enumerate(requests) if request.stop is not None}
        self._minimum_n = torch.from_numpy(np.repeat([s.min_new_tokens for s in samplings], samples)).to(device)
        self._longest_minimum = int(self._minimum_n.max())
        self._truncation_n = Truncation.of(samplings, samples, device)
        self._supports: list[Support] = []
        self._alive_n = torch.arange(rows, device=device)
        self._done_n = torch.zeros(rows, dtype=torch.bool, device=device)
        self._tokens_NT = torch.zeros(rows, longest, dtype=torch.int32, device=device)
        self._logprobs_NT = torch.zeros(rows, longest, dtype=torch.float32, device=device)
        self._length_N = torch.zeros(rows, dtype=torch.int32, device=device)
        self._stopped_N = torch.zeros(rows, dtype=torch.bool, device=device)
        if recorder is not None:
            self._routes_NTLK = torch.zeros(rows, longest, *recorder.shape, dtype=recorder.dtype, device=device)

        prompts, self._prompt_of_group = _distinct([request.prompt_token_ids for request in requests])
        self._prompt_lengths = [len(prompt) for prompt in prompts]
        self._prompts, mask_PL = _pad_left(prompts, tokens.padding, device)
        self._input_ids = self._prompts
        self._padded = not bool(mask_PL.all())
        self._mask = torch.nn.functional.pad(mask_PL, (0, longest), value=1)
        self._position_n = mask_PL.sum(1)
        self._prompt_length = mask_PL.shape[1]
        self._cache: Cache | None = None
        self._written = 0
        self._version_spans: list[tuple[int, PolicyVersion]] = []
        self._undelivered = set(range(len(requests)))

    @property
    def finished(self) -> bool:
        """Whether every group was returned or dropped."""
        return not self._undelivered

    def drop(self, group: int) -> None:
        """Forget a group; its rows leave at the next compaction."""
        if group in self._undelivered:
            self._undelivered.remove(group)
            self._done_n |= torch.from_numpy(self._group_n == group).to(self._device)

    def step(self, version: PolicyVersion) -> list[tuple[int, tuple[GeneratedSample, ...]]]:
        """Decode one token per row with ``version``; return (request index, samples) of finished groups."""
        logits_nV = self._decode() if self._written else self._prefill()
        if not self._version_spans or self._version_spans[-1][1] != version:
            self._version_spans.append((self._written, version))
        logits_nV = self._restrict(logits_nV.float())
        token_n, logprob_n = self._choice_n.draw(logits_nV, self._uniform())
        self._record(token_n, logprob_n)
        self._input_ids = token_n.unsqueeze(1)
        done_n = self._done_n.cpu().numpy()
        self.unfinished = len(done_n) - int(done_n.sum())
        whole = self._whole(done_n)
        if not self.finished and 2 * self.unfinished <= len(done_n):
            self._compact(done_n)
        return whole

    def _restrict(self, logits_nV: torch.Tensor) -> torch.Tensor:
        if self._written < self._longest_minimum:
            stop = self._stop[self._stop < logits_nV.shape[1]]
            early_n1 = (self._written < self._minimum_n)[:, None]
            logits_nV = logits_nV.index_copy(1, stop, logits_nV[:, stop].masked_fill(early_n1, -torch.inf))
        if self._truncation_n is None:
            return logits_nV
        possible_nV = self._truncation_n.possible(logits_nV / self._choice_n.temperature_n1)
        counts_n = (possible_nV & self._truncation_n.on_n1).sum(1)
        ids = (possible_nV & self._truncation_n.on_n1).nonzero()[:, 1]
        self._supports.append(Support.of(self._alive_n, counts_n, ids))
        return logits_nV.masked_fill(~possible_nV, -torch.inf)

    def _uniform(self) -> torch.Tensor:
        uniform_N = np.where(self._greedy_N, 0.0, uniform(self._seed_N, self._written))
        return torch.from_numpy(uniform_N).to(self._device)[self._alive_n].unsqueeze(1)

    def _prefill(self) -> torch.Tensor:
        mask_PL = self._mask[:, : self._prompt_length]
        output = self._model(
            input_ids=self._input_ids,
            attention_mask=mask_PL if self._padded else None,
            position_ids=(mask_PL.cumsum(1) - 1).clamp(min=0),
            past_key_values=None,
            use_cache=True,
            logits_to_keep=1,
        )
        if self._recorder is not None:
            self._prompt_routes_PTLK = self._recorder.last(len(self._prompts))
        rows = torch.from_numpy(self._prompt_of_group[self._group_n]).to(self._device)
        self._cache = output.past_key_values
        select(self._cache, rows)
        make_room(self._cache)
        self._position_n, self._mask = self._position_n[rows], self._mask[rows]
        return output.logits[:, -1][rows]

    @property
    def cache(self) -> Cache | None:
        """The key-value cache; None before the first step or after it was dropped."""
        return self._cache

    def drop_cache(self) -> None:
        """Free the key-value cache; the next step computes it again."""
        self._cache = None

    def _recompute(self) -> Cache:
        """Return the cache of prompts and tokens so far, without the last token, under the present weights."""
        tokens_nT = self._tokens_NT[self._alive_n, : self._written - 1].long()
        ids_nT = torch.cat(
            [self._prompts[torch.from_numpy(self._prompt_of_group[self._group_n]).to(self._device)], tokens_nT], dim=1
        )
        mask_nT = self._mask[:, : ids_nT.shape[1]]
        output = self._model(
            input_ids=ids_nT,
            attention_mask=mask_nT if self._padded else None,
            position_ids=(mask_nT.cumsum(1) - 1).clamp(min=0),
            past_key_values=None,
            use_cache=True,
            logits_to_keep=1,
        )
        make_room(output.past_key_values)
        return output.past_key_values

    def _decode(self) -> torch.Tensor:
        if self._cache is None:
            self._cache = self._recompute()
        length = self._prompt_length + self._written
        output = self._model(
            input_ids=self._input_ids,
            attention_mask=self._mask[:, :length] if self._padded else None,
            position_ids=(self._position_n + (self._written - 1)).unsqueeze(1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if self._recorder is not None:
            self._routes_NTLK[self._alive_n, self._written - 1] = self._recorder.last(len(self._alive_n))[:, 0]
        return output.logits[:, -1]

    def _record(self, token_n: torch.Tensor, logprob_n: torch.Tensor) -> None:
        self._tokens_NT[self._alive_n, self._written] = token_n.to(torch.int32)
        self._logprobs_NT[self._alive_n, self._written] = logprob_n
        self._written += 1
        stopped_n = torch.isin(token_n, self._stop) | self._complete_texts()
        ended_n = (stopped_n | (self._limit_n <= self._written)) & ~self._done_n
        ended = self._alive_n[ended_n]
        self._length_N[ended] = self._written
        self._stopped_N[ended] = stopped_n[ended_n]
        self._done_n |= ended_n

    def _complete_texts(self) -> torch.Tensor:
        """Return which rows' last token completes a stop text."""
        complete_n = torch.zeros_like(self._done_n)
        for place, group in enumerate(self._group_n.tolist() if self._stop_texts else []):
            if group in self._stop_texts and not self._done_n[place]:
                ids = self._tokens_NT[self._alive_n[place], : self._written].cpu().numpy()
                complete_n[place] = self._stop_texts[group].end(ids, self._written - 1) > 0
        return complete_n

    def _whole(self, done_n: npt.NDArray[np.bool_]) -> list[tuple[int, tuple[GeneratedSample, ...]]]:
        unfinished = set(self._group_n[~done_n].tolist())
        groups = sorted(self._undelivered - unfinished)
        self._undelivered.difference_update(groups)
        if not groups:
            return []
        samples = iter(self._samples(groups))
        return [(group, tuple(itertools.islice(samples, self._samplings[group].samples))) for group in groups]

    def _samples(self, groups: Sequence[int]) -> Iterator[GeneratedSample]:
        """Return the samples of finished groups, copied from the device together."""
        owners = [(group, row) for group in groups for row in range(*self._first_row[group : group + 2].tolist())]
        rows = torch.tensor([row for _, row in owners], device=self._device)
        token_ids = self._tokens_NT[rows].cpu().numpy()
        logprobs = self._logprobs_NT[rows].cpu().numpy()
        lengths: list[int] = self._length_N[rows].tolist()
        stopped: list[bool] = self._stopped_N[rows].tolist()
        spans = {length: self._spans(length) for length in set(lengths)}
        for place, ((group, row), length) in enumerate(zip(owners, lengths, strict=True)):
            support_sizes, support_ids = self._support(group, row, length)
            yield GeneratedSample(
                token_ids=token_ids[place, :length],
                behavior_logprobs=logprobs[place, :length],
                version_spans=spans[length],
                finish_reason=FinishReason.STOP if stopped[place] else FinishReason.LENGTH,
                support_sizes=support_sizes,
                support_ids=support_ids,
                routes=self._routes_of(group, row, length),
            )

    def _routes_of(self, group: int, row: int, length: int) -> RouteArray | None:
        if self._recorder is None:
            return None
        prompt = self._prompt_of_group[group]
        read_TLK = self._prompt_routes_PTLK[prompt, self._prompt_length - self._prompt_lengths[prompt] :]
        routes: RouteArray = torch.cat([read_TLK, self._routes_NTLK[row, : length - 1]]).cpu().numpy()
        return routes

    def _support(self, group: int, row: int, length: int) -> tuple[Int32Array, Int32Array]:
        sampling = self._samplings[group]
        if not (sampling.top_k and sampling.is_restricted):
            return unstopped(length, sampling, tuple(self._stop.tolist()))
        parts = [support.ids_of(row) for support in self._supports[:length]]
        return np.array([len(part) for part in parts], dtype=np.int32), np.concatenate(parts)

    def _spans(self, length: int) -> Int32Array:
        return np.array([span for span in self._version_spans if span[0] < length], dtype=np.int32)

    def _compact(self, done_n: npt.NDArray[np.bool_]) -> None:
        kept = torch.from_numpy(np.flatnonzero(~done_n)).to(self._device)
        assert self._cache is not None
        select(self._cache, kept)
        self._group_n = self._group_n[~done_n]
        self._choice_n = self._choice_n.select(kept)
        self._minimum_n = self._minimum_n[kept]
        if self._truncation_n is not None:
            self._truncation_n = self._truncation_n.select(kept)
        self._alive_n, self._done_n, self._limit_n = self._alive_n[kept], self._done_n[kept], self._limit_n[kept]
        self._mask, self._position_n = self._mask[kept], self._position_n[kept]
        self._input_ids = self._input_ids[kept]


def seeds_of_rows(requests: Sequence[GenerationRequest]) -> npt.NDArray[np.uint64]:
    """Return a seed of each request's samples."""
    samples = [request.sampling.samples for request in requests]
    seed_N = np.repeat(np.array([request.seed for request in requests], np.uint64), samples)
    row_N = np.concatenate([np.arange(count, dtype=np.uint64) for count in samples])
    return np.where(row_N == 0, seed_N, _mixed(seed_N ^ _mixed(row_N)))


def uniform(seed_N: npt.NDArray[np.uint64], step: int) -> npt.NDArray[np.float64]:
    """Return the number in [0, 1) of each seed at a step: SplitMix64 (Steele, Lea and Flood, 2014)."""
    bits_N = _mixed(seed_N + np.uint64((step + 1) * 0x9E3779B97F4A7C15 % (1 << 64))) >> np.uint64(11)
    return bits_N.astype(np.float64) * 2.0**-53


def _mixed(z_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z_N = (z_N ^ (z_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z_N = (z_N ^ (z_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z_N ^ (z_N >> np.uint64(31))


def _distinct(prompts: Sequence[Int32Array]) -> tuple[list[Int32Array], npt.NDArray[np.int64]]:
    """Return the different prompts, and the index of each group's."""
    distinct: dict[bytes, int] = {}
    index = [distinct.setdefault(prompt.tobytes(), len(distinct)) for prompt in prompts]
    return [np.frombuffer(prompt, np.int32) for prompt in distinct], np.array(index)


def _pad_left(prompts: Sequence[Int32Array], padding: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(len(prompt) for prompt in prompts)
    ids_PL = np.full((len(prompts), length), padding, dtype=np.int64)
    mask_PL = np.zeros((len(prompts), length), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids_PL[row, length - len(prompt) :] = prompt
        mask_PL[row, length - len(prompt) :] = 1
    return torch.from_numpy(ids_PL).to(device), torch.from_numpy(mask_PL).to(device)
