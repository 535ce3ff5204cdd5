"""Assembly: the samples of a group are separate entries on ``prompts`` and one entry from ``rollouts`` on.

::

    generating        group → its Prompt                       a group is here until it is whole or has ended
    assembly:<group>  parts, missing, @<part> → its entry on prompts, or <part> → its RolloutGroup of one sample
    rollouts          [Prompt, part, part, …]                  the array that ``hand_over.lua`` makes of the last part
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from shared.bus import wire
from shared.bus.messages import Prompt, RolloutGroup
from shared.errors import MessageError


def part_of(prompt: Prompt, part: str) -> Prompt:
    """Return the prompt of one entry: of the sample ``part``, or of all.

    Raises:
        MessageError: there is no such sample.
    """
    if part in ("", "all"):
        return prompt
    if not (part.isascii() and part.isdecimal() and int(part[:9]) < prompt.sampling.samples):
        raise MessageError(f"expected a sample of {prompt.sampling.samples}, found {part[:40]!r}")
    return dataclasses.replace(prompt, sample=int(part[:9]))


def bare(prompt: Prompt) -> Prompt:
    """Return a part's prompt without what the group's prompt repeats."""
    return dataclasses.replace(prompt, text=None, messages=None, answer=None, extra={})


def join(pieces: Sequence[Any]) -> RolloutGroup:
    """Return the group of an encoded prompt and its encoded parts.

    Raises:
        MessageError: they are not those of one group, in order.
    """
    if len(pieces) < 2 or not all(type(piece) is bytes for piece in pieces):
        raise MessageError(f"expected a prompt and its samples, found {len(pieces)} pieces")
    prompt, parts = wire.decode(pieces[0], Prompt), [wire.decode(piece, RolloutGroup) for piece in pieces[1:]]
    first = parts[0]
    for place, part in enumerate(parts):
        if (part.group_id, part.prompt.sample, len(part.samples)) != (prompt.group_id, place, 1):
            raise MessageError(f"expected sample {place} of group {prompt.group_id}, found another")
        if not np.array_equal(part.prompt_token_ids, first.prompt_token_ids):
            raise MessageError(f"expected the same prompt tokens for every sample of group {prompt.group_id}")
    return RolloutGroup(
        prompt=prompt,
        prompt_token_ids=first.prompt_token_ids,
        samples=tuple(part.samples[0] for part in parts),
        replica=", ".join(sorted({part.replica for part in parts}))[:1024],
        started_at_s=min(part.started_at_s for part in parts),
        finished_at_s=max(part.finished_at_s for part in parts),
    )


wire.join_by(RolloutGroup, join)
