"""The environment of an OpenEnv server, in a driver's process (:mod:`child`): one WebSocket an episode.

::

    ▶ {"type": "reset" | "step", "data": {…}}   ▶ {"type": "close"}
    ◀ {"type": "observation", "data": {"observation": {…}, "reward": number | null, "done": boolean}}
    ◀ {"type": "error", "data": {"message", "code"}}

An environment of MCP tools lists them, and a step is a call. Any other one has one tool, ``step``, whose arguments are its
action. The reward is the sum over the steps.
"""

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from penstock.services.episodes.messages import parse
from penstock.shared.errors import TemporaryError
from penstock.shared.http.answer import NoHttpAnswer
from penstock.shared.http.client import ask

_LARGEST_MESSAGE = 4 << 20
_LONGEST_SCHEMA, _MOST_TOOLS = 65_536, 128
_OF_POLICY = ("VALIDATION_ERROR", "EXECUTION_ERROR", "INVALID_JSON")
"""Errors that an action makes: they are its answer. Others are of the server."""
_FULL = "CAPACITY_REACHED"
_CLOSE_S, _WAIT_S = 2.0, 0.5


class OpenEnv:
    """``url`` of the server; for one thread."""

    def __init__(self, url: str, setup_s: float, tool_s: float) -> None:
        self._url, self._setup_s, self._tool_s = url.rstrip("/"), setup_s, tool_s
        self._socket: ClientConnection | None = None
        self._held = contextlib.ExitStack()
        self._schemas: list[dict[str, Any]] | None = None
        self._rewards: list[float] = []
        self.done = False

    def reset(self, **row: Any) -> str | None:
        """Begin an episode in a session of its own, once the server has room. Raises ConnectionError, TemporaryError."""
        self.schemas()
        self.close()
        self._rewards, self.done = [], False
        answer = self._begin("reset", row)
        if error := _error(answer):
            raise ConnectionError(f"{self._url} failed in `reset`: {error}"[:1000])
        return self._observed(answer) or None

    def _begin(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to the first message of a session, which waits until the server has room."""
        give_up_at_s = time.monotonic() + self._setup_s
        while True:
            left_s = max(0.1, give_up_at_s - time.monotonic())
            self._connect(left_s)
            answer = self._ask(kind, data, left_s)
            code = _error(answer).get("code")
            if code is None or code in _OF_POLICY:
                return answer
            self.close()
            if code != _FULL or time.monotonic() + _WAIT_S > give_up_at_s:
                raise ConnectionError(f"{self._url} refused `{kind}`: {_error(answer)}"[:1000])
            time.sleep(_WAIT_S)

    def get_reward(self) -> float:
        """Return the sum of the steps' rewards. Raises TemporaryError: the episode ended, and no step had one."""
        if self.done and not self._rewards:
            raise TemporaryError(f"{self._url} ended the episode without a reward")
        return math.fsum(self._rewards)

    def close(self) -> None:
        """Tell the server that the session is over, whose place another one takes then."""
        if self._socket is not None:
            with contextlib.suppress(WebSocketException, OSError):
                self._socket.send(json.dumps({"type": "close"}))
            self._socket = None
        self._held.close()

    def schemas(self) -> list[dict[str, Any]]:
        """Return what the policy can call. Raises ConnectionError, TemporaryError or ValueError."""
        if self._schemas is None:
            answer = self._begin("step", {"type": "list_tools"})
            self.close()
            listed = None if _error(answer) else _observation(answer).get("tools")
            self._schemas = [_tool(each) for each in listed] if isinstance(listed, list) else [self._of_actions()]
            if len(self._schemas) > _MOST_TOOLS or len(json.dumps(self._schemas)) > _MOST_TOOLS * _LONGEST_SCHEMA:
                raise ValueError(f"expected at most {_MOST_TOOLS} tools, found more, or longer ones")
        return self._schemas

    def _of_actions(self) -> dict[str, Any]:
        """Return the tool ``step``."""
        try:
            answer = ask("GET", f"{self._url}/schema", timeout_s=self._setup_s, trust_env=False)
            action = answer.json()["action"]
            properties = {name: of for name, of in action["properties"].items() if name != "metadata"}
        except (NoHttpAnswer, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"could not read the schema of actions at {self._url}/schema: {error}") from error
        return _schema("step", str(action.get("description", "")), {**action, "properties": properties})

    def tools(self) -> dict[str, Callable[..., str]]:
        """Return what sends a step, by the tool's name."""
        names = [str(schema["function"]["name"]) for schema in self.schemas()]
        return {name: functools.partial(self._step, name) for name in names}

    def _step(self, tool: str, /, **arguments: Any) -> str:
        is_action = self.schemas()[0]["function"]["name"] == "step"  # no MCP tool may have this name
        action = arguments if is_action else {"type": "call_tool", "tool_name": tool, "arguments": arguments}
        if self._socket is None:
            raise ConnectionError(f"the session with {self._url} was lost")
        answer = self._ask("step", action, self._tool_s)
        if error := _error(answer):
            if error.get("code") not in _OF_POLICY:
                self.close()
                raise ConnectionError(f"{self._url} failed in `step`: {error}"[:1000])
            return f"error: {error.get('message')}{_details(error.get('errors'))}"
        data = answer["data"]
        if (reward := data.get("reward")) is not None:
            self._rewards.append(_finite(reward))
        self.done = data.get("done") is True
        return self._observed(answer)

    def _connect(self, within_s: float) -> None:
        address = f"ws{self._url.removeprefix('http')}/ws"
        try:
            socket = connect(
                address,
                open_timeout=within_s,
                close_timeout=_CLOSE_S,
                max_size=_LARGEST_MESSAGE,
                compression=None,
                proxy=None,
            )
            self._held.enter_context(socket)
            self._socket = socket
        except (WebSocketException, OSError) as error:
            raise ConnectionError(f"could not connect to {address}: {error}") from error

    def _ask(self, kind: str, data: Mapping[str, Any], within_s: float) -> Mapping[str, Any]:
        assert self._socket is not None
        try:
            with contextlib.suppress(WebSocketException):  # it may have said why it closed the connection
                self._socket.send(json.dumps({"type": kind, "data": data}, default=str))
            answer = parse(str(self._socket.recv(within_s, decode=True)))
        except (WebSocketException, OSError, ValueError) as error:  # TimeoutError, which is an OSError, too
            self.close()
            raise ConnectionError(f"{self._url} did not answer `{kind}`: {type(error).__name__} {error}") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            self.close()
            raise TemporaryError(f"{self._url} gave no answer of the protocol to `{kind}`")
        return answer

    def _observed(self, answer: Mapping[str, Any]) -> str:
        """Return an observation as text: of a tool its result, of others what is not empty."""
        observation = _observation(answer)
        if "tool_name" in observation:
            error = observation.get("error")
            return _result(observation.get("result")) if not error else f"error: {_result(error)}"
        shown = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
        if len(shown) == 1 and isinstance(text := next(iter(shown.values())), str):
            return text
        return json.dumps(shown, ensure_ascii=False) if shown else ""


def _observation(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    observation = answer["data"].get("observation")
    if answer.get("type") != "observation" or not isinstance(observation, dict):
        raise TemporaryError(f"expected an observation of the environment, found {str(answer)[:200]}")
    return observation


def _error(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the error that an answer is, or nothing."""
    return {"code": "", **answer["data"]} if answer.get("type") == "error" else {}


def _details(errors: Any) -> str:
    """Return which arguments are wrong, as pydantic says it."""
    known = [each for each in errors if isinstance(each, dict)] if isinstance(errors, list) else []
    return "".join(f"; {each.get('loc')}: {each.get('msg')}" for each in known)


def _finite(reward: Any) -> float:
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise TemporaryError(f"expected a finite reward of the environment, found {str(reward)[:200]}")
    return float(reward)


def _result(value: Any) -> str:
    """Return a tool's result as text; that of FastMCP has it in ``content``."""
    if isinstance(value, dict) and isinstance(content := value.get("content"), list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tool(listed: Any) -> dict[str, Any]:
    if not isinstance(listed, dict) or not isinstance(listed.get("name"), str):
        raise ValueError(f"expected the environment's tools with names, found {str(listed)[:200]}")
    return _schema(listed["name"], str(listed.get("description", "")), dict(listed.get("input_schema") or {}))


def _schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": dict(parameters)},
    }
