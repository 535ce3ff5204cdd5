"""Forward passes of one step, cut in two on all ranks if memory is short on one.

::

    attempt      0      1      2      3      4          memory short on rank 1 in attempt 1, which was cut into 2 and 3
    ranks        ·     (1,)    ·      ·      ·          plan.misfits = (Misfit(1, (1,)),)

Rows that several ranks compute together are not cut, and a rank that has no memory for one ends the trainer: the others
wait for it.

The journalled plan records misfits, which depend on free memory, for replays. Random numbers (LoRA's dropout) are
seeded by run, step, rank and attempt.
"""

import functools
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from penstock.services.trainer.batch import oom_split
from penstock.services.trainer.batch.packing import MicroBatch, PackedRow
from penstock.services.trainer.batch.token_data import LossInputs
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.shared.bus.messages import Misfit
from penstock.shared.errors import is_out_of_memory

log = logging.getLogger(__name__)

T = TypeVar("T")


class ForwardPasses:
    """The attempts of one step, on the training thread.

    ``together`` neighbouring samples stay together (2 with preferences); ``repeated`` are a replay's original misfits.
    """

    def __init__(
        self, engine: TrainingEngine, seed: tuple[int, int], together: int = 1, repeated: Sequence[Misfit] = ()
    ) -> None:
        self._engine = engine
        self._seed = seed
        self._together = together
        self._repeated = {misfit.attempt: misfit.ranks for misfit in repeated}
        self._attempts = 0
        self.misfits: list[Misfit] = []
        self.left_out = self._most_added = 0

    def results(
        self, inputs: list[LossInputs], rows: Mapping[int, PackedRow], work: Callable[[LossInputs], T]
    ) -> Iterator[tuple[T, bool]]:
        """Yield ``work`` of each micro-batch, and whether it is the last; splits ``inputs`` in place. Collective."""
        waiting, done = deque(inputs), []
        while waiting:
            micro_batch = waiting.popleft()
            result, fits = self._attempt(functools.partial(work, micro_batch), alone=micro_batch.batch.shard is None)
            if result is None:
                waiting.extendleft(reversed(self._cut(micro_batch, rows, fits=fits)))
                continue
            done.append(micro_batch)
            self._most_added = max(self._most_added, len(done))
            yield result, not waiting
        inputs[:] = done

    def _cut(self, micro_batch: LossInputs, rows: Mapping[int, PackedRow], *, fits: bool) -> list[LossInputs]:
        samples = len(micro_batch.batch.places_S)
        if micro_batch.batch.shard is not None:
            return [micro_batch, oom_split.part(micro_batch, rows, 0, 0)]
        if samples == 0 and not fits:
            raise torch.OutOfMemoryError(
                "not enough memory for an empty forward pass: lower trainer.micro_batch_tokens"
            )
        if samples <= self._together and not fits:
            tokens = micro_batch.batch.tokens
            log.warning("sample skipped: not enough memory", extra={"tokens": tokens, "samples": samples})
            self.left_out += samples
            samples = 0
        if self._engine.device.type == "cuda":
            torch.cuda.empty_cache()
        if samples <= self._together:
            return [oom_split.part(micro_batch, rows, 0, samples), oom_split.part(micro_batch, rows, 0, 0)]
        return oom_split.halves(micro_batch, rows, together=self._together)

    def over_ranks(self) -> dict[str, float]:
        """Return the step's figures; collective."""
        left_out = torch.tensor([self.left_out], dtype=torch.int64, device=self._engine.device)
        dist.all_reduce(left_out)
        return {
            "micro_batches": float(self._most_added),
            "micro_batch_splits": float(len(self.misfits)),
            "dropped_out_of_memory": float(left_out),
        }

    def _attempt(self, work: Callable[[], T], *, alone: bool) -> tuple[T | None, bool]:
        """Return the result of ``work``, None if any rank is short of memory; and whether this rank fits.

        ``alone``: no other rank computes the same row, and would wait for this one.
        """
        attempt, self._attempts = self._attempts, self._attempts + 1
        ranks = self._repeated.get(attempt, ())
        result = None
        if not ranks:
            _seed(*self._seed, dist.get_rank(), attempt)
            result = self._try(work, alone=alone)
            ranks = self._engine.ranks_where(result is None) if self._engine.recovers else ()
        if not ranks:
            return result, True
        self.misfits.append(Misfit(attempt, ranks))
        return None, dist.get_rank() not in ranks

    def _try(self, work: Callable[[], T], *, alone: bool) -> T | None:
        try:
            return work()
        except RuntimeError as error:
            if not (self._engine.recovers and alone) or not is_out_of_memory(error):
                raise
            return None


def _seed(*words: int) -> None:
    torch.manual_seed(int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]))


def digest(shares: Sequence[Sequence[Sequence[MicroBatch]]]) -> str:
    places = [[[_places(micro_batch) for micro_batch in rank] for rank in ranks] for ranks in shares]
    return hashlib.blake2b(repr(places).encode(), digest_size=16).hexdigest()


def _places(micro_batch: MicroBatch) -> Any:
    """Return the samples' places, with the number of ranks if several compute them together, and that of merged rows."""
    places, shard = micro_batch.places_S.tolist(), micro_batch.shard
    of_ranks = places if shard is None else (shard.part.ranks, places)
    return ("merged", micro_batch.merged, of_ranks) if micro_batch.merged else of_ranks
