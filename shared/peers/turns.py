"""Turns of episodes: frames between the service that keeps episodes and a rollout replica (docs/reference/listeners.md).

::

    client ──▶ {prompt: a Prompt, token_ids, number, salt}          one at a time on a connection
    server ──▶ {running, token_ids, logprobs, spans, sizes, ids, finish, cached, routes}
            or {running, not_here: why}                             another replica may draw it
            or {running, refused: why}                              none can

A closed connection withdraws the turn.
"""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import FinishReason, Float32Array, Int32Array, PolicyVersion, Prompt, Purpose, no_ids
from penstock.shared.errors import MessageError, NotHere, PeerError, PermanentError
from penstock.shared.peers.frames import Frame


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TurnRequest:
    """Draw after ``token_ids``, by the sampling of ``prompt``, with its ``min_version`` or a newer one; of an evaluation with
    exactly this one.
    """

    prompt: Prompt
    token_ids: Int32Array
    number: int
    """Of the turn in its episode; part of its seed."""
    salt: PolicyVersion
    """The newest version when the episode started: its turns share a prefix cache."""

    @property
    def is_evaluation(self) -> bool:
        return self.prompt.purpose is Purpose.EVALUATE

    def frame(self) -> Frame:
        return {
            "prompt": wire.encode(self.prompt),
            "token_ids": self.token_ids.tobytes(),
            "number": self.number,
            "salt": int(self.salt),
        }


def read_request(frame: Frame) -> TurnRequest:
    """Raises PeerError."""
    try:
        prompt = wire.decode(_of(frame, "prompt", bytes), Prompt)
    except MessageError as error:
        raise PeerError(str(error)) from error
    token_ids = _array(frame, "token_ids", np.int32)
    number, salt = _of(frame, "number", int), _of(frame, "salt", int)
    if not len(token_ids) or int(token_ids.min()) < 0 or number < 0 or salt < 0:
        raise PeerError("expected token ids, and a turn's number and salt of at least 0, from the peer, found others")
    return TurnRequest(prompt, token_ids, number, PolicyVersion(salt))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DrawnTurn:
    """T sampled tokens: ids, logprobs (nats), (first token, version) rows, and supports as in :class:`Sample`; ``cached``: tokens
    before them that the replica's prefix cache had; ``routes``: the experts of the tokens from which they were drawn
    (``penstock.shared.model.routes``), or empty.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    version_spans: Int32Array
    finish_reason: FinishReason
    support_sizes: Int32Array = dataclasses.field(default_factory=no_ids)
    support_ids: Int32Array = dataclasses.field(default_factory=no_ids)
    cached: int = 0
    routes: bytes = b""

    def frame(self) -> Frame:
        return {
            "token_ids": self.token_ids.tobytes(),
            "logprobs": self.logprobs.tobytes(),
            "spans": self.version_spans.tobytes(),
            "sizes": self.support_sizes.tobytes(),
            "ids": self.support_ids.tobytes(),
            "finish": self.finish_reason.value,
            "cached": self.cached,
            "routes": self.routes,
        }


def read_drawn(frame: Frame) -> DrawnTurn:
    """Raises NotHere, PermanentError, or PeerError: it has no turn."""
    if "not_here" in frame:
        raise NotHere(_of(frame, "not_here", str))
    if "refused" in frame:
        raise PermanentError(_of(frame, "refused", str))
    token_ids, logprobs = _array(frame, "token_ids", np.int32), _array(frame, "logprobs", np.float32)
    spans, sizes = _array(frame, "spans", np.int32), _array(frame, "sizes", np.int32)
    finish = _of(frame, "finish", str)
    if (
        not len(token_ids)
        or len(logprobs) != len(token_ids)
        or not len(spans)
        or len(spans) % 2
        or finish not in _FINISH
    ):
        raise PeerError("expected tokens with their logprobs, versions and a reason to end from the peer, found others")
    if len(sizes) not in (0, len(token_ids)):
        raise PeerError("expected a support of every token, or of none, from the peer, found others")
    ids = _array(frame, "ids", np.int32)
    cached = _of(frame, "cached", int)
    if cached < 0:
        raise PeerError(f"expected at least 0 cached tokens of the peer, found {cached}")
    return DrawnTurn(
        token_ids, logprobs, spans.reshape(-1, 2), FinishReason(finish), sizes, ids, cached, _of(frame, "routes", bytes)
    )


def read_running(frame: Frame) -> int:
    """Return how many turns the replica draws now."""
    running: int = _of(frame, "running", int)
    return running


_FINISH = frozenset(FinishReason)


def _array(frame: Frame, name: str, dtype: type[Any]) -> npt.NDArray[Any]:
    content = _of(frame, name, bytes)
    if len(content) % 4:
        raise PeerError(f"expected numbers of four bytes as {name} of the peer, found {len(content)} bytes")
    return np.frombuffer(content, dtype=dtype)


def _of(frame: Frame, name: str, kind: type[Any]) -> Any:
    if type(value := frame.get(name)) is not kind:
        raise PeerError(f"expected {name} of the peer as {kind.__name__}, found {type(value).__name__}")
    return value
