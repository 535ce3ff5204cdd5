"""The user's code: the program of a driver's process (:mod:`hosts`).

::

    arguments        JSON of {"environment", "tools", "agent", …}, and the parent's process id
    standard input   {"id", "slot", "do": "reset" | "call" | "reward" | "run" | "close", "with": …} per line
    standard output  {"ready": true} or {"ready": false, "error"}; then per question {"id", "value"}, of a call also
                     "done" and "raised", or {"id", "temporary": why} where the same may work later

Each slot is an episode: a thread of its own, and one environment that is reset between episodes. What a tool raises is its
answer.
"""

import asyncio
import functools
import inspect
import json
import math
import os
import pkgutil
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.shared.errors import TemporaryError
from penstock.shared.model.rendering.chat_template import template_library
from penstock.shared.process.parent import confine, take_standard_streams

if TYPE_CHECKING:
    from penstock.services.episodes.drivers.mcp import Servers

HIDDEN = frozenset(("reset", "get_reward", "close"))
"""Public methods of an environment that are no tools."""
_LATER = (TemporaryError, ConnectionError, TimeoutError)
_LONGEST_TEXT = 65_536
_CUT = " … (cut)"


class Code:
    """What the settings name. Raises what its import raises, or ValueError."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self.servers = _servers(named)
        self.environment = None
        self.is_elsewhere = "://" in named["environment"]
        if self.is_elsewhere:
            from penstock.services.episodes.drivers.openenv import OpenEnv

            self.environment = functools.partial(OpenEnv, named["environment"], named["setup_s"], named["tool_s"])
        elif named["environment"]:
            self.environment = pkgutil.resolve_name(named["environment"])
            if not callable(getattr(self.environment, "reset", None)):
                raise ValueError(f"expected a method reset of {named['environment']}, found none")
        resolved = {name: pkgutil.resolve_name(name) for name in named["tools"]}
        self.functions = {name.rpartition(":")[2].rpartition(".")[2]: function for name, function in resolved.items()}
        self.agent = None
        if "://" in named["agent"]:
            from penstock.services.episodes.drivers.verifiers import EnvServer

            self.agent = EnvServer(named["agent"], named["deadline_s"]).run
        elif named["agent"]:
            self.agent = pkgutil.resolve_name(named["agent"])
        called = {**resolved, **({named["agent"]: self.agent} if named["agent"] else {})}
        if wrong := [name for name, function in called.items() if not callable(function)]:
            raise ValueError(f"expected a function as {wrong[0]}, found {type(called[wrong[0]]).__name__}")

    def tools(self, environment: Any) -> dict[str, Callable[..., Any]]:
        """Return the tools by name: functions, and the environment's public methods, or what it has elsewhere."""
        if self.is_elsewhere:
            return {**self.functions, **environment.tools()}
        names = [] if environment is None else [name for name in dir(type(environment)) if not name.startswith("_")]
        methods = {name: getattr(environment, name) for name in names if name not in HIDDEN}
        return {**self.functions, **{name: method for name, method in methods.items() if inspect.ismethod(method)}}

    def schemas(self) -> list[Any]:
        """Return the JSON schemas of all tools.

        Raises:
            ValueError: one has no types, or says nothing of its arguments, or two have one name.
            ConnectionError, TemporaryError: a server does not work.
        """
        environment = None if self.environment is None else self.environment()
        try:
            own = self.functions if self.is_elsewhere else self.tools(environment)
            schemas = _described(own.values())
        except Exception as error:
            raise ValueError(f"a tool needs typed arguments and a docstring with `Args:`: {error}") from error
        if self.is_elsewhere:
            assert environment is not None
            schemas += environment.schemas()
        if self.servers is not None:
            sessions = self.servers.sessions()
            sessions.open()
            schemas += sessions.schemas()
            sessions.close(kept=False)
        names = [schema["function"]["name"] for schema in schemas]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"expected tools of different names, found two that are called {min(twice)}")
        return schemas


def _described(tools: Collection[Callable[..., Any]]) -> list[Any]:
    """Return what transformers reads from signatures and docstrings; it would import torch for an annotation of torch's."""
    if not tools:
        return []
    library = template_library()
    library.is_torch_available = lambda: "torch" in sys.modules
    return [library.get_json_schema(tool) for tool in tools]


def _servers(named: Mapping[str, Any]) -> "Servers | None":
    if not named["mcp"]:
        return None
    from penstock.services.episodes.drivers.mcp import Servers

    return Servers(named["mcp"], named["setup_s"], named["tool_s"])


class Slot(threading.Thread):
    """One episode's thread; ``write`` sends an answer."""

    def __init__(self, code: Code, write: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(daemon=True)
        self.questions: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._code, self._write = code, write
        self._environment: Any = None
        self._sessions = code.servers.sessions() if code.servers is not None else None

    def run(self) -> None:
        with asyncio.Runner() as self._runner:
            while True:
                question = self.questions.get()
                try:
                    answer = getattr(self, f"_{question['do']}")(**question["with"])
                except _LATER as error:
                    answer = {"temporary": _words(error)}
                except BaseException as error:  # noqa: BLE001 (the edge: whatever the user's code raises)
                    answer = {"temporary": f"{_words(error)} ({_place(error)})"}
                if question["do"] != "close":
                    self._write({"id": question["id"], **answer})

    def _reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if self._sessions is not None:
            self._sessions.open()
        if self._code.environment is None:
            return {"value": None}
        if self._environment is None:
            self._environment = self._code.environment()
        text = self._called(self._environment.reset, row)
        return {"value": None if text is None else text_of(text)}

    def _call(self, name: str, arguments: Any) -> dict[str, Any]:
        tools = self._tools()
        if name not in tools:
            return {"value": f"there is no tool {name[:100]!r}, but {', '.join(tools)}", "done": False}
        if not isinstance(arguments, dict):
            return {"value": f"expected a JSON object as the arguments of {name}", "done": False}
        raised = False
        try:
            text = text_of(self._awaited(tools[name](**arguments)))
        except _LATER:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the tool's answer: the policy's business)
            text, raised = _words(error), True
        return {"value": text, "done": bool(getattr(self._environment, "done", False)), "raised": raised}

    def _tools(self) -> dict[str, Callable[..., Any]]:
        return {**self._code.tools(self._environment), **(self._sessions.tools() if self._sessions else {})}

    def _close(self) -> dict[str, Any]:
        """End what the episode holds elsewhere."""
        if self._sessions is not None:
            self._sessions.close()
        if self._code.is_elsewhere and self._environment is not None:
            self._environment.close()
        return {}

    def _reward(self) -> dict[str, Any]:
        get_reward = getattr(self._environment, "get_reward", None)
        return {"value": None if get_reward is None else _finite(self._awaited(get_reward()))}

    def _run(self, task: Any, base_url: str, api_key: str, row: Mapping[str, Any]) -> dict[str, Any]:
        given = {"task": task, "base_url": base_url, "api_key": api_key}
        returned = self._called(self._code.agent, {**row, **given})
        reward = returned.get("reward") if isinstance(returned, dict) else returned
        return {"value": None if reward is None else _finite(reward)}

    def _called(self, function: Any, given: Mapping[str, Any]) -> Any:
        """Call a function with those of the arguments that it takes."""
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = {parameter.name for parameter in parameters}
        return self._awaited(function(**{name: value for name, value in given.items() if takes_all or name in names}))

    def _awaited(self, returned: Any) -> Any:
        async def wait() -> Any:
            return await returned

        return self._runner.run(wait()) if inspect.isawaitable(returned) else returned


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"expected a finite reward, found {number}")
    return number


def text_of(value: Any) -> str:
    """Return a tool's answer as text, cut with a mark if it is long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + _CUT


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _close(descriptors: Sequence[int]) -> None:
    """Let a fork of the user's code not keep the pipes open when this process dies."""
    empty = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(empty, descriptor, inheritable=False)
    os.close(empty)


def main() -> None:
    named, parent = json.loads(sys.argv[1]), int(sys.argv[2])
    confine(parent, None)
    (questions, output), lock = take_standard_streams(), threading.Lock()
    os.register_at_fork(after_in_child=lambda: _close([questions.fileno(), output.fileno()]))

    def write(answer: Mapping[str, Any]) -> None:
        with lock:
            print(json.dumps(answer), file=output, flush=True)

    try:
        code = Code(named)
        write({"ready": True, **({"tools": code.schemas()} if named.get("describe") else {})})
    except BaseException as error:  # noqa: BLE001 (the edge of the process: whoever started it tells people)
        write({"ready": False, "error": _words(error)})
        return
    slots: dict[int, Slot] = {}
    for line in questions:
        question = json.loads(line)
        slot = slots.get(question["slot"])
        if slot is None:
            slot = slots[question["slot"]] = Slot(code, write)
            slot.start()
        slot.questions.put(question)
    os._exit(0)


if __name__ == "__main__":
    main()
