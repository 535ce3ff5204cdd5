"""Questions to the live policy."""

import asyncio
import contextlib
import dataclasses
from pathlib import Path

import pytest

from penstock.services.rollout import questions
from penstock.services.rollout.engines.scripted import ScriptedEngine
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import ChatMessage, Prompt, Purpose, RolloutGroup
from penstock.shared.bus.stores.replicas.questions import Questions, ask, new_id
from penstock.shared.errors import PermanentError
from penstock.shared.process.telemetry import Status
from tests.conftest import PATIENCE_S, until
from tests.rollout.test_service import Serving, announce, rollout
from tests.support import builders, weights


def question(text: str = "12+34=") -> Prompt:
    return dataclasses.replace(builders.prompt(text=text, samples=3), group_id=new_id(), purpose=Purpose.ASK)


async def test_the_live_policy_answers_a_question_outside_of_the_ledger(bus: Bus, tmp_path: Path) -> None:
    statuses = [Status(), Status()]
    replicas = [
        Serving(rollout(bus, ScriptedEngine(receive=weights.receiving()), status, f"rollout-{index}"))
        for index, status in enumerate(statuses)
    ]
    await announce(bus, tmp_path, 5)
    await until(lambda: [status.version for status in statuses] == [5, 5])
    groups = await asyncio.gather(*(ask(bus, question(), PATIENCE_S) for _ in range(4)))
    assert [(len(group.samples), list(group.versions)) for group in groups] == [(3, [5])] * 4
    assert [await bus.length(stream) for stream in streams.TRAINING_STREAMS] == [0, 0, 0, 0]
    for replica in replicas:
        await replica.end()
    assert await bus.length(streams.ANSWERS) == 0, "each was answered by one replica"


async def test_a_question_that_cannot_be_answered_is_refused_and_ends_no_replica(bus: Bus, tmp_path: Path) -> None:
    status = Status()
    replica = Serving(rollout(bus, ScriptedEngine(receive=weights.receiving()), status))
    await announce(bus, tmp_path, 1)
    await until(lambda: status.version == 1)
    await bus.append(streams.QUESTIONS, {"id": "1", "data": b"\xc1 no message"})
    unusable = dataclasses.replace(question(), text=None, messages=(ChatMessage("user", "hello"),))
    with pytest.raises(PermanentError, match=r"there is no text in train\.jsonl:1"):
        await ask(bus, unusable, PATIENCE_S)
    assert len((await ask(bus, question(), PATIENCE_S)).samples) == 3
    await replica.end()


async def test_a_replica_answers_no_question_from_before_its_start(bus: Bus) -> None:
    await bus.publish(streams.QUESTIONS, question())
    first, second = Questions(bus, "rollout-0"), Questions(bus, "rollout-1")
    reading = asyncio.gather(first.read(), second.read())
    assert list(await reading) == [[], []]
    await bus.publish(streams.QUESTIONS, dataclasses.replace(question(), purpose=Purpose.TRAIN))
    await bus.publish(streams.QUESTIONS, asked := question())
    claimed = await asyncio.gather(first.read(), second.read())
    assert sorted(claimed, key=len) == [[], [asked]]


async def test_questions_that_nobody_waits_for_any_more_keep_no_room_from_others(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "WITHIN_S", 0.5)

    async def handle(prompt: Prompt, purpose: Purpose) -> RolloutGroup:
        if prompt.text == "stuck":  # as on a device that is not granted
            await asyncio.Event().wait()
        return dataclasses.replace(builders.group(), prompt=prompt)

    answering = questions.Answering(bus, "rollout-0", handle, None)
    await answering._questions.read()
    running = asyncio.create_task(answering.run())
    for _ in range(9):
        await bus.publish(streams.QUESTIONS, question("stuck"))
    await until(lambda: _is_answered(bus))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def _is_answered(bus: Bus) -> bool:
    with contextlib.suppress(PermanentError):  # refused, as this machine was busy
        async with asyncio.timeout(PATIENCE_S / 6):
            return len((await ask(bus, question(), PATIENCE_S)).samples) == 2
    return False
