"""The protocol of inference engines, and the values that cross it.

An engine turns a prompt's token ids into a group of samples, and takes new weights meanwhile::

    generate ─────────────────────────┬──────────────────────▶ GeneratedGroup
    decoding steps   0     1     2    │   3   4
                   stage(offer of 8)  swap(8)
    version_spans                     [[0, 7], [3, 8]]

- ``behavior_logprobs`` are of the distribution that the token was drawn from, under that step's weights: the softmax
  after temperature, over the tokens that truncation leaves (min-p, then top-k, then top-p, as in vLLM). These are the
  sample's support. Temperature 0 is greedy and reports logprobs at temperature 1.
- Swaps are atomic, between two decoding steps. Running groups continue, by default on their key-value cache.
- The stop token, if any, is the last of ``token_ids``, and so is the token that completes a stop text.
"""

import dataclasses
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from penstock.shared.bus.messages import FinishReason, Float32Array, Int32Array, PolicyVersion, Sample, Sampling, no_ids
from penstock.shared.errors import StateLost
from penstock.shared.model.routes import RouteArray
from penstock.shared.process.memory_timeline import Held

if TYPE_CHECKING:
    from penstock.services.rollout.engines.stop_texts import StopTexts
    from penstock.shared.weights.transport.offer import Offer
    from penstock.shared.weights.transport.place import DeviceLocation

SwapPath = Literal["plan", "shares", "layerwise", "copy", "bucketed", "adapter"]
"""How weights went live: traced plan, vLLM's reload, tensor copy, buckets behind a pause, or adapter."""

UpdateMode = Literal["inflight", "drain"]
"""Swap between two decoding steps, or after the running completions."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """A prompt (int32, P) and its sampling, of at least one sample and token."""

    prompt_token_ids: Int32Array
    sampling: Sampling
    seed: int = 0
    """64-bit seed that makes draws independent of other requests; vLLM uses its own."""
    stop: "StopTexts | None" = None
    salt: PolicyVersion | None = None
    """Whose prefix cache it shares; None: the version's own."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GeneratedSample:
    """T tokens: ids (int32), logprobs (float32, nats), (first token, version) rows (int32, K × 2)."""

    token_ids: Int32Array
    behavior_logprobs: Float32Array
    version_spans: Int32Array
    finish_reason: FinishReason
    support_sizes: Int32Array = dataclasses.field(default_factory=no_ids)
    """As in :class:`Sample`; empty without restrictions."""
    support_ids: Int32Array = dataclasses.field(default_factory=no_ids)
    cached_tokens: int = 0
    """Of its prompt, whose keys and values were in the prefix cache."""
    routes: RouteArray | None = None
    """As in :mod:`penstock.shared.model.routes`; None: not recorded."""


def with_texts(generated: Sequence[GeneratedSample], texts: Sequence[str], *, supports: bool) -> tuple[Sample, ...]:
    """Return the samples of a message; ``supports``: with the tokens that could be drawn."""
    return tuple(
        Sample(
            token_ids=sample.token_ids,
            behavior_logprobs=sample.behavior_logprobs,
            version_spans=sample.version_spans,
            finish_reason=sample.finish_reason,
            text=text,
            support_sizes=sample.support_sizes if supports else no_ids(),
            support_ids=sample.support_ids if supports else no_ids(),
        )
        for sample, text in zip(generated, texts, strict=True)
    )


def unstopped(length: int, sampling: Sampling, stop: tuple[int, ...]) -> tuple[Int32Array, Int32Array]:
    """Return support sizes and ids of ``length`` tokens whose only restriction is a minimum length: no stop token."""
    before = min(length, sampling.min_new_tokens) if sampling.temperature > 0 else 0
    if not before or not stop:
        return no_ids(), no_ids()
    sizes = np.zeros(length, dtype=np.int32)
    sizes[:before] = -len(stop)
    return sizes, np.tile(np.array(stop, dtype=np.int32), before)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GeneratedGroup:
    """All samples of a request; Unix times, starting when the engine took it up."""

    samples: tuple[GeneratedSample, ...]
    started_at_s: float
    finished_at_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class SwapReport:
    """Seconds from the last decoding step under old weights to the first under new."""

    seconds: float
    path: SwapPath
    copied_bytes: int


class EngineDied(StateLost):
    """The engine failed; the process stops."""


class Engine(Protocol):
    """An inference engine, safe for many tasks of one event loop. Every coroutine may raise EngineDied."""

    @property
    def version(self) -> PolicyVersion | None:
        """The next token's version; None before the first swap."""

    @property
    def ranks(self) -> int:
        """Processes that share the model; each receives every version."""

    @property
    def place(self) -> "DeviceLocation":
        """The device that receives the weights."""

    @property
    def peer_address(self) -> str:
        """``host:port`` at which this replica serves weights; empty if it keeps no copy to serve."""

    @property
    def drawn_tokens(self) -> int:
        """Tokens drawn since the process started, those of unfinished samples, too."""

    @property
    def held(self) -> Sequence[Held]:
        """What each rank holds on its device, as last measured."""

    @property
    def torn(self) -> bool:
        """Whether a swap failed midway, which blocks generation until another completes."""

    def generate(self, request: GenerationRequest) -> Awaitable[GeneratedGroup]:
        """Return ``request.sampling.samples`` completions; cancellation withdraws the request."""

    async def stage(self, offer: "Offer") -> None:
        """Receive ``offer`` beside the live weights; after a WeightsError these remain."""

    async def swap(self, version: PolicyVersion) -> SwapReport:
        """Put the staged ``version`` in place; return once the next token uses it.

        Raises:
            WeightsError: the old weights remain, unless :attr:`torn`.
        """

    async def logprobs(self, token_ids: Int32Array) -> Float32Array:
        """Return teacher-forced logprobs (float32, nats, temperature 1) of ``token_ids[1:]``."""

    def update_by(self, mode: UpdateMode) -> None:
        """Set when later versions go live (``weights.update``)."""

    async def close(self) -> None:
        """Stop between two decoding steps, cancel requests and release the device."""
