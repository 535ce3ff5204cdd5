"""Choose tokens from logits: sampled, truncated, or greedy.

Truncation is vLLM's (``vllm.v1.sample``): after temperature, min-p, then top-k, then top-p of what is left; tokens as
probable as the last that top-k keeps are kept too.

Shapes: ``n`` rows, ``V`` vocabulary.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock.shared.bus.messages import Int32Array, Sampling


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Token choice per row: sampled, or greedy at temperature 0."""

    temperature_n1: torch.Tensor
    greedy_n: torch.Tensor
    any_greedy: bool
    all_greedy: bool

    @classmethod
    def of(cls, temperature_n: torch.Tensor) -> "Choice":
        greedy_n = temperature_n == 0
        temperature_n1 = torch.where(greedy_n, 1.0, temperature_n).unsqueeze(1)
        return cls(temperature_n1, greedy_n, bool(greedy_n.any()), bool(greedy_n.all()))

    def select(self, kept: torch.Tensor) -> "Choice":
        greedy_n = self.greedy_n[kept]
        return Choice(self.temperature_n1[kept], greedy_n, bool(greedy_n.any()), bool(greedy_n.all()))

    def draw(self, logits_nV: torch.Tensor, uniform_n1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's token and its logprob under softmax(logits / temperature).

        Inverts the float64 cumulative distribution; probability 0 is never drawn.
        """
        logprobs_nV = torch.log_softmax(logits_nV / self.temperature_n1, dim=-1)
        if self.all_greedy:
            token_n = logits_nV.argmax(-1)
        else:
            cumulative_nV = logprobs_nV.double().exp().cumsum(-1)
            scaled_n1 = uniform_n1 * cumulative_nV[:, -1:]
            token_n = torch.searchsorted(cumulative_nV, scaled_n1, right=True).squeeze(1)
            token_n.clamp_(max=logits_nV.shape[1] - 1)
            if self.any_greedy:
                token_n = torch.where(self.greedy_n, logits_nV.argmax(-1), token_n)
        return token_n, logprobs_nV.gather(1, token_n.unsqueeze(1)).squeeze(1)


@dataclasses.dataclass(frozen=True, slots=True)
class Truncation:
    """Limits per row; rows that are not truncated have none."""

    top_k_n1: torch.Tensor
    top_p_n1: torch.Tensor
    min_p_n1: torch.Tensor
    on_n1: torch.Tensor
    """Whether the row is truncated."""

    @classmethod
    def of(
        cls, samplings: Sequence[Sampling], samples: npt.NDArray[np.int64], device: torch.device
    ) -> "Truncation | None":
        """Return the limits of each request's samples, or None if no request is truncated."""
        on = [sampling.top_k > 0 and sampling.temperature > 0 for sampling in samplings]
        if not any(on):
            return None
        columns = (
            [sampling.top_k for sampling in samplings],
            [sampling.top_p for sampling in samplings],
            [sampling.min_p for sampling in samplings],
            on,
        )
        return cls(*(torch.from_numpy(np.repeat(column, samples)).to(device)[:, None] for column in columns))

    def select(self, kept: torch.Tensor) -> "Truncation":
        return Truncation(self.top_k_n1[kept], self.top_p_n1[kept], self.min_p_n1[kept], self.on_n1[kept])

    def possible(self, scaled_nV: torch.Tensor) -> torch.Tensor:
        """Return which tokens may be drawn (n × V), by logits after temperature."""
        sorted_nV, ids_nV = scaled_nV.sort(dim=-1, descending=True, stable=True)
        probable_nV = sorted_nV.softmax(-1)
        kept_nV = probable_nV >= self.min_p_n1 * probable_nV[:, :1]
        last_n1 = sorted_nV.gather(1, (self.top_k_n1 - 1).clamp(0, scaled_nV.shape[1] - 1))
        kept_nV &= sorted_nV >= last_n1
        left_nV = sorted_nV.masked_fill(~kept_nV, -torch.inf).softmax(-1)
        kept_nV &= left_nV.cumsum(-1) - left_nV < self.top_p_n1
        kept_nV[:, 0] = True
        kept_nV &= sorted_nV > -torch.inf
        return torch.zeros_like(kept_nV).scatter(1, ids_nV, kept_nV) | ~self.on_n1


@dataclasses.dataclass(frozen=True, slots=True)
class Support:
    """The possible tokens of one decoding step."""

    rows: dict[int, int]
    """Places of rows of the batch."""
    ends: npt.NDArray[np.int64]
    ids: Int32Array

    @classmethod
    def of(cls, rows_n: torch.Tensor, counts_n: torch.Tensor, ids: torch.Tensor) -> "Support":
        """Return the support of ``rows_n``, with ``counts_n`` tokens each of ``ids``."""
        places = {row: place for place, row in enumerate(rows_n.tolist())}
        return cls(places, counts_n.cumsum(0).cpu().numpy(), ids.to(torch.int32).cpu().numpy())

    def ids_of(self, row: int) -> Int32Array:
        """Return the possible tokens of a row."""
        place = self.rows[row]
        return self.ids[self.ends[place - 1] if place else 0 : self.ends[place]]
