"""Samples of a message, from what an engine generated; the experts of their tokens stay on this replica's shelf."""

import dataclasses
from collections.abc import Sequence

from penstock.services.rollout.engines.engine import GeneratedSample, with_texts
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Prompt, Purpose, Sample


async def made(
    bus: Bus, prompt: Prompt, generated: Sequence[GeneratedSample], texts: Sequence[str], purpose: Purpose
) -> tuple[Sample, ...]:
    """Return the samples of a message about ``prompt``; without a shelf, or room on it, without a claim of routes."""
    samples = with_texts(generated, texts, supports=purpose is Purpose.TRAIN)
    if purpose is not Purpose.TRAIN or bus.shelf is None:
        return samples
    claimed = []
    for sample, of in zip(samples, generated, strict=True):
        claim = None if of.routes is None else await bus.shelf.put(of.routes.tobytes(), prompt.group_id)
        claimed.append(sample if claim is None else dataclasses.replace(sample, routes=wire.encode(claim)))
    return tuple(claimed)
