"""What a frozen model says of the tokens of completions."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from shared.bus.branches import is_branched
from shared.bus.encoding.sample_checks import no_distribution
from shared.bus.messages import Float32Array, Int32Array, RolloutGroup
from shared.errors import PermanentError, TemporaryError


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Logprobs of tokens (nats), and with k > 0 the model's k most probable tokens at each, ascending by id."""

    logprobs_N: Float32Array
    top_ids_NK: Int32Array | None = None
    top_logprobs_NK: Float32Array | None = None


def join(readings: Sequence[Reading]) -> Reading:
    """Concatenate the readings of samples."""
    ids = [reading.top_ids_NK for reading in readings if reading.top_ids_NK is not None]
    logprobs = [reading.top_logprobs_NK for reading in readings if reading.top_logprobs_NK is not None]
    logprobs_N = np.concatenate([reading.logprobs_N for reading in readings])
    if not ids:
        return Reading(logprobs_N)
    return Reading(logprobs_N, np.concatenate(ids), np.concatenate(logprobs))


def require_one_branch(of: str, group: RolloutGroup) -> None:
    """Raises PermanentError for what is no sequence after the group's prompt."""
    if not len(group.prompt_token_ids) or any(is_branched(sample) for sample in group.samples):
        raise PermanentError(
            f"{of} reads one sequence after the group's prompt, found an episode of several branches or with a prompt of its own "
            f'({group.prompt.problem}): set algorithm.reference = "trainer", or train without a teacher'
        )


def check(reading: Reading, of: str, group: RolloutGroup, top_k: int = 0) -> Reading:
    """Return ``reading`` of the model ``of``. Raises TemporaryError unless it has finite logprobs of exactly the tokens."""
    tokens = sum(len(sample.token_ids) for sample in group.samples)
    if wrong := _wrong(reading, tokens, top_k):
        raise TemporaryError(f"{of} unavailable: expected {wrong} ({group.prompt.problem})")
    return reading


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
