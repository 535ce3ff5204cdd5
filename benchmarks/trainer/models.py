"""Random models of ``benchmarks.trainer.step``, and padded sequences."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.shapes import config_of
from penstock.services.trainer.batch.packing import MicroBatch, PackedRow
from penstock.services.trainer.batch.segments import Int64Array
from penstock.services.trainer.model.engine import numbered
from penstock.services.trainer.model.layers import kernels
from penstock.services.trainer.model.layers.logits import TokenLogprobs, token_logprobs
from penstock.services.trainer.model.policy import Policy
from penstock.shared.settings import Settings


def random_model(shape: Mapping[str, Any], settings: Settings, device: str) -> Any:
    """Return a random model, whole on the device: the engine divides it, as the trainer's."""
    from transformers import AutoModelForCausalLM

    config = config_of(shape, max_position_embeddings=262_144, rope_theta=1e6, attn_implementation="sdpa")
    dtype = torch.bfloat16 if settings.policy.dtype == "bfloat16" else torch.float32
    with numbered(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    kernels.install(model, settings.trainer.kernels, device)
    return model


@dataclasses.dataclass(frozen=True)
class Padded:
    """``B`` × ``T`` right-padded sequences, and positions before trained tokens."""

    input_ids_BT: Int64Array
    rows_N: Int64Array
    columns_N: Int64Array
    targets_N: Int64Array

    @property
    def tokens(self) -> int:
        """Computed positions."""
        return int(self.input_ids_BT.size)


class EitherPolicy(Policy):
    """A policy that also accepts a padded rectangle."""

    def forward(self, batch: MicroBatch | Padded) -> TokenLogprobs:
        """Return the logprobs of ``batch``'s trained tokens."""
        if isinstance(batch, MicroBatch):
            return super().forward(batch)
        output = self.model.get_output_embeddings()
        device = next(self.parameters()).device
        input_ids, rows, columns, targets = (
            torch.from_numpy(places).to(device)
            for places in (batch.input_ids_BT, batch.rows_N, batch.columns_N, batch.targets_N)
        )
        hidden_BTD = self.model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
        places = rows * hidden_BTD.shape[1] + columns
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, places)
        ones = torch.ones_like(targets, dtype=torch.float32)
        return token_logprobs(
            hidden_ND, output, targets, ones, self._chunk_tokens, fused=self._fused_logits, kind=self._logits
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Sequence:
    token_ids: Int64Array
    prompt: int
    """Tokens that are not trained."""


def by_arrival(rows: Sequence[PackedRow], cap: int, rank: int, ranks: int) -> list[Padded]:
    """Return ``rank``'s sequences in order, sized for the longest under ``cap``."""
    sequences = _sequences(rows)
    count = max(1, cap // max(len(sequence.token_ids) for sequence in sequences))
    mine = sequences[rank::ranks]
    return [_padded(mine[start : start + count]) for start in range(0, len(mine), count)]


def by_length(rows: Sequence[PackedRow], cap: int, rank: int, ranks: int) -> list[Padded]:
    """Return ``rank``'s sequences, longest first; equal counts on all ranks."""
    sequences = sorted(_sequences(rows), key=lambda sequence: -len(sequence.token_ids))
    mine = sequences[rank::ranks]
    return [_padded(mine[start:end]) for start, end in _cuts(sequences[::ranks], cap)]


def _cuts(longest: Sequence[_Sequence], cap: int) -> Iterator[tuple[int, int]]:
    """Cut by the rank with the longest sequences, so all fit."""
    start = 0
    while start < len(longest):
        end = start + max(1, cap // len(longest[start].token_ids))
        yield start, min(end, len(longest))
        start = end


def _sequences(rows: Sequence[PackedRow]) -> list[_Sequence]:
    return [
        _Sequence(np.concatenate([row.prompt_token_ids, sample.token_ids]).astype(np.int64), len(row.prompt_token_ids))
        for row in rows
        for sample in row.samples
    ]


def _padded(sequences: Sequence[_Sequence]) -> Padded:
    width = max(len(sequence.token_ids) for sequence in sequences) - 1
    input_ids_BT = np.zeros((len(sequences), width), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        input_ids_BT[row, : len(sequence.token_ids) - 1] = sequence.token_ids[:-1]
    trained = [np.arange(sequence.prompt - 1, len(sequence.token_ids) - 1) for sequence in sequences]
    return Padded(
        input_ids_BT,
        rows_N=np.repeat(np.arange(len(sequences)), [len(places) for places in trained]),
        columns_N=np.concatenate(trained),
        targets_N=np.concatenate([sequence.token_ids[sequence.prompt :] for sequence in sequences]),
    )
