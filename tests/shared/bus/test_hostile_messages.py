"""Any mutated message is read, or refused as a MessageError. Live: ``tests/chaos/test_fuzz.py``."""

import dataclasses

import numpy as np
import pytest

from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import (
    Event,
    Experience,
    Misfit,
    PolicyRecord,
    PolicyUpdate,
    PolicyVersion,
    Probe,
    Prompt,
    RolloutGroup,
    StepPlan,
    StepReport,
)
from penstock.shared.errors import MessageError
from tests.chaos.fuzz import Hostile
from tests.support import builders

PROBE = Probe(
    np.arange(5, dtype=np.int32), np.array([3, 2], np.int32), np.full(3, -1.0, np.float32), np.zeros(3, np.float32)
)
RECORD = PolicyRecord(PolicyVersion(3), PolicyVersion(2), 3, 1.0, "ab", "", {"reward_mean": 0.5}, "h:1", PROBE)
MESSAGES: dict[type, object] = {
    Prompt: builders.prompt(3),
    RolloutGroup: builders.group(3),
    Experience: dataclasses.replace(
        builders.experience(3),
        group=dataclasses.replace(builders.group(3), samples=(builders.sample(), builders.tree())),
    ),
    PolicyRecord: RECORD,
    PolicyUpdate: PolicyUpdate(RECORD, 1.0, {"rollout-0": ("h:1",)}),
    StepPlan: StepPlan(1024, "ab", (Misfit(0, (0, 1)),)),
    StepReport: StepReport(3, PolicyVersion(3), 1.0, 8, {"kl_mean": 0.1}, {"0": 8}),
    Event: Event(1.0, "trainer", "step", "detail", {"step": 3}),
}


@pytest.mark.parametrize("kind", list(MESSAGES), ids=lambda kind: str(kind.__name__))
def test_no_mutation_of_a_message_raises_anything_but_a_message_error(kind: type) -> None:
    hostile, read, refused = Hostile(seed=7), 0, 0
    honest = {b"id": b"3", b"data": wire.encode(MESSAGES[kind])}
    others = [{b"id": b"3", b"data": wire.encode(message)} for message in MESSAGES.values()]
    for _ in range(300):
        data = hostile.entry(honest, others).get(b"data", b"")
        try:
            wire.decode(data, kind)
            read += 1
        except MessageError:
            refused += 1
    assert read + refused == 300
    assert refused > 100
