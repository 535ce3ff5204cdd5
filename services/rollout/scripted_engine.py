"""An engine that reads its completions from a script: for tests of everything around it, without a model or torch.

It is a whole :class:`Engine` otherwise: every token is one decoding step, a swap falls between two of them, and versions
are recorded per token. Token ids are character codes, 0 stops. The "weights" of a swap are looked at by nobody.
"""

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from services.rollout.engine import EngineDied, GeneratedGroup, GeneratedSample, GenerationRequest
from services.rollout.prompts import CharacterCodec
from shared.messages import FinishReason, Int32Array, PolicyVersion

if TYPE_CHECKING:
    import torch

Script = Callable[[str, PolicyVersion, random.Random], tuple[str, float]]
"""(prompt's text, version, lot) → (completion, its probability)."""

_SUM = re.compile(r"(\d+)\+(\d+)=$")


def arithmetic(prompt: str, version: PolicyVersion, lot: random.Random) -> tuple[str, float]:
    """Answer ``12+34=`` rightly with probability 0.5, else off by one; anything else with ``?``."""
    found = _SUM.search(prompt)
    if found is None:
        return "?", 1.0
    answer = int(found[1]) + int(found[2])
    return str(answer if lot.random() < 0.5 else answer + 1), 0.5


class ScriptedEngine:
    """An :class:`Engine` that answers from ``script``.

    Args:
        script: what it says to a prompt.
        seed: of the lot.
        pause: awaited between two decoding steps; a test that holds it back swaps in mid-generation.
    """

    def __init__(
        self,
        script: Script = arithmetic,
        *,
        seed: int = 0,
        pause: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._script = script
        self._lot = random.Random(seed)
        self._pause = pause
        self._version: PolicyVersion | None = None
        self._closed = False

    @property
    def version(self) -> PolicyVersion | None:
        """The version that the next token will be drawn under; None before the first swap."""
        return self._version

    async def generate(self, request: GenerationRequest) -> GeneratedGroup:
        """Return a group of scripted completions (see :class:`Engine`)."""
        if self._closed or self._version is None:
            raise EngineDied("expected an open engine with weights: a bug")
        started_at_s, sampling = time.time(), request.sampling
        prompt = CharacterCodec().decode([request.prompt_token_ids])[0]
        said = [self._script(prompt, self._version, self._lot) for _ in range(sampling.samples)]
        longest = min(sampling.max_new_tokens, max(len(text) for text, _ in said) + 1)
        versions: list[PolicyVersion] = []
        for _ in range(longest):
            versions.append(self._version)
            await (asyncio.sleep(0) if self._pause is None else self._pause())
        samples = tuple(_sample(text, probability, sampling.max_new_tokens, versions) for text, probability in said)
        return GeneratedGroup(samples, started_at_s, time.time())

    async def swap(self, tensors: "Mapping[str, torch.Tensor]", version: PolicyVersion) -> None:
        """Serve ``version`` from the next decoding step on (see :class:`Engine`)."""
        if self._closed:
            raise EngineDied("expected an open engine: a bug")
        self._version = version

    async def close(self) -> None:
        """Answer nothing any more."""
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
