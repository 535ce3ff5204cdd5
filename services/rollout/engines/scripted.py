"""An :class:`Engine` with scripted completions, for tests without a model or torch.

Each token is one decoding step; swaps fall between two. Token ids are character codes; 0 stops.
"""

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.services.rollout.engines.engine import (
    Engine,
    EngineDied,
    GeneratedGroup,
    GeneratedSample,
    GenerationRequest,
    SwapReport,
    UpdateMode,
)
from penstock.services.rollout.engines.opening import Opening
from penstock.services.rollout.engines.prompts import CharacterCodec, Codec
from penstock.shared.bus.messages import FinishReason, Float32Array, Int32Array, PolicyVersion
from penstock.shared.process.memory_timeline import Held
from penstock.shared.weights.transport.place import DeviceLocation, boot_id

if TYPE_CHECKING:
    from penstock.shared.weights.transport.offer import Offer

Script = Callable[[str, PolicyVersion, random.Random], tuple[str, float]]
"""(prompt text, version, random generator) → (completion, its probability)."""

_SUM = re.compile(r"(\d+)\+(\d+)=$")


def arithmetic(prompt: str, version: PolicyVersion, lot: random.Random) -> tuple[str, float]:
    """Answer ``12+34=`` correctly with probability 0.5, else off by one; anything else with ``?``."""
    terms = _SUM.search(prompt)
    if terms is None:
        return "?", 1.0
    answer = int(terms[1]) + int(terms[2])
    return str(answer if lot.random() < 0.5 else answer + 1), 0.5


class ScriptedEngine:
    """Answers from ``script``.

    Args:
        pause: awaited between two decoding steps; block it to swap in mid-generation.
        receive: called in a thread with each staged offer; may raise WeightsError.
    """

    def __init__(
        self,
        script: Script = arithmetic,
        *,
        seed: int = 0,
        pause: Callable[[], Awaitable[None]] | None = None,
        receive: "Callable[[Offer], None] | None" = None,
    ) -> None:
        self._script = script
        self._lot = random.Random(seed)
        self._pause = pause
        self._received = receive
        self.torn = False
        self.drawn_tokens = 0
        self.update: UpdateMode = "inflight"
        self._version: PolicyVersion | None = None
        self._closed = False

    def update_by(self, mode: UpdateMode) -> None:
        """Record the mode; swaps are always between two decoding steps."""
        self.update = mode

    @property
    def version(self) -> PolicyVersion | None:
        return self._version

    async def generate(self, request: GenerationRequest) -> GeneratedGroup:
        if self._closed or self._version is None:
            raise EngineDied("expected an open engine with weights: a bug")
        started_at_s, sampling = time.time(), request.sampling
        prompt = CharacterCodec().decode([request.prompt_token_ids])[0]
        said = [self._script(prompt, self._version, self._lot) for _ in range(sampling.samples)]
        longest = min(sampling.max_new_tokens, max(len(text) for text, _ in said) + 1)
        versions: list[PolicyVersion] = []
        for _ in range(longest):
            versions.append(self._version)
            self.drawn_tokens += sampling.samples
            await (asyncio.sleep(0) if self._pause is None else self._pause())
        samples = tuple(_sample(text, probability, sampling.max_new_tokens, versions) for text, probability in said)
        return GeneratedGroup(samples, started_at_s, time.time())

    @property
    def ranks(self) -> int:
        return 1

    @property
    def place(self) -> DeviceLocation:
        return DeviceLocation("cpu", (), boot_id())

    @property
    def peer_address(self) -> str:
        return ""

    @property
    def held(self) -> Sequence[Held]:
        """Nothing: there is no model."""
        return ()

    async def stage(self, offer: "Offer") -> None:
        if self._received is not None:
            await asyncio.to_thread(self._received, offer)

    async def swap(self, version: PolicyVersion) -> SwapReport:
        if self._closed:
            raise EngineDied("expected an open engine: a bug")
        self._version = version
        return SwapReport(0.0, "copy", 0)

    async def logprobs(self, token_ids: Int32Array) -> Float32Array:
        return np.zeros(len(token_ids) - 1, dtype=np.float32)

    async def close(self) -> None:
        self._closed = True


def _sample(text: str, probability: float, limit: int, versions: list[PolicyVersion]) -> GeneratedSample:
    codes = [*map(ord, text), CharacterCodec.stop][:limit]
    logprobs = np.zeros(len(codes), dtype=np.float32)
    logprobs[0] = np.log(probability)
    return GeneratedSample(
        token_ids=np.array(codes, dtype=np.int32),
        behavior_logprobs=logprobs,
        version_spans=_spans(versions[: len(codes)]),
        finish_reason=FinishReason.STOP if codes[-1] == CharacterCodec.stop else FinishReason.LENGTH,
    )


def _spans(versions: list[PolicyVersion]) -> Int32Array:
    starts = [place for place in range(len(versions)) if place == 0 or versions[place] != versions[place - 1]]
    return np.array([[start, versions[start]] for start in starts], dtype=np.int32)


async def load() -> None:
    """Nothing is imported."""


async def open_engine(opening: Opening) -> tuple[Engine, Codec]:
    return ScriptedEngine(seed=opening.settings.run.seed), CharacterCodec()
