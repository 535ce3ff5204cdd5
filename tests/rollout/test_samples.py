"""Samples of a message carry a claim of their routes, and never the routes."""

import dataclasses
from pathlib import Path

import numpy as np

from penstock.services.rollout import samples
from penstock.services.rollout.engines.engine import GeneratedSample
from penstock.services.trainer.rank0.mailbox.routes import fetch
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Experience, FinishReason, Purpose, Sample
from penstock.shared.settings import TrainerSettings
from tests.support import builders
from tests.support.shelves import LIMITS, served

ROUTES = np.arange(7 * 2 * 2, dtype=np.uint8).reshape(7, 2, 2)
ON = TrainerSettings(router_replay=True)


def generated(routes: np.ndarray | None) -> GeneratedSample:
    ids = np.arange(4, dtype=np.int32)
    spans = np.zeros((1, 2), np.int32)
    return GeneratedSample(ids, np.zeros(4, np.float32), spans, FinishReason.STOP, routes=routes)


def scored(of: tuple[Sample, ...]) -> Experience:
    whole = builders.experience(7, (1.0,) * len(of))
    return dataclasses.replace(whole, group=dataclasses.replace(whole.group, samples=of))


async def test_a_claim_brings_back_the_routes_of_its_sample(bus: Bus, tmp_path: Path) -> None:
    prompt, drawn = builders.experience(7, (1.0,)).group.prompt, [generated(ROUTES), generated(None)]
    async with served(bus, tmp_path, "a", dataclasses.replace(LIMITS, copies=1)) as bus.shelf:
        made = await samples.made(bus, prompt, drawn, ["", ""], Purpose.TRAIN)
        assert not made[1].routes, "not recorded"
        assert 0 < len(made[0].routes) < 400
        assert await fetch(bus, scored(made), ON) == {made[0].routes: ROUTES.tobytes()}
        assert await fetch(bus, scored(made), TrainerSettings()) == {}
        evaluated = await samples.made(bus, prompt, drawn, ["", ""], Purpose.EVALUATE)
        assert not any(sample.routes for sample in evaluated)
        bus.shelf.drop(bus.shelf._store.names)
        assert await fetch(bus, scored(made), ON) == {}, "lost"
        broken = dataclasses.replace(made[0], routes=b"no claim")
        assert await fetch(bus, scored((broken,)), ON) == {}, "a stranger's"


async def test_without_room_or_a_second_copy_a_sample_has_no_claim(bus: Bus, tmp_path: Path) -> None:
    prompt = builders.experience(7, (1.0,)).group.prompt
    assert not (await samples.made(bus, prompt, [generated(ROUTES)], [""], Purpose.TRAIN))[0].routes, "no shelf"
    async with served(bus, tmp_path, "a") as bus.shelf:
        assert not (await samples.made(bus, prompt, [generated(ROUTES)], [""], Purpose.TRAIN))[0].routes
