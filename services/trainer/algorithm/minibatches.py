"""A step's minibatches and their forward passes."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch.distributed as dist

from services.trainer.algorithm.loss.aggregation import STREAMS, Count, Stream
from services.trainer.algorithm.loss.dpo import best_and_worst
from services.trainer.batch import token_data
from services.trainer.batch.oom_split import rows_by_place
from services.trainer.batch.packing import MicroBatch, PackedRow, plan
from services.trainer.batch.staleness import token_lags
from services.trainer.batch.token_data import LossInputs
from services.trainer.model.engine import TrainingEngine
from services.trainer.model.forward_passes import digest
from shared.bus.messages import Experience, Float32Array, PolicyVersion, Purpose, StepPlan
from shared.settings import Settings


@dataclasses.dataclass(frozen=True, slots=True)
class Minibatch:
    """This rank's part of an optimizer update, and all ranks' totals."""

    inputs: list[LossInputs]
    """One per forward pass; split if memory is short."""
    rows: Mapping[int, PackedRow]
    counts: Mapping[Stream, Count]


def lay_out(
    batch: Sequence[Experience],
    rewards: Sequence[Float32Array],
    lags: Mapping[PolicyVersion, int],
    step: int,
    settings: Settings,
    policy: TrainingEngine,
    minibatches: int = 1,
    repeated: StepPlan | None = None,
    contexts: Sequence[int] = (),
) -> tuple[list[Minibatch], StepPlan]:
    """Return this rank's minibatches, drawn by ``run.seed`` and ``step``, and all ranks' plan.

    The ``contexts`` oldest tokens of each sample are not trained. A replay's forward passes are no larger than in
    ``repeated``, and train the same tokens.
    """
    pairs, cap = settings.algorithm.loss == "dpo", settings.trainer.micro_batch_tokens
    contexts = repeated.contexts if repeated is not None else contexts
    rows = _rows(batch, rewards, contexts, pairs=pairs, shares_prompt=policy.shares_prompts)
    order = np.arange(len(rows))
    if minibatches > 1:
        order = np.random.default_rng([settings.run.seed, step]).permutation(len(rows))
    shares = [[rows[place] for place in share] for share in np.array_split(order, minibatches)]
    if repeated is not None:
        cap = min(cap, repeated.micro_batch_tokens)
    layouts = [plan(share, cap, policy.ranks, split=not pairs, sizes=policy.sizes) for share in shares]
    samples_M, rank = [sample for e in batch for sample in e.group.samples], dist.get_rank()
    pairs_M = zip(samples_M, contexts or (0,) * len(samples_M), strict=True)
    lags_M = [token_lags(sample, lags, context) for sample, context in pairs_M]
    demonstrated_M = [e.group.prompt.purpose is Purpose.DEMONSTRATE for e in batch for _ in e.group.samples]
    parts = []
    for share, layout in zip(shares, layouts, strict=True):
        inputs = [token_data.of(each, lags_M, demonstrated_M, policy.device) for each in layout[rank]]
        parts.append(Minibatch(inputs, rows_by_place(share), _counts(layout, demonstrated_M, pairs=pairs)))
    return parts, StepPlan(cap, digest(layouts), contexts=tuple(contexts))


def _counts(
    layout: Sequence[Sequence[MicroBatch]], demonstrated_M: Sequence[bool], *, pairs: bool
) -> dict[Stream, Count]:
    """Return the counts of each stream; those of preferences are of samples, also of pairs that no policy drew."""
    lengths: dict[bool, list[int]] = {False: [], True: []}
    for micro_batch in (each for micro_batches in layout for each in micro_batches):
        for place, length in zip(micro_batch.places_S, micro_batch.lengths_S, strict=True):
            lengths[demonstrated_M[place] and not pairs].append(int(length))
    sampled, demonstrated = (Count(sum(lengths[kind]), len(lengths[kind])) for kind in (False, True))
    return {stream: demonstrated if stream == "ce" else sampled for stream in STREAMS}


def _rows(
    batch: Sequence[Experience],
    rewards: Sequence[Float32Array],
    contexts: Sequence[int],
    *,
    pairs: bool,
    shares_prompt: bool,
) -> list[PackedRow]:
    rows, first = [], 0
    for experience, rewards_S in zip(batch, rewards, strict=True):
        group = experience.group
        own = contexts[first : first + len(group.samples)] or (0,) * len(group.samples)
        chosen: Sequence[int] = (best_and_worst(rewards_S) or ()) if pairs else range(len(group.samples))
        chosen = [place for place in chosen if own[place] < group.samples[place].sampled_tokens]
        rows.append(
            PackedRow(
                group.prompt_token_ids,
                samples=tuple(group.samples[place] for place in chosen),
                places=tuple(first + place for place in chosen),
                temperature=group.prompt.sampling.temperature,
                shares_prompt=shares_prompt,
                contexts=tuple(own[place] for place in chosen),
            )
        )
        first += len(group.samples)
    return rows
