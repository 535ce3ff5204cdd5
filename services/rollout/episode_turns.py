"""Draw turns of episodes, which their service asks for as token ids over connections of its own (``penstock.shared.peers.turns``)."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np

from penstock.services.rollout.engines.engine import Engine, GeneratedGroup, GeneratedSample, GenerationRequest
from penstock.services.rollout.engines.prompts import Codec
from penstock.services.rollout.engines.stop_texts import StopTexts
from penstock.shared.bus.messages import PolicyVersion, Purpose
from penstock.shared.bus.worker import ENDS_PROCESS
from penstock.shared.errors import NotHere, PeerError, PermanentError
from penstock.shared.peers import frames
from penstock.shared.peers.addresses import listen, reachable
from penstock.shared.peers.server import serve_peers
from penstock.shared.peers.turns import DrawnTurn, TurnRequest, read_request
from penstock.shared.process.service import Context

Draw = Callable[[GenerationRequest, PolicyVersion, Purpose], Awaitable[GeneratedGroup]]
"""``Generation.draw``."""


class TurnListener:
    """One replica's; it sets ``status.turns`` to its address. Raises SettingsError."""

    def __init__(self, context: Context, engine: Engine, codec: Codec, draw: Draw) -> None:
        self._settings = context.settings
        self._secret = context.secret
        self._taking = context.cordon.taking
        self._engine, self._codec, self._generate = engine, codec, draw
        self._listener = listen(context.host, 0, "run.host")
        self._running = 0
        context.status.turns = f"{reachable(context.host)}:{self._listener.getsockname()[1]}"

    async def run(self) -> None:
        """Serve until cancelled. Raises what ends the process, such as a dead engine."""
        await serve_peers(self._listener, self._secret, self._serve, "turns", ENDS_PROCESS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = asyncio.create_task(frames.receive_async(reader))
        try:
            while True:
                request = read_request(await asked)
                asked = asyncio.create_task(frames.receive_async(reader))
                answer = await _unless(asked, self._answer(request))
                writer.write(frames.pack({**answer, "running": self._running}))
                await writer.drain()
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def _answer(self, request: TurnRequest) -> frames.Frame:
        version, least = self._engine.version, request.prompt.min_version
        is_other = request.is_evaluation and version != least
        if version is None or version < least or is_other or not self._taking.is_set():
            return {"not_here": f"this replica holds version {version}, of {least}{'' if is_other else ' at least'}"}
        self._running += 1
        try:
            return await self._draw(request)
        except NotHere as error:
            return {"not_here": str(error)}
        except PermanentError as error:
            return {"refused": str(error)}
        finally:
            self._running -= 1

    async def _draw(self, request: TurnRequest) -> frames.Frame:
        settings = self._settings
        keeps = keeps_salt(request.salt, self._engine.version, settings.algorithm.max_lag, settings.weights.kv)
        asked = generation_of(request, settings.run.seed, self._codec, request.salt if keeps else None)
        (drawn,) = (await self._generate(asked, request.prompt.min_version, request.prompt.purpose)).samples
        return drawn_of(drawn, has_routes=request.prompt.purpose is Purpose.TRAIN).frame()


def generation_of(
    request: TurnRequest, seed: int, codec: Codec, salt: PolicyVersion | None = None
) -> GenerationRequest:
    """Return what an engine draws for a turn; ``seed`` is the run's."""
    prompt, sampling = request.prompt, request.prompt.sampling
    words = [
        seed, list(Purpose).index(prompt.purpose), prompt.group_id, prompt.sample or 0, request.number, prompt.requeues
    ]  # fmt: skip
    return GenerationRequest(
        request.token_ids,
        sampling,
        int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]),
        StopTexts(codec.decode, sampling.stop, sampling.min_new_tokens) if sampling.stop else None,
        salt,
    )


def drawn_of(drawn: GeneratedSample, *, has_routes: bool = False) -> DrawnTurn:
    """``has_routes``: with those of the tokens from which the turn was drawn, as far as its frame has room for them."""
    routes = b"" if drawn.routes is None or not has_routes else drawn.routes[-len(drawn.token_ids) :].tobytes()
    has_room = len(routes) + drawn.support_ids.nbytes <= frames.PART_BYTES
    return DrawnTurn(
        np.ascontiguousarray(drawn.token_ids, np.int32),
        np.ascontiguousarray(drawn.behavior_logprobs, np.float32),
        np.ascontiguousarray(drawn.version_spans, np.int32),
        drawn.finish_reason,
        np.ascontiguousarray(drawn.support_sizes, np.int32),
        np.ascontiguousarray(drawn.support_ids, np.int32),
        drawn.cached_tokens,
        routes if has_room else b"",
    )


def keeps_salt(salt: PolicyVersion, version: PolicyVersion | None, max_lag: int, kv: str) -> bool:
    """Whether a turn reads the cache of its episode's start: no key in it is more than ``max_lag`` steps old."""
    return kv == "keep" and version is not None and 0 <= version - salt <= max_lag


async def _unless(closing: "asyncio.Task[frames.Frame]", work: Coroutine[Any, Any, frames.Frame]) -> frames.Frame:
    """Return what ``work`` does, unless the peer leaves, or sends more, before. Raises PeerError."""
    working: asyncio.Task[frames.Frame] = asyncio.create_task(work)
    try:
        await asyncio.wait([working, closing], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise closing.exception() or PeerError("the peer asked for two turns at a time on one connection")
        return working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
