"""Completions of the live policy over HTTP."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.services.coordinator.api.app import make_app
from penstock.services.coordinator.api.routes import generate as routes
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Prompt, Sampling
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.stores.replicas.questions import Questions
from penstock.shared.bus.streams import QUESTIONS, Stream
from penstock.shared.process.telemetry import Presence, Status
from tests.conftest import PATIENCE_S, until
from tests.support import builders
from tests.support.coordinator_players import make, running, settings


@pytest.fixture
async def http(bus: Bus, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    await Ledger(bus).create()
    run = settings(tmp_path, coordinator={"autostart": False}, sampling={"temperature": 0.5, "max_new_tokens": 9})
    async with running(make(bus, run)) as parts:
        transport = httpx.ASGITransport(make_app(parts.api))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


@contextlib.asynccontextmanager
async def replica(bus: Bus) -> AsyncIterator[list[Prompt]]:
    """A replica that answers every text and refuses messages; yield what it was asked."""
    asked, stop, questions = list[Prompt](), asyncio.Event(), Questions(bus, "rollout-0")
    await questions.read()
    presence = Presence(bus, "rollout", "rollout-0", 5.0, Status(state="working"))

    async def answer() -> None:
        while True:
            for prompt in await questions.read():
                asked.append(prompt)
                if prompt.text is None:
                    await questions.refuse(prompt, "this tokenizer has no chat template")
                else:
                    group = dataclasses.replace(builders.group(texts=("46", "47"), version=7), prompt=prompt)
                    await questions.answer(prompt, group)

    async with asyncio.TaskGroup() as tasks:
        beating, answering = tasks.create_task(presence.run(stop)), tasks.create_task(answer())
        await until(lambda: _beats(bus))
        yield asked
        stop.set()
        await beating
        answering.cancel()


async def _beats(bus: Bus) -> bool:
    return bool(await heartbeats(bus))


async def test_the_answer_is_the_live_policys_with_the_versions_that_generated_it(
    bus: Bus, http: httpx.AsyncClient
) -> None:
    async with replica(bus) as asked:
        answer = await http.post("/v1/run/generate", json={"prompt": "12+34=", "samples": 2, "temperature": 0})
        refused = await http.post("/v1/run/generate", json={"messages": [{"role": "user", "content": "hello"}]})
    of = {"tokens": 3, "finish_reason": "stop", "versions": [7]}
    assert answer.json() == {
        "replica": "rollout-0",
        "prompt_tokens": 3,
        "completions": [{"text": "46", **of}, {"text": "47", **of}],
    }
    assert (refused.status_code, refused.json()["detail"]) == (422, "this tokenizer has no chat template")
    assert [(each.sampling.samples, each.sampling.max_new_tokens, each.sampling.temperature) for each in asked] == [
        (2, 9, 0.0),
        (1, 9, 0.5),
    ]


@pytest.mark.parametrize(
    ("question", "status", "piece"),
    [
        ({"prompt": "1+1="}, 409, "no rollout replica answers now: start the run, or ask a stored version"),
        ({}, 422, "give either prompt or messages"),
        ({"prompt": "1+1=", "messages": [{"role": "user", "content": "1+1="}]}, 422, "give either prompt or messages"),
        ({"prompt": "1+1=", "samples": 65}, 422, "less than or equal to 64"),
        ({"prompt": ""}, 422, "at least 1 character"),
    ],
)
async def test_a_question_that_cannot_be_asked_is_refused_in_a_sentence(
    http: httpx.AsyncClient, question: dict[str, Any], status: int, piece: str
) -> None:
    answer = await http.post("/v1/run/generate", json=question)
    assert answer.status_code == status
    assert piece in answer.json()["detail"]


async def test_a_question_is_drawn_as_samples_of_training_are(bus: Bus, tmp_path: Path) -> None:
    await Ledger(bus).create()
    sampling = {"max_new_tokens": 9, "top_p": 0.9, "min_new_tokens": 2, "stop": ["</answer>"]}
    run = settings(tmp_path, coordinator={"autostart": False}, sampling=sampling)
    async with running(make(bus, run)) as parts, replica(bus) as asked:
        transport = httpx.ASGITransport(make_app(parts.api))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for options in ({}, {"temperature": 0, "max_new_tokens": 3}):
                assert (
                    await client.post("/v1/run/generate", json={"prompt": "1+1=", "samples": 2, **options})
                ).status_code == 200
            longer = await client.post("/v1/run/generate", json={"prompt": "1+1=", "max_new_tokens": 10})
    restricted = {"min_new_tokens": 2, "stop": ("</answer>",)}
    assert [each.sampling for each in asked] == [
        Sampling(2, 9, 1.0, top_k=256, top_p=0.9, **restricted),  # type: ignore[arg-type]
        Sampling(2, 3, 0.0, **restricted),  # type: ignore[arg-type]
    ]
    assert (longer.status_code, longer.json()["detail"]) == (
        422,
        "expected max_new_tokens <= 9, the run's sampling.max_new_tokens, found 10: lower it",
    )


@contextlib.asynccontextmanager
async def silent_replica(bus: Bus) -> AsyncIterator[None]:
    """A replica that takes work and answers nothing."""
    stop, presence = asyncio.Event(), Presence(bus, "rollout", "rollout-0", 5.0, Status(state="working"))
    beating = asyncio.create_task(presence.run(stop))
    await until(lambda: _beats(bus))
    yield
    stop.set()
    await beating


async def test_an_answer_that_is_none_is_no_fault_of_the_question(bus: Bus, http: httpx.AsyncClient) -> None:
    async with replica(bus):  # which answers with two samples
        answer = await http.post("/v1/run/generate", json={"prompt": "1+1=", "samples": 1})
    assert answer.status_code == 503


async def test_questions_over_the_limit_are_refused_and_keep_no_connection_of_the_coordinator(
    bus: Bus, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "WITHIN_S", PATIENCE_S)
    async with silent_replica(bus):
        posts = [asyncio.create_task(http.post("/v1/run/generate", json={"prompt": "1+1="})) for _ in range(70)]
        await until(lambda: _has_length(bus, QUESTIONS, 16))
        await until(lambda: _are_done(posts, 54))
        refused = {(post.result().status_code, post.result().json()["detail"]) for post in posts if post.done()}
        assert refused == {(503, "expected at most 16 questions at a time, and the limit is reached: ask again")}
        assert (await http.get("/v1/run")).status_code == 200
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)


async def _has_length(bus: Bus, stream: Stream, entries: int) -> bool:
    return await bus.length(stream) == entries


async def _are_done(tasks: list["asyncio.Task[httpx.Response]"], count: int) -> bool:
    return sum(task.done() for task in tasks) == count


async def test_a_question_without_an_answer_is_given_up(
    bus: Bus, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "WITHIN_S", 0.05)
    async with silent_replica(bus):
        answer = await http.post("/v1/run/generate", json={"prompt": "1+1="})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert "no replica answered within 0.05 s" in answer.json()["detail"]
