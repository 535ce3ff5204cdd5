"""Laws of episodes on the wire."""

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest

from shared.bus.assembly import part_of_group
from shared.bus.branches import is_branched, longest_branch
from shared.bus.encoding import wire
from shared.bus.messages import Ended, Experience, Prompt, RolloutGroup, Sample
from shared.errors import MessageError
from tests.shared.bus.test_assembly import array
from tests.support import builders

PLAIN = {
    "group": "204b0f6f005a1b78047ffda477da89b5ce4c798bfd1aca8c895cc75f790f441a",
    "experience": "ef14143b8d58d5ce0b4b72013f42eba595e687fe25acec33966c5ae8ee1ca268",
}
"""SHA-256 of messages as they were before there were trees."""


def of(*samples: Sample) -> RolloutGroup:
    return dataclasses.replace(builders.group(3, ("46",) * len(samples)), samples=samples)


def fields(sample: Sample) -> dict[str, Any]:
    values = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def test_a_plain_completion_has_the_bytes_that_it_had_before_there_were_trees() -> None:
    written = {"group": wire.encode(builders.group(3)), "experience": wire.encode(builders.experience(3))}
    assert {name: hashlib.sha256(data).hexdigest() for name, data in written.items()} == PLAIN
    assert wire.encode(wire.decode(written["experience"], Experience)) == written["experience"]


def test_a_tree_travels_beside_plain_completions_and_alone_as_a_part_of_its_group() -> None:
    group = of(builders.sample(), builders.tree(), builders.sample())
    written = wire.encode(group)
    read = wire.decode(written, RolloutGroup)
    assert [fields(sample) for sample in read.samples] == [fields(sample) for sample in group.samples]
    assert wire.encode(read) == written
    pieces = [wire.encode(group.prompt), *(part_of_group(group, place) for place in range(3))]
    assert wire.encode(wire.decode(array(*pieces), RolloutGroup)) == written


def test_what_an_older_service_would_misread_says_that_it_is_newer() -> None:
    prompt = dataclasses.replace(builders.prompt(), environment="my_env:KeyDoor")
    assert wire.decode(wire.encode(prompt), Prompt) == prompt
    messages = (
        prompt,
        of(builders.tree()),
        of(builders.sample()),
        dataclasses.replace(of(builders.sample()), prompt=prompt),
    )
    assert [wire.unpack(wire.encode(each), type(each))["schema"] for each in messages] == [2, 2, 1, 2]


def test_only_sampled_tokens_have_versions() -> None:
    spans = np.array([[0, 1], [3, 7], [5, 2], [7, 9], [8, 6]], np.int32)
    tree = dataclasses.replace(builders.tree(), version_spans=spans)
    assert tree.sampled.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 3
    assert sorted(tree.versions) == [6, 7, 9]
    assert (int(tree.oldest_version), int(tree.newest_version)) == (6, 9)


def test_the_longest_branch_and_whether_there_are_several() -> None:
    tree, plain = builders.tree(), builders.sample()
    line = dataclasses.replace(tree, segments=tree.segments[:4])
    assert longest_branch(tree).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert longest_branch(plain).tolist() == [0, 1, 2]
    assert longest_branch(spoiled(segments=[[0, -1, 0], [1, 0, 1], [2, 0, 1]])).tolist() == [0, *range(2, 10)]
    assert [is_branched(sample) for sample in (tree, line, plain)] == [True, False, False]


def test_samples_with_prompts_of_their_own_make_a_group_without_a_prompt() -> None:
    none = np.zeros(0, np.int32)
    group = dataclasses.replace(of(builders.tree(), builders.tree()), prompt_token_ids=none)
    pieces = [wire.encode(group.prompt), *(part_of_group(group, place) for place in range(2))]
    assert wire.encode(wire.decode(array(*pieces), RolloutGroup)) == wire.encode(group)
    for refused in (builders.sample(), spoiled(segments=[[0, -1, 0], [5, -1, 1]], turn_rewards=[])):
        group = dataclasses.replace(of(builders.tree(), refused), prompt_token_ids=none)
        with pytest.raises(MessageError, match="prompt tokens, or samples that begin with given tokens"):
            wire.decode(wire.encode(group), RolloutGroup)


def spoiled(**change: Any) -> Sample:
    tree = builders.tree()
    arrays = {
        name: np.array(value, getattr(tree, name).dtype) if isinstance(value, list) else value
        for name, value in change.items()
    }
    if "segments" in change and len(change["segments"]) and change["segments"][0][0] == 0:
        sampled = dataclasses.replace(tree, segments=arrays["segments"]).sampled
        arrays["behavior_logprobs"] = (-0.5 * sampled).astype(np.float32)
    return dataclasses.replace(tree, **arrays)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"segments": [[1, -1, 0], [3, 0, 1], [8, 0, 1]]}, "segments that begin at token 0 and ascend"),
        ({"segments": [[0, -1, 0], [3, 0, 1], [3, 0, 1]]}, "segments that begin at token 0 and ascend"),
        ({"segments": [[0, -1, 0], [3, 0, 1], [10, 0, 1]]}, "segments that begin at token 0 and ascend"),
        ({"segments": [[0, 0, 0], [3, 0, 1]], "turn_rewards": []}, "found segment 0 with the parent 0"),
        ({"segments": [[0, -1, 0], [3, 2, 1], [8, 0, 1]]}, "found segment 1 with the parent 2"),
        ({"segments": [[0, -1, 0], [3, 0, 1], [5, 0, 0], [7, 1, 1], [8, 0, 1]]}, "found segment 3 with the parent 1"),
        ({"segments": [[0, -1, 0], [3, -1, 0], [5, 0, 1]]}, "found segment 2 with the parent 0"),
        ({"segments": [[0, -1, 0]], "turn_rewards": []}, "at least one sampled"),
        ({"segments": [[0, -1, 0], [3, 0, 2]], "turn_rewards": []}, "given .0. and sampled .1. segments"),
        ({"segments": [[0, -2, 1]], "turn_rewards": []}, "segments: expected numbers from -1"),
        ({"turn_rewards": [0.0, 1.0]}, "a reward of each of 3 sampled segments, found 2"),
        ({"turn_rewards": [0.0, 1.0, float("nan")]}, "turn_rewards: expected numbers"),
        ({"segments": np.zeros((0, 3), np.int32), "behavior_logprobs": [-0.5] * 10}, "turn rewards of a sample with segments"),
        ({"behavior_logprobs": [-0.5] * 10}, "behavior logprob 0 and support 0 at given tokens"),
        ({"support_sizes": [1] * 10, "support_ids": [1] * 10, "token_ids": [1] * 10}, "support 0 at given tokens"),
        ({"ended": "tired"}, "ended: expected one of , stop, length"),
        ({"environment_reward": float("inf")}, "environment_reward: expected a finite number"),
        ({"transcript": "text"}, "transcript: expected at most 16777216 bytes"),
    ],
)  # fmt: skip
def test_a_malformed_tree_is_refused_with_its_cause(change: dict[str, Any], reason: str) -> None:
    assert wire.decode(wire.encode(of(spoiled())), RolloutGroup).samples[0].ended is Ended.TURNS
    with pytest.raises(MessageError, match=reason):
        wire.decode(wire.encode(of(spoiled(**change))), RolloutGroup)
