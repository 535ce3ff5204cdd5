"""Assembly: the samples of a group are separate entries on ``prompts`` and one entry from ``rollouts`` on.

::

    generating        group → its Prompt                       a group is here until it is whole or has ended
    assembly:<group>  parts, missing, lost, @<part> → its entry on prompts, or <part> → its RolloutGroup, of one sample or
                      of several that ended together, under the first of them
    rollouts          [Prompt, part, part, …]                  the array that ``hand_over.lua`` makes of the last part

A sample whose attempts are spent is lost: its group is made of the others, if they are at least half of it, and two.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.shared.bus.encoding import wire
from penstock.shared.bus.encoding.columns import join_columns
from penstock.shared.bus.messages import Prompt, RolloutGroup, Sample
from penstock.shared.errors import MessageError


def part_of(prompt: Prompt, part: str) -> Prompt:
    """Return the prompt of one entry: of the sample ``part``, or of all.

    Raises:
        MessageError: there is no such sample.
    """
    if part in ("", "all"):
        return prompt
    return dataclasses.replace(prompt, sample=place_of(prompt, part))


def place_of(prompt: Prompt, part: str) -> int:
    """Return the index of the sample ``part`` in its group.

    Raises:
        MessageError: there is no such sample.
    """
    if not (part.isascii() and part.isdecimal() and int(part[:9]) < prompt.sampling.samples):
        raise MessageError(f"expected a sample of {prompt.sampling.samples}, found {part[:40]!r}")
    return int(part[:9])


def bare(prompt: Prompt) -> Prompt:
    """Return a part's prompt without what the group's prompt repeats."""
    return dataclasses.replace(prompt, text=None, messages=None, answer=None, extra={})


def part_of_group(group: RolloutGroup, place: int) -> bytes:
    """Return the encoded part of one sample of a whole group, as a replica made it: without its teacher's logprobs."""
    prompt = bare(dataclasses.replace(group.prompt, sample=place))
    generated = dataclasses.replace(
        group.samples[place], teacher_logprobs=None, teacher_top_ids=None, teacher_top_logprobs=None
    )
    return wire.encode(dataclasses.replace(group, prompt=prompt, samples=(generated,)))


def split(group: RolloutGroup) -> list[RolloutGroup]:
    """Return the parts of one sample of a part of several."""
    return [
        dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, sample=place), samples=(sample,), places=())
        for place, sample in zip(group.places, group.samples, strict=True)
    ]


def join(pieces: Sequence[Any]) -> dict[str, Any]:
    """Return the fields of the group of an encoded prompt and its encoded parts, to be checked at once.

    Raises:
        MessageError: they are not those of one group.
    """
    if len(pieces) < 2 or not all(type(piece) is bytes for piece in pieces):
        raise MessageError(f"expected a prompt and its samples, found {len(pieces)} pieces")
    prompt, parts = wire.unpack(pieces[0], Prompt), [wire.unpack(piece, RolloutGroup) for piece in pieces[1:]]
    group_id, tokens = prompt["group_id"], parts[0]["prompt_token_ids"]
    places: list[Any] = []
    for part in parts:
        own = part.get("places") or [part["prompt"]["sample"]]
        if part["prompt"]["group_id"] != group_id or part["samples"]["rows"] != len(own):
            raise MessageError(f"expected samples of group {group_id}, found others")
        if not np.array_equal(part["prompt_token_ids"], tokens):
            raise MessageError(f"expected the same prompt tokens for every sample of group {group_id}")
        places += own
    return {
        "prompt": prompt,
        "prompt_token_ids": tokens,
        "samples": join_columns(
            [part["samples"] for part in parts],
            _order(places, prompt["sampling"]["samples"]),
            wire.late_defaults(Sample),
        ),
        "replica": ", ".join(sorted({part["replica"] for part in parts}))[:1024],
        "started_at_s": min(part["started_at_s"] for part in parts),
        "finished_at_s": max(part["finished_at_s"] for part in parts),
        "places": [],
    }


def _order(places: Sequence[Any], samples: int) -> list[int]:
    """Return the order of samples by their places in a group of ``samples``, of which some may be lost.

    Raises:
        MessageError: they are not those of a group.
    """
    rows = {place: row for row, place in enumerate(places) if type(place) is int and 0 <= place < samples}
    if not min(samples, max(2, samples / 2)) <= len(rows) == len(places):
        raise MessageError(f"expected at least half of the {samples} samples of a group, each once, found others")
    return [rows[place] for place in sorted(rows)]


wire.join_by(RolloutGroup, join)
