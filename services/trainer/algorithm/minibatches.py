"""A step's minibatches and their forward passes."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch.distributed as dist

from penstock.services.trainer.algorithm.kinds import Kind
from penstock.services.trainer.algorithm.loss.aggregation import STREAMS, Count, Stream
from penstock.services.trainer.batch import token_data
from penstock.services.trainer.batch.assignment import plan
from penstock.services.trainer.batch.oom_split import rows_by_place
from penstock.services.trainer.batch.packing import MicroBatch, PackedRow
from penstock.services.trainer.batch.staleness import token_lags
from penstock.services.trainer.batch.token_data import LossInputs
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.forward_passes import digest
from penstock.shared.bus.messages import Experience, Float32Array, PolicyVersion, Purpose, StepPlan
from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings


@dataclasses.dataclass(frozen=True, slots=True)
class Minibatch:
    """This rank's part of an optimizer update, and all ranks' totals."""

    inputs: list[LossInputs]
    """One per forward pass; split if memory is short."""
    rows: Mapping[int, PackedRow]
    counts: Mapping[Stream, Count]


@dataclasses.dataclass(frozen=True, slots=True)
class StepBatch:
    """The groups of a step."""

    groups: Sequence[Experience]
    rewards: Sequence[Float32Array]
    lags: Mapping[PolicyVersion, int]
    """Of the samples' versions, in steps."""
    contexts: Sequence[int] = ()
    """How many of each sample's oldest tokens only condition the others; empty: none."""

    @property
    def demonstrated(self) -> frozenset[int]:
        """The places of demonstrations."""
        purposes = (experience.group.prompt.purpose for experience in self.groups)
        return frozenset(place for place, purpose in enumerate(purposes) if purpose is Purpose.DEMONSTRATE)


def lay_out(
    batch: StepBatch,
    step: int,
    kind: Kind,
    settings: Settings,
    policy: TrainingEngine,
    minibatches: int = 1,
    repeated: StepPlan | None = None,
) -> tuple[list[Minibatch], StepPlan]:
    """Return this rank's minibatches, drawn by ``run.seed`` and ``step``, and all ranks' plan.

    A replay's forward passes are no larger than in ``repeated``, and train the same tokens.
    """
    cap = settings.trainer.micro_batch_tokens
    rows = _rows(batch, kind, shares_prompt=policy.shares_prompts)
    order = np.arange(len(rows))
    if minibatches > 1:
        order = np.random.default_rng([settings.run.seed, step]).permutation(len(rows))
    shares = [[rows[place] for place in share] for share in np.array_split(order, minibatches)]
    if repeated is not None:
        cap = min(cap, repeated.micro_batch_tokens)
    splits = kind.together == 1
    together = settings.trainer.sequence_parallel
    layouts = [
        plan(share, cap, policy.ranks, split=splits, sizes=policy.sizes, sequence_parallel=together) for share in shares
    ]
    check_parts(layouts, settings)
    samples_M, rank = [sample for e in batch.groups for sample in e.group.samples], dist.get_rank()
    pairs_M = zip(samples_M, batch.contexts or (0,) * len(samples_M), strict=True)
    lags_M = [token_lags(sample, batch.lags, context) for sample, context in pairs_M]
    shown = batch.demonstrated
    demonstrated_M = [place in shown for place, e in enumerate(batch.groups) for _ in e.group.samples]
    counted_M = demonstrated_M if kind.shows_demonstrations else [False] * len(samples_M)
    parts = []
    for share, layout in zip(shares, layouts, strict=True):
        inputs = [token_data.of(each, lags_M, demonstrated_M, policy.device) for each in layout[rank]]
        parts.append(Minibatch(inputs, rows_by_place(share), _counts(layout, counted_M)))
    return parts, StepPlan(cap, digest(layouts), contexts=tuple(batch.contexts))


def check_parts(layouts: Sequence[Sequence[Sequence[MicroBatch]]], settings: Settings) -> None:
    """Raise SettingsError if a journal has a sample that its ranks, which cannot cut it further, could not hold when it was made."""
    passes = (each for layout in layouts for of_rank in layout for each in of_rank if each.shard is not None)
    together, most = settings.trainer.sequence_parallel, settings.trainer.micro_batch_tokens
    if (longest := max((each.tokens for each in passes), default=0)) > most:
        raise SettingsError(
            f"expected trainer.micro_batch_tokens of at least {longest:,}, which a sample of the journal needs with "
            f"trainer.sequence_parallel = {together}, found {most:,}: raise one of them, or set the latter to 1"
        )


def _counts(layout: Sequence[Sequence[MicroBatch]], demonstrated_M: Sequence[bool]) -> dict[Stream, Count]:
    lengths: dict[bool, list[int]] = {False: [], True: []}
    for micro_batch in (each for micro_batches in layout for each in micro_batches):
        for place, length in zip(micro_batch.places_S, micro_batch.lengths_S, strict=True):
            lengths[demonstrated_M[place]].append(int(length))
    sampled, demonstrated = (Count(sum(lengths[kind]), len(lengths[kind])) for kind in (False, True))
    return {stream: demonstrated if stream == "ce" else sampled for stream in STREAMS}


def _rows(batch: StepBatch, kind: Kind, *, shares_prompt: bool) -> list[PackedRow]:
    rows, first = [], 0
    for experience, rewards_S in zip(batch.groups, batch.rewards, strict=True):
        group = experience.group
        own = batch.contexts[first : first + len(group.samples)] or (0,) * len(group.samples)
        chosen = [place for place in kind.trained(rewards_S) if own[place] < group.samples[place].sampled_tokens]
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
