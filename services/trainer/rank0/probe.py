"""A few fixed sequences whose logprobs are published with a version, for replicas to verify their weights.

Token ids are random, from ``run.seed``; with windowed attention, one sequence exceeds a window by ``PAST_WINDOW``, up
to the context and ``MOST_TOKENS``.
"""

import logging
from typing import Any

import numpy as np

from services.trainer.batch.packing import MicroBatch, PackedRow, micro_batch
from services.trainer.model.engine import TrainingEngine
from services.trainer.self_test.self_test import windows
from shared.bus.messages import FinishReason, Int32Array, Probe, Sample

log = logging.getLogger(__name__)

SEQUENCES = 4
TOKENS = 16
PAST_WINDOW = 32
MOST_TOKENS = 2048


class Prober:
    """Scores the probe at every ``every``-th publication of this process, and the first (0: never); on the training
    thread.

    """

    def __init__(self, engine: TrainingEngine, seed: int, every: int, context_tokens: int = 0) -> None:
        self._engine = engine
        self._every = every
        self._publications = 0
        policy: Any = engine.policy
        self._sequences = draw(engine.vocabulary, seed, long_tokens(policy.model.config, context_tokens))

    def next(self) -> Probe | None:
        """Return the probe of the next version, or None if it carries none."""
        due = self._every > 0 and self._publications % self._every == 0
        self._publications += 1
        if not due:
            return None
        out = self._engine.evaluate(lay_out(self._sequences))
        return Probe(
            token_ids=np.concatenate(self._sequences),
            lengths=np.array([len(sequence) for sequence in self._sequences], dtype=np.int32),
            logprobs=out.policy_logprobs_N.float().cpu().numpy(),
        )


def long_tokens(config: Any, context_tokens: int = 0) -> int:
    """Return the sequence length that exceeds the model's windows, or 0.

    ``context_tokens``: the run's longest sequence; 0: the model's.
    """
    own = int(getattr(config.get_text_config(), "max_position_embeddings", None) or MOST_TOKENS)
    most = min(MOST_TOKENS, context_tokens or own, own) - 1  # an engine may need room for one more
    reach = [window + PAST_WINDOW for window in windows(config)]
    if beyond := [tokens for tokens in reach if tokens > most]:
        log.info("the probe does not pass every window", extra={"needs_tokens": max(beyond), "most_tokens": most})
    return max((tokens for tokens in reach if tokens <= most), default=0)


def draw(vocabulary: int, seed: int, long: int = 0) -> list[Int32Array]:
    """Return ``SEQUENCES`` arrays of ``TOKENS`` token ids (int32), and one of length ``long`` if set."""
    lot = np.random.default_rng(seed)
    lengths = [TOKENS] * SEQUENCES + [long] * (long > 0)
    return [lot.integers(0, vocabulary, length, dtype=np.int32) for length in lengths]


def lay_out(sequences: list[Int32Array]) -> MicroBatch:
    """Return the forward pass that scores all tokens of ``sequences`` but their first."""
    return micro_batch([PackedRow(sequence[:1], (_sample(sequence[1:]),), (0,)) for sequence in sequences])


def _sample(token_ids: Int32Array) -> Sample:
    return Sample(
        token_ids=token_ids,
        behavior_logprobs=np.zeros(len(token_ids), dtype=np.float32),
        version_spans=np.zeros((1, 2), dtype=np.int32),
        finish_reason=FinishReason.LENGTH,
        text="",
    )
