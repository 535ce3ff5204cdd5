"""The seam between the rollout service and whatever generates: one protocol, and the values that cross it.

An engine turns a prompt's token ids into a group of samples, and takes new weights while it does so::

    generate ─────────────────────────┬──────────────────────▶ GeneratedGroup
    decoding steps   0     1     2    │   3   4
                   stage(offer of 8)  swap(8)
    version_spans                     [[0, 7], [3, 8]]

What every engine promises:

- ``behavior_logprobs`` are those of the distribution that the token was drawn from: the whole softmax after temperature,
  under the weights of that very decoding step. At temperature 0 the token is the most likely one and its logprob is that
  of the distribution at temperature 1.
- Staging receives new weights beside the live ones while decoding goes on. A swap falls between two decoding steps and is
  whole or not at all. Running groups go on, by default on their key-value cache; the tokens that they write from then on
  carry the new version.
- The stop token, where there is one, is the last of ``token_ids``: the policy chose it.

Text, streams and the ledger are not an engine's business.
"""

import dataclasses
from typing import TYPE_CHECKING, Literal, Protocol

from shared.bus.messages import FinishReason, Float32Array, Int32Array, PolicyVersion, Sampling
from shared.errors import StateLost

if TYPE_CHECKING:
    from shared.weights.transport.offer import Offer
    from shared.weights.transport.place import DeviceLocation

SwapPath = Literal["plan", "layerwise", "copy", "bucketed", "adapter"]
"""How weights went from where they were received into the model: by a traced plan, by vLLM's own reload, tensor by tensor,
bucket by bucket behind a pause, or as an adapter."""

UpdateMode = Literal["inflight", "drain"]
"""When new weights go live: between two decoding steps, or once the completions that run are finished."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One prompt (int32, P) and how to go on from it. ``sampling`` asks for at least one sample of at least one token."""

    prompt_token_ids: Int32Array
    sampling: Sampling
    seed: int = 0
    """Of the group's random numbers, 64 bits, so that what it draws does not depend on what else is generated. vLLM has its own."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GeneratedSample:
    """One completion of T tokens: ids (int32), logprobs (float32, nats), rows of (first token, version) (int32, K × 2)."""

    token_ids: Int32Array
    behavior_logprobs: Float32Array
    version_spans: Int32Array
    finish_reason: FinishReason


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GeneratedGroup:
    """All samples of one request. Unix seconds: from when the engine took it up, not from when it was asked."""

    samples: tuple[GeneratedSample, ...]
    started_at_s: float
    finished_at_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class SwapReport:
    """What a swap took: seconds from the last decoding step under the old weights to the first under the new."""

    seconds: float
    path: SwapPath
    copied_bytes: int


class EngineDied(StateLost):
    """The engine cannot go on; a bug, or memory that ran out. The process stops and others redo what it held."""


class Engine(Protocol):
    """What generates. Safe to call from many tasks of one event loop."""

    @property
    def version(self) -> PolicyVersion | None:
        """The version of the weights that the next token will be drawn from; None before the first swap."""

    @property
    def ranks(self) -> int:
        """Processes that share the model: each receives every version."""

    @property
    def place(self) -> "DeviceLocation":
        """Where the weights go: the kind of device, and which."""

    @property
    def peer_address(self) -> str:
        """``host:port`` where this replica serves what it received to others; empty where it serves nobody."""

    @property
    def torn(self) -> bool:
        """Whether a swap failed in the middle: nothing is generated until another one is whole."""

    async def generate(self, request: GenerationRequest) -> GeneratedGroup:
        """Return a group of ``request.sampling.samples`` completions.

        A caller that is cancelled takes its request back.

        Raises:
            EngineDied: the engine cannot go on.
        """

    async def stage(self, offer: "Offer") -> None:
        """Receive the weights of ``offer`` beside the live ones; generation goes on.

        Raises:
            WeightsError: they did not come whole, or do not fit this model; the live weights go on serving.
            EngineDied: the engine cannot go on.
        """

    async def swap(self, version: PolicyVersion) -> SwapReport:
        """Put what was staged last, which is ``version``, in place; return when the next token will be drawn from it.

        Raises:
            WeightsError: it could not be put in place; the old weights go on serving, unless :attr:`torn` says otherwise.
            EngineDied: the engine cannot go on.
        """

    async def logprobs(self, token_ids: Int32Array) -> Float32Array:
        """Return the logprobs (float32, nats) of ``token_ids[1:]`` under the live weights, each after those before it.

        Teacher-forced at temperature 1. Raises EngineDied where the engine cannot go on.
        """

    def update_by(self, mode: UpdateMode) -> None:
        """Take the next versions between two decoding steps, or once what runs is finished (``weights.update``)."""

    async def close(self) -> None:
        """Stop between two decoding steps and let go of the device; what still waits is cancelled."""
