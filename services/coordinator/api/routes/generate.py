"""Completions of the live policy over HTTP: a rollout replica answers, in the room that training leaves."""

import asyncio
import dataclasses
import time

from fastapi import APIRouter
from starlette.exceptions import HTTPException

from penstock.services.coordinator.admission.admission import drawn_by
from penstock.services.coordinator.api.dependencies import Parts, soon
from penstock.services.coordinator.api.errors import RETRY_AFTER_S, Conflict
from penstock.services.coordinator.schemas.run import Answer, Generated, Question
from penstock.shared.bus.messages import ChatMessage, Prompt, Purpose, RolloutGroup, Sampling
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.stores.replicas.questions import WITHIN_S, ask, new_id
from penstock.shared.errors import MessageError, PermanentError
from penstock.shared.settings import Settings

MOST = 16
"""Questions at a time: each holds one of the coordinator's connections to the bus."""
_READY = ("working", "waiting", "degraded")


def generate_routes(parts: Parts) -> APIRouter:
    """Return the route that asks the live policy."""
    router, room = APIRouter(prefix="/v1/run", tags=["run"]), asyncio.Semaphore(MOST)

    @router.post("/generate", operation_id="generate", summary="Completions of the live policy; training goes first")
    async def generate(question: Question) -> Answer:
        beats = await soon(heartbeats(parts.bus))
        if not any(beat.service == "rollout" and beat.taking and beat.state in _READY for beat in beats):
            raise Conflict("no rollout replica answers now: start the run, or ask a stored version")
        prompt = _prompt(question, parts.live.settings)
        if room.locked():
            raise _try_again(f"expected at most {MOST} questions at a time, and the limit is reached: ask again")
        try:
            async with room:
                return _answer(await ask(parts.bus, prompt, WITHIN_S))
        except (TimeoutError, MessageError) as error:
            reason = f"no replica answered within {WITHIN_S:g} s: they may be busy or restarting; ask again"
            raise _try_again(reason) from error
        except PermanentError as error:
            raise HTTPException(422, str(error)) from error

    return router


def _try_again(reason: str) -> HTTPException:
    return HTTPException(503, reason, {"Retry-After": str(RETRY_AFTER_S)})


def _sampling(question: Question, settings: Settings) -> Sampling:
    temperature = settings.sampling.temperature if question.temperature is None else question.temperature
    sampling, most = drawn_by(settings.sampling, question.samples, temperature), settings.sampling.max_new_tokens
    asked = question.max_new_tokens or most
    if asked > most:  # which sizes the replicas, and bounds the wait of training for a batch with the question
        raise HTTPException(
            422, f"expected max_new_tokens <= {most}, the run's sampling.max_new_tokens, found {asked}: lower it"
        )
    return dataclasses.replace(sampling, max_new_tokens=asked)


def _prompt(question: Question, settings: Settings) -> Prompt:
    messages = None
    if question.messages is not None:
        messages = tuple(ChatMessage(message.role, message.content) for message in question.messages)
    return Prompt(
        group_id=new_id(),
        problem="the question",
        sampling=_sampling(question, settings),
        text=question.prompt,
        messages=messages,
        purpose=Purpose.ASK,
        admitted_at_s=time.time(),
    )


def _answer(group: RolloutGroup) -> Answer:
    return Answer(
        replica=group.replica,
        prompt_tokens=len(group.prompt_token_ids),
        completions=[
            Generated(
                text=sample.text,
                tokens=len(sample.token_ids),
                finish_reason=sample.finish_reason,
                versions=[int(version) for version in sorted(sample.versions)],
            )
            for sample in group.samples
        ],
    )
