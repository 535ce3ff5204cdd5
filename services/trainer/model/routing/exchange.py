"""Bring the routes of a step's samples from rank 0, which fetches them, to the ranks that pack the samples."""

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from penstock.services.trainer.batch.packing import MicroBatch, RoutedSample
from penstock.services.trainer.model.routing.replay import RouterReplay
from penstock.services.trainer.rank_group import host_group

log = logging.getLogger(__name__)


class RouteExchange:
    """On the training thread of every rank."""

    def __init__(self, replay: RouterReplay) -> None:
        self._replay = replay
        self.offered: Mapping[bytes, bytes] = {}
        """By claim, of the next step; on rank 0."""

    def exchange(self, batches: Sequence[MicroBatch], drawn: Sequence[RoutedSample]) -> tuple[dict[str, float], str]:
        """Take the routes of this rank's passes; return the step's figures, which count samples that were ``drawn``, and a
        digest of what has routes. Collective.
        """
        self._replay.forget()
        lengths = {(each.claim, each.lengths) for batch in batches for each in batch.computed.routed if each.claim}
        known_once = Counter(claim for claim, _ in lengths)  # a claim of samples of several lengths is none's
        tokens = {claim: length for claim, length in lengths if known_once[claim] == 1}
        taken: dict[bytes, int] = {}
        for claim, payload in self._scattered(sorted(tokens)).items():
            try:
                taken[claim] = self._replay.take(claim, payload, *tokens[claim])
            except ValueError as error:
                log.warning("sample routed live", extra={"reason": str(error)})
        replayed = sum(self._columns(batch) for batch in batches)
        # equal completions of a group have one claim
        live = sum(max(1, len(each.turns)) - taken.get(each.claim, 0) for each in drawn)
        sums = torch.tensor([replayed, sum(batch.tokens for batch in batches), live], dtype=torch.float64)
        dist.all_reduce(sums, group=host_group())
        of_ranks: list[list[bytes]] = [[]] * dist.get_world_size()
        dist.all_gather_object(of_ranks, sorted(taken), group=host_group())
        known = sorted(claim for claims in of_ranks for claim in claims)
        figures = {"replayed_fraction": float(sums[0] / sums[1]), "routed_live": float(sums[2])}
        return figures, hashlib.sha256(b"\n".join(known)).hexdigest() if known else ""

    def _scattered(self, claims: list[bytes]) -> dict[bytes, bytes]:
        """Return what rank 0 was offered of the claims ``claims`` here."""
        offered, self.offered = self.offered, {}
        if dist.get_world_size() == 1:
            return {claim: offered[claim] for claim in claims if claim in offered}
        of_ranks: list[list[bytes]] = [[]] * dist.get_world_size()
        dist.all_gather_object(of_ranks, claims, group=host_group())
        parts = [{claim: offered[claim] for claim in own if claim in offered} for own in of_ranks]
        payloads: list[dict[bytes, bytes]] = [{}]
        dist.scatter_object_list(payloads, parts if dist.get_rank() == 0 else None, src=0, group=host_group())
        return payloads[0]

    def _columns(self, batch: MicroBatch) -> int:
        """Return how many of a pass's tokens have routes."""
        known = [columns[columns >= 0] for columns in map(self._replay.columns_of, batch.computed.routed)]
        return len(np.unique(np.concatenate(known))) if known else 0
