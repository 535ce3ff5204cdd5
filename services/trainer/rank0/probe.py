"""The probe: a few fixed sequences whose logprobs go out with a version, so that replicas can tell that they serve it.

Sequences of token ids are drawn once from ``run.seed`` over the whole vocabulary, so that every weight matters and nothing
depends on data. Where the model attends within windows, one more sequence goes ``PAST_WINDOW`` tokens beyond the longest that is not beyond
the context or ``MOST_TOKENS``. The trainer scores them with the weights that it trains, at temperature 1. Those are the published ones up
to number types: on a CPU both are float32 or the published ones are rounded to ``policy.dtype``; on a GPU both are
``policy.dtype``, computed by other kernels than a replica's. A gap of some thousandths of a nat is therefore no alarm.

Every rank calls :meth:`Prober.next` at the same point of its loop: ZeRO stage 3 computes together.
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
"""Length of each sequence."""
PAST_WINDOW = 32
MOST_TOKENS = 2048


class Prober:
    """Scores the probe at this process' first publication and at each ``every``-th after it; 0: never. It lives on the training thread."""

    def __init__(self, engine: TrainingEngine, seed: int, every: int, context_tokens: int = 0) -> None:
        self._engine = engine
        self._every = every
        self._publications = 0
        policy: Any = engine.policy
        self._sequences = draw(engine.vocabulary, seed, long_tokens(policy.model.config, context_tokens))

    def next(self) -> Probe | None:
        """Return the probe of the version that is published next, or None where it carries none."""
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
    """Return how long a sequence must be to go beyond the model's windows; 0: it has none, or none that can be passed.

    Args:
        config: of the model.
        context_tokens: the longest sequence of the run; 0: the model's own.
    """
    own = int(getattr(config.get_text_config(), "max_position_embeddings", None) or MOST_TOKENS)
    most = min(MOST_TOKENS, context_tokens or own, own) - 1  # an engine may want room for one more
    reach = [window + PAST_WINDOW for window in windows(config)]
    if beyond := [tokens for tokens in reach if tokens > most]:
        log.info("the probe does not pass every window", extra={"needs_tokens": max(beyond), "most_tokens": most})
    return max((tokens for tokens in reach if tokens <= most), default=0)


def draw(vocabulary: int, seed: int, long: int = 0) -> list[Int32Array]:
    """Return ``SEQUENCES`` arrays of ``TOKENS`` token ids (int32) below ``vocabulary``, the same for the same seed; with ``long``, one more of these."""
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
