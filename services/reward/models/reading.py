"""What a frozen model says of the tokens of completions."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from penstock.shared.bus.branches import branches
from penstock.shared.bus.encoding.sample_checks import no_distribution
from penstock.shared.bus.messages import Float32Array, Int32Array, RolloutGroup
from penstock.shared.errors import TemporaryError


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Logprobs of tokens (nats), and with k > 0 the model's k most probable tokens at each, ascending by id."""

    logprobs_N: Float32Array
    top_ids_NK: Int32Array | None = None
    top_logprobs_NK: Float32Array | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Tokens to read after others: a completion, or a branch of an episode."""

    sample: int
    prompt_token_ids: Int32Array
    token_ids: Int32Array
    places: Int32Array
    """Of the tokens in the sample."""


def spans(group: RolloutGroup) -> list[Span]:
    """Return what to read, so that every sampled token is read once, after what the policy saw."""
    prompt = group.prompt_token_ids
    return [
        Span(number, np.concatenate((prompt, ids[branch.before])), ids[branch.places], branch.places)
        for number, (sample, ids) in enumerate((sample, sample.token_ids) for sample in group.samples)
        for branch in branches(sample)
    ]


def join(parts: Sequence[Span], readings: Sequence[Reading], of: str, group: RolloutGroup, top_k: int = 0) -> Reading:
    """Return what the model ``of`` says of all tokens of the samples, concatenated; tokens that were given and not read have
    logprob 0, or any most probable tokens, which no loss reads.

    Raises:
        TemporaryError: there are not finite logprobs of exactly the tokens.
    """
    starts = np.cumsum([0, *(len(sample.token_ids) for sample in group.samples)])
    logprobs_N = np.zeros(starts[-1], np.float32)
    ids_NK = np.tile(np.arange(top_k, dtype=np.int32), (len(logprobs_N), 1))
    top_NK = np.full(ids_NK.shape, -math.log(max(1, top_k)), np.float32)
    for span, reading in zip(parts, readings, strict=True):
        if wrong := _wrong(reading, len(span.token_ids), top_k):
            raise TemporaryError(f"{of} unavailable: expected {wrong} ({group.prompt.problem})")
        places = starts[span.sample] + span.places
        logprobs_N[places] = reading.logprobs_N
        if reading.top_ids_NK is not None and reading.top_logprobs_NK is not None:
            ids_NK[places], top_NK[places] = reading.top_ids_NK, reading.top_logprobs_NK
    return Reading(logprobs_N, ids_NK, top_NK) if top_k else Reading(logprobs_N)


def _wrong(reading: Reading, tokens: int, top_k: int) -> str:
    ids_NK, top_NK = reading.top_ids_NK, reading.top_logprobs_NK
    if len(reading.logprobs_N) != tokens:
        return f"a logprob of each of {tokens} tokens, found {len(reading.logprobs_N)}"
    if not np.isfinite(reading.logprobs_N).all():
        return "finite logprobs, found others: the model gives numbers that are not finite"
    if not top_k:
        return ""
    if ids_NK is None or top_NK is None or not ids_NK.shape == top_NK.shape == (tokens, top_k):
        shapes = [None if part is None else part.shape for part in (ids_NK, top_NK)]
        return f"{top_k} most probable tokens at each of {tokens} positions, found {shapes}"
    if not np.isfinite(top_NK).all():
        return "finite logprobs of the most probable tokens, found others"
    wrong = no_distribution(ids_NK, top_NK)
    return f"different most probable tokens, found {wrong}" if wrong else ""
