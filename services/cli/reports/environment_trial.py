"""Try a run's environment or tools in processes of their own, as the service does, without a bus or a policy.

::

    a row twice ──▶ one text      each tool ──▶ an answer in time      episodes of random calls ──▶ rewards, what is left open
"""

import asyncio
import dataclasses
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from penstock.services.coordinator.admission.dataset import Problem, rows_to_try
from penstock.services.episodes.drivers.hosts import Hosts
from penstock.services.episodes.drivers.loop import row_of
from penstock.services.episodes.drivers.python import TOOL
from penstock.services.episodes.messages import Message, call
from penstock.services.episodes.renderer import Renderer
from penstock.services.up.display import console
from penstock.shared.bus.messages import Prompt
from penstock.shared.errors import TemporaryError
from penstock.shared.model.tokenizer import Tokenizer, encode_text, special_tokens
from penstock.shared.settings import Settings
from penstock.shared.text.terminal import escaped_line

_EPISODES, _WARM = 50, 10
"""Episodes of random calls; descriptors and processes after the first few are compared with those at the end."""
_BUGS = ("TypeError", "AttributeError", "NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError")
_TEXTS = ("a", "7", "1+1", "", "ü", "two words")


def try_environment(settings: Settings, problems: Sequence[Problem], tokenizer: Tokenizer) -> bool:
    """Print what an environment or tools do; return whether there is no fault. Raises SettingsError: they cannot be loaded."""
    if settings.episodes.agent:
        console.say(f"\nagent {settings.episodes.name}: not tried (it asks the policy)")
        return True
    trial = Trial(settings, rows_to_try(problems, [""]))
    asyncio.run(trial.run())
    faults = [*trial.faults, *template_faults(Renderer(tokenizer, settings.data.chat_template), tokenizer, trial.tools)]
    lines = [*trial.lines, *(f"fault: {fault}" for fault in faults)]
    console.say("")
    for line in lines:
        console.say(escaped_line(f"episodes {settings.episodes.name}: {line}"))
    return not faults


class Trial:
    """What was seen in ``lines``, and in ``faults`` what must change before training."""

    def __init__(self, settings: Settings, prompts: Sequence[Prompt]) -> None:
        self._settings, self._hosts = settings.episodes, Hosts(settings.episodes)
        self._is_scored = any(scorer.kind == "environment" for scorer in settings.reward.scorers)
        self._rows = [row_of(prompt, settings.data.answer_field) for prompt in prompts] or [{}]
        self._random = random.Random(0)
        self._rewards: list[float] = []
        self._held: dict[int, tuple[int, int]] = {}
        self.tools: list[Any] = []
        self.lines: list[str] = []
        self.faults: list[str] = []

    async def run(self) -> None:
        """Raises SettingsError: it cannot be loaded."""
        try:
            await self._hosts.open()
            self.tools = self._hosts.tools
            if self._settings.executor:
                self.lines.append(f"tool {TOOL['function']['name']}: a session of the code executor, not tried")
            self.lines.append(f"tools {', '.join(map(_signature, self.tools)) or 'none'}")
            await self._try_resets()
            await self._try_tools()
            if self._settings.environment and not self.faults:
                await self._try_episodes()
        except TemporaryError as error:
            self.faults.append(f"{error}: an episode would be played again, and its group be lost")
        finally:
            await self._hosts.close()

    async def _try_resets(self) -> None:
        for row in self._rows:
            texts = [(await self._episode(row, [])).text for _ in range(2)]
            if texts[0] != texts[1]:
                self.faults.append(
                    f"reset gave {texts[0]!r:.80} and {texts[1]!r:.80} for one row, whose episodes are compared with one "
                    "another: draw from a seed in the row"
                )
        self.lines.append("reset adds no text" if texts[0] is None else f"reset adds {texts[0]!r:.80} to the prompt")

    async def _try_tools(self) -> None:
        """Call each tool with arguments of its schema, and with others."""
        for tool in self.tools:
            name, raised = tool["function"]["name"], dict[str, str]()
            fitting = [self._arguments(tool) for _ in range(5)]
            for given in [*fitting, {}, {"no_such_argument": None}]:
                shown = f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"[:200]
                try:
                    said = (await self._episode(self._rows[0], [(name, given)])).said
                except TemporaryError as error:
                    self.faults.append(
                        f"{shown}: {error}: its episode would be played again, and its group be lost: return what went wrong "
                        "as text, or raise episodes.tool_s"
                    )
                    break
                if said["raised"] and given in fitting:
                    raised[shown] = said["value"][:200]
            for shown, words in list(raised.items())[:1]:
                if words.startswith(_BUGS):
                    self.faults.append(f"{shown} raised {words}, with arguments of its schema: correct it")
                else:
                    self.lines.append(f"{shown} raised {words}: the policy reads this as its answer")

    async def _try_episodes(self) -> None:
        for number in range(_EPISODES):
            calls = [self._random.choice(self.tools) for _ in range(self._random.randint(0, self._settings.max_turns))]
            row = self._rows[number % len(self._rows)]
            played = await self._episode(row, [(tool["function"]["name"], self._arguments(tool)) for tool in calls])
            if played.reward is not None:
                self._rewards.append(played.reward)
            if number in (_WARM - 1, _EPISODES - 1):
                self._compare(played.pid)
        if not self._rewards:
            if self._is_scored:
                self.faults.append("it has no method get_reward, which the scorer `environment` reads: add one")
            return
        low, high, mean = min(self._rewards), max(self._rewards), statistics.fmean(self._rewards)
        self.lines.append(f"{_EPISODES} episodes of random calls: rewards of {low:.3g} to {high:.3g}, mean {mean:.3g}")
        if low == high:
            self.lines.append(
                f"warning: every reward was {low:.3g}; if a policy's are, too, it learns nothing: reward parts of a solution"
            )

    def _compare(self, pid: int) -> None:
        """Note what a process holds; add a fault if that grows with its episodes."""
        process = psutil.Process(pid)
        held = process.num_fds(), len(process.children(recursive=True))
        before = self._held.setdefault(pid, held)
        for kind, first, last in zip(("file descriptors", "processes"), before, held, strict=True):
            if last - first > (_EPISODES - _WARM) // 4:
                self.faults.append(
                    f"its process has {first} {kind} after {_WARM} episodes and {last} after {_EPISODES}: close in reset what "
                    "the episode before has opened"
                )

    async def _episode(self, row: Mapping[str, Any], calls: Sequence[tuple[str, Any]]) -> "Played":
        """Play calls until the episode is done. Raises TemporaryError."""
        of = self._settings
        async with self._hosts.place(object()) as (host, slot):
            text = (await host.ask(slot, "reset", of.setup_s + of.patience_s, "setup_s", row=row))["value"]
            said: Mapping[str, Any] = {}
            for name, given in calls:
                said = await host.ask(slot, "call", of.tool_s + of.patience_s, "tool_s", name=name, arguments=given)
                if said.get("done"):
                    break
            reward = None
            if of.environment:
                reward = (await host.ask(slot, "reward", of.tool_s, "tool_s"))["value"]
            return Played(text, said, reward, host.pid)

    def _arguments(self, tool: Any) -> dict[str, Any]:
        schema = tool["function"]["parameters"]
        needed = schema.get("required", ())
        properties = schema.get("properties", {}).items()
        return {name: self._value(of) for name, of in properties if name in needed or self._random.random() < 0.5}

    def _value(self, schema: Mapping[str, Any]) -> Any:
        """Return a value of a JSON schema."""
        draw = self._random
        if "enum" in schema:
            return draw.choice(schema["enum"])
        kind = schema.get("type", "string")
        match draw.choice(kind) if isinstance(kind, list) else kind:
            case "integer":
                return draw.randint(0, 15)
            case "number":
                return round(draw.uniform(-10, 10), 2)
            case "boolean":
                return draw.random() < 0.5
            case "array":
                return [self._value(schema.get("items", {})) for _ in range(draw.randint(0, 3))]
            case "object":
                return {name: self._value(of) for name, of in schema.get("properties", {}).items()}
            case "null":
                return None
        return draw.choice(_TEXTS)


@dataclasses.dataclass(frozen=True, slots=True)
class Played:
    text: str | None
    said: Mapping[str, Any]
    """Of the last call."""
    reward: float | None
    pid: int


def template_faults(renderer: Renderer, tokenizer: Tokenizer, tools: Sequence[Any]) -> list[str]:
    """Return what the policy's chat template does to the tools' answers."""
    faults, control = list[str](), special_tokens(tokenizer)
    if "tool" in renderer.branching():
        faults.append(
            "the chat template writes what is before a tool's answer otherwise after it, so that each turn is a branch, which "
            "takes longer: set a policy.tokenizer whose template appends"
        )

    def rendered(text: str) -> list[int]:
        asked = [
            Message("user", "2"),
            Message("assistant", calls=(call("f", {"x": 1}),)),
            Message("tool", text, name="f"),
        ]
        return list(map(int, renderer.whole(asked, tools)))

    hostile = f"3{''.join(control.values())}4"
    plain, ids = rendered("3 4"), rendered(hostile)
    texts = tokenizer.batch_decode(
        [ids, *(encode_text(tokenizer, each) for each in hostile)], skip_special_tokens=False
    )
    known = "".join(each for each, written in zip(hostile, texts[1:], strict=True) if written.strip() == each)
    if known not in texts[0] or sum(token in control for token in ids) != sum(token in control for token in plain):
        faults.append(
            f"the chat template changes a tool's answer that spells control tokens, such as {hostile[1:20]!r}: set another "
            "policy.tokenizer"
        )
    return faults


def _signature(tool: Any) -> str:
    of = tool["function"]
    return f"{of['name']}({', '.join(of['parameters'].get('properties', {}))})"
