"""Cut a packed row into its sequences.

A :class:`SequencePlan` lists the calls, one :class:`SequenceSpan` each, and where the outputs belong in the row::

    row        P P P P | a a | b b b | Q Q | c c c c          two prompts (P, Q) with their completions
    alone      PPPPaa, PPPPbbb, QQcccc                        each sequence by itself
    whole      [PPPPbbb, PPPPaa., QQcccc.]                    similar sequences together, right-padded (.)
    forked     PPP → its state → [Pbbb, Paa.]; QQcccc         most of a long prompt once; completions continue

The sequences of a tree are its paths; of a token in several of them, one output remains, as all are equal.

Right padding changes no earlier output of a causal module.

Shapes: ``T`` tokens of the row, ``G`` sequences of a span, ``W`` tokens of the longest of them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.batch.segments import Int64Array, Segments
from services.trainer.model.layers.gather import gather_rows

FORK_TOKENS = 128
"""Shorter prompts are repeated: extra calls cost more."""
CHUNK_TOKENS = 64
"""Forks align with the gated delta rule's chunks, so that rounding is unchanged."""
_PADDED = 1.3
_SLACK_TOKENS = 2048
"""Tolerated padding of a span, besides ``_PADDED``."""


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceSpan:
    """Tokens that go through a module in one call."""

    places_GW: Tensor
    """Places in the row; padding repeats a sequence's last one."""
    prompts_G: Tensor | None = None
    """Prompt that each sequence continues, among spans with state; None: no prompt."""
    keeps_state: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SequencePlan:
    spans: list[SequenceSpan]
    places_T: Tensor
    """Places of the row's tokens in the flattened outputs."""
    idle_calls: int = 0
    """To match other ranks: ZeRO stage 3 gathers at every call."""


def alone(segments: Segments, device: torch.device) -> SequencePlan:
    builder = _Builder(segments)
    for path in segments.paths:
        builder.add([segments.places(path)])
    return builder.plan(device)


def whole(segments: Segments, device: torch.device) -> SequencePlan:
    """Similar sequences, prompts included, together."""
    builder = _Builder(segments)
    builder.add_similar([segments.places(path) for path in segments.paths])
    return builder.plan(device)


def forked(segments: Segments, device: torch.device) -> SequencePlan:
    """Prompts of at least ``FORK_TOKENS`` with several completions are computed once."""
    builder, completions, prompts = _Builder(segments), list[Int64Array](), list[int]()
    families: dict[int, list[list[int]]] = {}
    for path in segments.paths:
        families.setdefault(path[0], []).append(path)
    long = {root for root, paths in families.items() if len(paths) > 1 and segments.lengths_K[root] >= FORK_TOKENS}
    for number, root in enumerate(sorted(long)):
        tokens = segments.lengths_K[root] // CHUNK_TOKENS * CHUNK_TOKENS
        builder.add([segments.places([root])[:tokens]], keeps_state=True)
        completions += [segments.places(path)[tokens:] for path in families[root]]
        prompts += [number] * len(families[root])
    builder.add_similar(completions, prompts)
    builder.add_similar([segments.places(path) for path in segments.paths if path[0] not in long])
    return builder.plan(device)


def idle_calls(calls: int, device: torch.device) -> int:
    """Return how many more calls another rank makes; collective, before the calls."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0
    most = torch.tensor([calls], dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most.item()) - calls


def gather(value: Any, places_GW: Tensor, tokens: int) -> Any:
    """Return ``value``, perhaps a tuple, with tensors of 1 × ``tokens`` × … as G × W × …."""
    if isinstance(value, tuple):
        return tuple(gather(part, places_GW, tokens) for part in value)
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[:2] != (1, tokens):
        return value
    return gather_rows(value[0], places_GW.flatten()).view(*places_GW.shape, *value.shape[2:])


def scatter(outputs: Sequence[Any], plan: SequencePlan) -> Any:
    """Return the spans' outputs, perhaps tuples, as 1 × T × …; anything not per token becomes None."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(scatter([output[part] for output in outputs], plan) for part in range(len(first)))
    if not isinstance(first, Tensor) or first.shape[:2] != plan.spans[0].places_GW.shape:
        return None
    parts = [output.flatten(0, 1) for output in outputs]
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    return joined.index_select(0, plan.places_T)[None]


class _Builder:
    def __init__(self, segments: Segments) -> None:
        self._where_T = np.full(int(segments.lengths_K.sum()), -1, dtype=np.int64)
        self._found: list[tuple[Int64Array, Int64Array | None, bool]] = []
        self._outputs = 0

    def add(
        self, sequences: Sequence[Int64Array], prompts: Sequence[int] | None = None, *, keeps_state: bool = False
    ) -> None:
        """Add a span of ``sequences`` (places), which continue ``prompts``."""
        # Some kernels treat a single token as a decoding step, without gradient.
        width = max(1 if prompts is None else 2, *(len(sequence) for sequence in sequences))
        places_GW = np.stack([np.pad(sequence, (0, width - len(sequence)), mode="edge") for sequence in sequences])
        for g, sequence in enumerate(sequences):
            self._where_T[sequence] = np.arange(len(sequence)) + self._outputs + g * width
        self._outputs += places_GW.size
        self._found.append((places_GW, None if prompts is None else np.array(prompts, dtype=np.int64), keeps_state))

    def add_similar(self, sequences: Sequence[Int64Array], prompts: Sequence[int] | None = None) -> None:
        for run in similar([len(sequence) for sequence in sequences]):
            self.add([sequences[n] for n in run], None if prompts is None else [prompts[n] for n in run])

    def plan(self, device: torch.device) -> SequencePlan:
        assert (self._where_T >= 0).all()
        put: Callable[[Int64Array], Tensor] = lambda places: torch.from_numpy(places).to(device)  # noqa: E731
        spans = [
            SequenceSpan(put(places_GW), None if prompts_G is None else put(prompts_G), keeps_state)
            for places_GW, prompts_G, keeps_state in self._found
        ]
        return SequencePlan(spans, put(self._where_T))


def similar(lengths: Sequence[int]) -> list[list[int]]:
    """Group indices of ``lengths``, longest first, for little padding."""
    runs: list[list[int]] = []
    longest = tokens = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        padded = longest * (len(runs[-1]) + 1) if runs else 0
        if runs and padded <= _PADDED * (tokens + lengths[number]) + _SLACK_TOKENS:
            runs[-1].append(number)
            tokens += lengths[number]
        else:
            runs.append([number])
            longest = tokens = lengths[number]
    return runs
