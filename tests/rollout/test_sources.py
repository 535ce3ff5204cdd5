"""Laws of weight sources: the coordinator's tree, and each replica's order."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.coordinator.policies.relay_tree import addresses, sources
from penstock.services.rollout.sources import PullAttempt, attempts, holders
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import PolicyRecord, PolicyUpdate, PolicyVersion
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat

TRAINER = "trainer:1"


def beat(name: str, version: int | None = 7, source: str = "", **changed: str) -> Heartbeat:
    values: dict[str, object] = {
        "service": "rollout",
        "state": "working",
        "host": "h",
        "pid": 1,
        "address": "h:1",
        "started_at_s": 0.0,
        "seen_at_s": 0.0,
        "memory_bytes": 0,
        "last_error": "",
        "values": {},
    }
    held = None if version is None else PolicyVersion(version)
    return Heartbeat(**{**values, **changed}, replica=name, version=held, source=source)  # type: ignore[arg-type]


def update(location: str = "", source: str = TRAINER) -> PolicyUpdate:
    return PolicyUpdate(PolicyRecord(PolicyVersion(7), None, 7, 0.0, "ab", location, source=source), 0.0)


def test_a_tree_of_six_is_as_drawn() -> None:
    tree = sources({f"rollout-{n}": f"h:{n}" for n in range(6)}, 2, TRAINER)
    assert tree == {
        "rollout-0": (TRAINER,),
        "rollout-1": (TRAINER,),
        "rollout-2": ("h:0", TRAINER),
        "rollout-3": ("h:0", TRAINER),
        "rollout-4": ("h:1", TRAINER),
        "rollout-5": ("h:1", TRAINER),
    }


def test_replicas_that_keep_no_copy_all_pull_from_the_trainer_and_are_never_a_source() -> None:
    streaming = [beat(f"rollout-{n}") for n in range(8)]
    assert sources(addresses(streaming), 2, TRAINER) == {f"rollout-{n}": (TRAINER,) for n in range(8)}
    assert holders(streaming, update(), "rollout-0", random.Random(0)) == []
    copying = [beat(f"rollout-{n}", source=f"h:{n}") for n in (8, 9)]
    assert sources(addresses(streaming + copying), 1, TRAINER) == {
        **{f"rollout-{n}": (TRAINER,) for n in range(9)},
        "rollout-9": ("h:8", TRAINER),
    }
    assert holders(streaming + copying, update(), "rollout-8", random.Random(0)) == ["h:9"]


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 10**6) | st.none(), max_size=80), st.integers(1, 5))
def test_every_replica_is_in_the_tree_once_below_a_parent_that_is_not_overloaded(
    numbers: dict[str, int | None], fan_out: int
) -> None:
    """A replica without a number has no address: it keeps no copy."""
    replicas = {
        name: "" if number is None else f"{place}:{number}" for place, (name, number) in enumerate(numbers.items())
    }
    tree = sources(replicas, fan_out, TRAINER)
    assert tree.keys() == replicas.keys()
    assert all(addresses[-1] == TRAINER and len(set(addresses)) == len(addresses) for addresses in tree.values())
    assert all(tree[name] == (TRAINER,) for name, address in replicas.items() if not address)
    parents = {replicas[name]: addresses[0] for name, addresses in tree.items() if replicas[name]}
    children = list(parents.values())
    assert all(children.count(parent) <= fan_out for parent in children)
    assert all(depth(address, parents) <= bound(len(parents), fan_out) for address in parents)


def depth(address: str, parents: dict[str, str]) -> int:
    """Steps to the trainer; a cycle would never end."""
    steps = 0
    while address != TRAINER:
        address, steps = parents[address], steps + 1
        assert steps <= len(parents), "a cycle"
    return steps


def bound(replicas: int, fan_out: int) -> int:
    return replicas if fan_out == 1 else math.ceil(math.log(replicas * (fan_out - 1) / fan_out + 1, fan_out) + 1e-9) + 1


def test_the_order_is_that_of_names_whoever_beats_first() -> None:
    names = [f"r{n}" for n in range(9)]
    shuffled = random.Random(0).sample(names, 9)
    assert sources({n: n for n in names}, 2, TRAINER) == sources({n: n for n in shuffled}, 2, TRAINER)


def test_only_replicas_in_order_are_in_the_tree() -> None:
    beats = [
        beat("a", source="h:1"),
        beat("b", source=""),
        beat("c", source="h:3", state="degraded"),
        beat("d", source="h:4", state="stopping"),
        beat("e", source="h:5", service="trainer"),
        beat("f", source="h:6", state="waiting", version=None),
    ]
    assert addresses(beats) == {"a": "h:1", "b": "", "f": "h:6"}


def test_an_update_carries_its_tree_and_older_ones_have_none() -> None:
    sent = PolicyUpdate(update().record, 1.0, {"rollout-0": ("h:0", TRAINER)})
    assert wire.decode(wire.encode(sent), PolicyUpdate).sources == {"rollout-0": ("h:0", TRAINER)}
    assert update().sources == {}


@pytest.mark.parametrize(
    ("told", "location", "expected"),
    [
        (["h:1", TRAINER], "", [PullAttempt("peer", "h:1"), PullAttempt("trainer", TRAINER), PullAttempt("requested_file", TRAINER)]),
        (["me:1", "h:1", "h:1"], "", [PullAttempt("peer", "h:1"), PullAttempt("trainer", TRAINER), PullAttempt("requested_file", TRAINER)]),
        ([], "/w/v7", [PullAttempt("trainer", TRAINER), PullAttempt("requested_file", TRAINER), PullAttempt("file")]),
    ],
)  # fmt: skip
def test_peers_come_before_the_trainer_and_files_last(
    told: list[str], location: str, expected: list[PullAttempt]
) -> None:
    assert attempts(update(location).record, told, "me:1") == expected


def test_what_no_process_serves_comes_by_file_only() -> None:
    assert attempts(update("/w/v7", source="").record, ["h:1"], "") == [PullAttempt("file")]


def test_who_joins_later_asks_those_that_hold_the_head() -> None:
    beats = [
        beat("me", source="me:1"),
        beat("old", version=6, source="h:1"),
        beat("mute", source=""),
        *(beat(f"r{n}", source=f"r:{n}") for n in range(5)),
    ]
    asked = holders(beats, update(), "me", random.Random(1))
    assert len(asked) == len(set(asked)) == 3
    assert set(asked) <= {f"r:{n}" for n in range(5)}
    assert any(asked != holders(beats, update(), "me", random.Random(seed)) for seed in range(5))
