"""The forward passes of one step's updates: each is tried on all ranks, and counted; a replay repeats what did not fit.

::

    attempt      0      1      2      3      4          memory was short on rank 1 in attempt 1, which was cut into 2 and 3
    ranks        ·     (1,)    ·      ·      ·          plan.misfits = (Misfit(1, (1,)),)

Which passes fit depends on the memory of the moment, so a step's plan notes them, and the journal holds the plan. A replay takes
the passes in ``repeated`` for misfits without trying them. Random numbers (LoRA's dropout) are seeded for each attempt by run, step,
rank and attempt, so neither what ran before nor a failed attempt changes them, and no generator is part of a checkpoint.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from services.trainer.batch.packing import MicroBatch
from services.trainer.model.engine import TrainingEngine
from shared.bus.messages import Misfit
from shared.process.allocation import is_out_of_memory

T = TypeVar("T")


class ForwardPasses:
    """Counts the attempts of one step.

    Args:
        engine: tells whether memory may be short, and asks the other ranks.
        seed: what distinguishes this step's random numbers: the run's seed and the step's number.
        repeated: of a replay: what did not fit when the step was made.
    """

    def __init__(self, engine: TrainingEngine, seed: tuple[int, int], repeated: Sequence[Misfit] = ()) -> None:
        self._engine = engine
        self._seed = seed
        self._repeated = {misfit.attempt: misfit.ranks for misfit in repeated}
        self._attempts = 0
        self.misfits: list[Misfit] = []
        """What did not fit so far."""

    def attempt(self, work: Callable[[], T]) -> tuple[T | None, bool]:
        """Return what ``work`` does on this rank, or None where a rank has no memory for it; and whether this rank has.

        Every rank calls it at the same point.
        """
        attempt, self._attempts = self._attempts, self._attempts + 1
        ranks = self._repeated.get(attempt, ())
        result = None
        if not ranks:
            _seed(*self._seed, dist.get_rank(), attempt)
            result = self._try(work)
            ranks = self._engine.ranks_where(result is None) if self._engine.recovers else ()
        if not ranks:
            return result, True
        self.misfits.append(Misfit(attempt, ranks))
        return None, dist.get_rank() not in ranks

    def _try(self, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except RuntimeError as error:
            if not self._engine.recovers or not is_out_of_memory(error):
                raise
            return None


def _seed(*words: int) -> None:
    """Seed the CPU's generator and those of all GPUs."""
    torch.manual_seed(int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]))


def digest(shares: Sequence[Sequence[Sequence[MicroBatch]]]) -> str:
    """Return a digest of which samples are in which micro-batch of which rank, of each minibatch."""
    places = [[[one.places_S.tolist() for one in rank] for rank in ranks] for ranks in shares]
    return hashlib.blake2b(repr(places).encode(), digest_size=16).hexdigest()
