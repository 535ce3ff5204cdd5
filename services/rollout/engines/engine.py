"""The protocol between the rollout service and inference engines, and the values that cross it.

An engine turns a prompt's token ids into a group of samples, and takes new weights meanwhile::

    generate ─────────────────────────┬──────────────────────▶ GeneratedGroup
    decoding steps   0     1     2    │   3   4
                   stage(offer of 8)  swap(8)
    version_spans                     [[0, 7], [3, 8]]

Guarantees of every engine:

- ``behavior_logprobs`` are of the distribution that the token was drawn from: the whole softmax after temperature,
  under the weights of that decoding step. Temperature 0 picks the most likely token and reports its logprob at
  temperature 1.
- Staging receives weights beside the live ones during decoding. A swap is atomic, between two decoding steps. Running
  groups continue, by default on their key-value cache; their later tokens carry the new version.
- The stop token, if any, is the last of ``token_ids``: the policy chose it.
"""

import dataclasses
from typing import TYPE_CHECKING, Literal, Protocol

from shared.bus.messages import FinishReason, Float32Array, Int32Array, PolicyVersion, Sampling
from shared.errors import StateLost

if TYPE_CHECKING:
    from shared.weights.transport.offer import Offer
    from shared.weights.transport.place import DeviceLocation

SwapPath = Literal["plan", "layerwise", "copy", "bucketed", "adapter"]
"""How weights went from the receive buffer into the model: traced plan, vLLM's own reload, tensor copy,
buckets behind a pause, or adapter.
"""

UpdateMode = Literal["inflight", "drain"]
"""When new weights go live: between two decoding steps, or after the running completions."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """A prompt (int32, P) and its sampling; at least one sample of at least one token."""

    prompt_token_ids: Int32Array
    sampling: Sampling
    seed: int = 0
    """64-bit seed of the group, which makes its draws independent of other requests. vLLM uses its own."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GeneratedSample:
    """A completion of T tokens: ids (int32), logprobs (float32, nats), (first token, version) rows (int32, K × 2)."""

    token_ids: Int32Array
    behavior_logprobs: Float32Array
    version_spans: Int32Array
    finish_reason: FinishReason


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GeneratedGroup:
    """All samples of one request; Unix seconds, counted from when the engine took it up."""

    samples: tuple[GeneratedSample, ...]
    started_at_s: float
    finished_at_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class SwapReport:
    """Duration of a swap: seconds from the last decoding step under the old weights to the first under the new."""

    seconds: float
    path: SwapPath
    copied_bytes: int


class EngineDied(StateLost):
    """The engine failed (a bug, out of memory). The process stops; others redo its work."""


class Engine(Protocol):
    """An inference engine. Safe to call from many tasks of one event loop."""

    @property
    def version(self) -> PolicyVersion | None:
        """The version of the next token's weights; None before the first swap."""

    @property
    def ranks(self) -> int:
        """Number of processes that share the model; each receives every version."""

    @property
    def place(self) -> "DeviceLocation":
        """The device that receives the weights."""

    @property
    def peer_address(self) -> str:
        """``host:port`` at which this replica serves weights to others; empty if it does not."""

    @property
    def torn(self) -> bool:
        """Whether a swap failed midway: nothing is generated until another one completes."""

    async def generate(self, request: GenerationRequest) -> GeneratedGroup:
        """Return a group of ``request.sampling.samples`` completions; cancelling the caller withdraws the request.

        Raises:
            EngineDied: the engine cannot continue.
        """

    async def stage(self, offer: "Offer") -> None:
        """Receive the weights of ``offer`` beside the live ones while generation continues.

        Raises:
            WeightsError: they are incomplete or do not fit this model; the live weights remain.
            EngineDied: the engine cannot continue.
        """

    async def swap(self, version: PolicyVersion) -> SwapReport:
        """Put the staged ``version`` in place; return once the next token uses it.

        Raises:
            WeightsError: the swap failed; the old weights remain, unless :attr:`torn`.
            EngineDied: the engine cannot continue.
        """

    async def logprobs(self, token_ids: Int32Array) -> Float32Array:
        """Return teacher-forced logprobs (float32, nats, temperature 1) of ``token_ids[1:]`` under the live weights.

        Raises:
            EngineDied: the engine cannot continue.
        """

    def update_by(self, mode: UpdateMode) -> None:
        """Set when later versions go live (``weights.update``)."""

    async def close(self) -> None:
        """Stop between two decoding steps and release the device; pending requests are cancelled."""
