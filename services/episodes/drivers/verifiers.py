"""An EnvServer of verifiers 0.4, in a driver's process (:mod:`child`): it plays an episode as an agent does.

::

    DEALER ▶ [request id, b"run", {task_data, client, model, sampling}]
    ROUTER ◀ [request id, b"delta", {trace, set: {rewards, ok, …}} | {trace, discard}] …, [request id, b"reply", {success, error, …}]

Frames are MessagePack. The row is the task's data; the server asks the policy at the episode's endpoint by the key in
``x-api-key``, which takes its turns and cannot set its reward.
"""

import math
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack
import zmq

from penstock.shared.errors import TemporaryError

_LARGEST_FRAME = 64 << 20
_ASKED_EVERY_S, _SILENT_S = 10.0, 60.0
_MARGIN_S = 5.0


class EnvServer:
    """``address`` of the server; ``deadline_s`` of an episode."""

    def __init__(self, address: str, deadline_s: float) -> None:
        self._address, self._deadline_s = address, deadline_s
        self._context = zmq.Context()

    def run(self, task: Any, base_url: str, api_key: str, **row: Any) -> float:
        """Let the server play an episode; return its reward.

        Raises:
            ConnectionError: the server does not answer.
            TemporaryError: it could not play the episode, or gave no reward.
        """
        client = {
            "type": "eval",
            "base_url": base_url,
            "api_key_var": "PENSTOCK_NO_KEY",
            "headers": {"x-api-key": api_key},
        }
        asked = {"task_data": {**row, "prompt": task}, "client": client, "model": "policy", "sampling": {}}
        run = secrets.token_hex(16).encode()
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_FRAME)
            socket.connect(self._address)
            socket.send_multipart([run, b"run", msgpack.packb(asked, default=str)])
            traces: dict[str, dict[str, Any]] = {}
            try:
                for kind, said in self._said(socket, run):
                    if kind == b"reply":
                        return _reward(said, traces)
                    _note(said, traces)
            except (ValueError, LookupError, TypeError, AttributeError) as error:  # msgpack's too
                raise TemporaryError(f"{self._address} gave no answer of the protocol: {error}"[:1000]) from error
            socket.setsockopt(zmq.LINGER, 1000)
            socket.send_multipart([b"cancel", b"cancel", msgpack.packb({"request_id": run.decode()})])
        raise TemporaryError(
            f"{self._address} did not play the episode within {self._deadline_s:g} s (episodes.deadline_s)"
        )

    def _said(self, socket: Any, run: bytes) -> Iterator[tuple[bytes, Mapping[str, Any]]]:
        """Yield what the server says of the run until the deadline. Raises ConnectionError: it says nothing at all."""
        ends_at_s = time.monotonic() + self._deadline_s - min(_MARGIN_S, self._deadline_s / 10)
        heard_at_s = time.monotonic()
        while (now_s := time.monotonic()) < ends_at_s:
            if socket.poll(1000 * min(_ASKED_EVERY_S, ends_at_s - now_s)):
                heard_at_s = time.monotonic()
                request, kind, content = socket.recv_multipart()
                if request == run:
                    yield kind, msgpack.unpackb(content, strict_map_key=False)
            elif now_s - heard_at_s > _SILENT_S:
                raise ConnectionError(f"{self._address} has not answered for {_SILENT_S:g} s")
            else:
                socket.send_multipart([b"health", b"health", msgpack.packb({})])


def _note(delta: Mapping[str, Any], traces: dict[str, dict[str, Any]]) -> None:
    """Keep what a trace's reward needs. Raises TemporaryError: the turns so far would have the reward of another try."""
    if delta.get("discard"):
        raise TemporaryError("the environment began the episode again")
    changed, name = delta.get("set") or {}, str(delta["trace"])
    if traces and name not in traces:
        raise TemporaryError("expected an episode of one agent, found another trace")
    trace = traces.setdefault(name, {})
    trace.update({key: changed[key] for key in ("rewards", "ok") if key in changed})


def _reward(reply: Mapping[str, Any], traces: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the sum of the weighted rewards. Raises TemporaryError."""
    if not reply["success"]:
        raise TemporaryError(f"the environment could not be played: {reply.get('error')}"[:1000])
    summaries = reply["traces"]
    if len(summaries) != 1:
        raise TemporaryError(f"expected an episode of one agent, found {len(summaries)} traces")
    trace = traces[str(summaries[0]["id"])]
    rewards = trace.get("rewards") or {}
    if not rewards or None in rewards.values() or trace.get("ok") is False:
        raise TemporaryError(f"the environment gave no reward: {(reply.get('head') or {}).get('errors')}"[:1000])
    reward = math.fsum(float(each["score"]) * float(each["weight"]) for each in rewards.values())
    if not math.isfinite(reward):
        raise TemporaryError(f"expected a finite reward, found {reward}")
    return reward
