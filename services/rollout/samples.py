"""Samples of a message, from what an engine generated; the experts of their tokens stay on this replica's shelf."""

import dataclasses
from collections.abc import Sequence

from penstock.services.rollout.engines.engine import GeneratedSample, with_texts
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Prompt, Purpose, Sample


async def made(
    bus: Bus, prompt: Prompt, generated: Sequence[GeneratedSample], texts: Sequence[str], purpose: Purpose
) -> tuple[Sample, ...]:
    """Return the samples of a message about ``prompt``; without a shelf, or room on it, without a claim of routes."""
    samples = with_texts(generated, texts, supports=purpose is Purpose.TRAIN)
    if purpose is not Purpose.TRAIN:
        return samples
    claimed = []
    for sample, of in zip(samples, generated, strict=True):
        payload = b"" if of.routes is None else of.routes.tobytes()
        claimed.append(dataclasses.replace(sample, routes=await bus.claimed(payload, prompt.group_id)))
    return tuple(claimed)
