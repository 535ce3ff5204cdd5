"""Laws of the episodes service: a real bus, a real replica's sockets, real processes of users' code; a scripted policy."""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from penstock.services.episodes.drivers.agent import AgentFunction, AgentPlayer
from penstock.services.episodes.drivers.agent_server import AgentServer
from penstock.services.episodes.drivers.hosts import Hosts
from penstock.services.episodes.drivers.loop import TOOL_CALLS, ToolLoop
from penstock.services.episodes.drivers.python import Python
from penstock.services.episodes.http.gateway import Gateway
from penstock.services.episodes.replicas import Replicas
from penstock.services.episodes.service import LOST, Episodes, Policy, work
from penstock.services.rollout.engines.prompts import CharacterCodec
from penstock.services.rollout.engines.scripted import ScriptedEngine
from penstock.services.rollout.episode_turns import keeps_salt
from penstock.services.rollout.service import Rollout
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Ended, PolicyVersion, Prompt, RolloutGroup
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.transcripts import turns_of
from penstock.shared.errors import PeerError, SettingsError
from penstock.shared.peers import frames
from penstock.shared.peers.handshake import introduce
from penstock.shared.process.telemetry import Presence, Status
from penstock.shared.settings import Settings
from penstock.shared.weights.receiver.puller import Puller
from tests.conftest import PATIENCE_S, until
from tests.rollout.test_service import announce
from tests.support import builders, replicas, weights
from tests.support.agent_server import HOSTILE, agent_server
from tests.support.chat_tokenizers import characters
from tests.support.clients import CLIENTS
from tests.support.raw_redis import raw

GUESS = "tests.support.guessing:Guess"
TROUBLE = "tests.support.guessing:Trouble"


def binary_search(prompt: str, version: PolicyVersion, lot: random.Random) -> tuple[str, float]:
    """Guess by the hints so far; say the end once it was right."""
    low, high = 0, 15
    tries = re.findall(r'"number": ?(\d+)\}.*?t:([<>=])', prompt)
    for number, hint in tries:
        low, high = (low, int(number) - 1) if hint == "<" else (int(number) + 1, high)
    if tries and tries[-1][1] == "=":
        return "done", 0.5
    return f'<tool_call>{{"name": "guess",  "arguments": {{"number":{(low + high) // 2}}}}}</tool_call>', 0.5


def settings(executor_address: str = "", **changes: Any) -> Settings:
    episodes = {"environment": GUESS, "max_turns": 6, "setup_s": PATIENCE_S, "tool_s": PATIENCE_S, **changes}
    return Settings.model_validate(
        {
            "episodes": episodes,
            "sampling": {"group_size": 2, "max_new_tokens": 80},
            "weights": {"deadline_s": PATIENCE_S},
            "bus": {"drain_s": 0.2},
            "internal": {"claim_after_s": 0.6, "max_attempts": 3, "heartbeat_s": 0.05},
            "reward": {
                "executor": {"address": executor_address},
                **({"scorers": [{"kind": "environment"}]} if episodes["environment"] or episodes.get("agent") else {}),
            },
        }
    )


class Player:
    """A rollout replica and the episodes service in this process, over real sockets and a real bus."""

    def __init__(self, bus: Bus, made: Settings, script: Any = binary_search) -> None:
        self.bus, self.settings = bus, made
        self.script, self.pause = script, None
        self.hosts = Hosts(made.episodes)
        self.tasks: list[asyncio.Task[Any]] = []
        self.contexts: list[Any] = []
        self.server: AgentServer | None = None
        self.python: Python | None = None

    async def start_replica(self, name: str = "rollout-0") -> asyncio.Task[Any]:
        context = replicas.context(self.settings, self.bus, name, Status())
        await context.secret.refresh()
        engine = ScriptedEngine(self.script, receive=weights.receiving(), pause=self.pause)
        puller = Puller(engine.place, engine.ranks, PATIENCE_S, weights.secret)
        rollout = Rollout(context, engine, CharacterCodec(), puller, replicas.own_device(context))
        task = asyncio.create_task(rollout.run(context.stop, 0.05))
        beats = Presence(self.bus, "rollout", name, 0.05, context.status)
        self.tasks += [task, asyncio.create_task(beats.run(asyncio.Event()))]
        self.contexts.append(context)
        return task

    async def start(self) -> None:
        await self.hosts.open()
        await self.start_replica()
        context = dataclasses.replace(
            replicas.context(self.settings, self.bus, "episodes-0", Status()), service="episodes"
        )
        await context.secret.refresh()
        known = Replicas(self.bus, context.secret)
        policy = Policy.of(self.settings, characters())
        self.python = Python(self.settings) if self.settings.episodes.executor else None
        driver: Any = ToolLoop(self.settings.episodes, self.hosts, "answer", self.python)
        if self.settings.episodes.agent:
            gateway = Gateway("127.0.0.1:0", context.secret, "policy", policy.context_tokens)
            self.tasks.append(asyncio.create_task(gateway.run()))
            self.server = AgentServer(self.settings.episodes) if self.settings.episodes.agent_url else None
            driver = AgentPlayer(self.server or AgentFunction(self.settings.episodes, self.hosts), gateway, "answer")
        made = Episodes(self.settings, policy, known, driver, "episodes-0", self.bus)
        self.tasks.append(asyncio.create_task(work(context, made, known)))
        self.contexts.append(context)

    async def end(self) -> None:
        for context in self.contexts:
            context.stop.set()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.hosts.close()
        if self.python is not None:
            await self.python.close()
        if self.server is not None:
            await self.server.close()

    async def admit(self, *secrets: int, clients: Sequence[str] = ()) -> None:
        await raw(self.bus).hset(self.bus.keys.named("run"), mapping={"state": "running", "newest_version": 3})
        named = zip(secrets, clients or [""] * len(secrets), strict=True)
        prompts = [self.prompt(group, secret, client) for group, (secret, client) in enumerate(named)]
        assert await Ledger(self.bus).admit(prompts, 100, 10, 100, PolicyVersion(3)) == len(secrets)

    def prompt(self, group: int, secret: int, client: str = "") -> Prompt:
        made = builders.prompt(group, f"guess, row {group}", min_version=3)
        sampling = dataclasses.replace(made.sampling, max_new_tokens=80)
        return dataclasses.replace(
            made, extra={"secret": secret, "client": client}, sampling=sampling, environment=self.settings.episodes.name
        )

    async def groups(self, count: int) -> list[RolloutGroup]:
        taken: list[RolloutGroup] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(taken) < count:
                entries = await self.bus.read(streams.ROLLOUTS, RolloutGroup, "test", 10, 1.0)
                taken += [entry.message() for entry in entries]
        return sorted(taken, key=lambda group: group.group_id)


@contextlib.asynccontextmanager
async def players(bus: Bus, folder: Path) -> AsyncIterator[Any]:
    """Yield what starts players; end them after the body."""
    started: list[Player] = []

    async def begin(script: Any = binary_search, pause: Any = None, **changes: Any) -> Player:
        player = Player(bus, settings(**changes), script)
        player.pause = pause
        started.append(player)
        await announce(bus, folder, 3)
        await player.start()
        return player

    yield begin
    for player in started:
        await player.end()


@pytest.fixture
async def playing(bus: Bus, tmp_path: Path) -> AsyncIterator[Any]:
    async with players(bus, tmp_path) as begin:
        yield begin


def drawn_tokens() -> float:
    return REGISTRY.get_sample_value("penstock_rollout_generated_tokens_total", {"purpose": "train"}) or 0.0


async def test_an_entry_becomes_a_sample_of_several_turns_with_its_environments_reward(playing: Any) -> None:
    player = await playing()
    before = drawn_tokens()
    await player.admit(5, 14)
    first, second = await player.groups(2)
    assert len(first.samples) == len(second.samples) == 2
    assert first.prompt_token_ids.tolist() == []
    for group in (first, second):
        for sample in group.samples:
            assert (sample.environment_reward, sample.ended, sample.versions) == (1.0, Ended.STOP, {3})
            assert sample.segments[:, 2].tolist() == [0, 1] * (len(sample.segments) // 2)
    sampled = [sample.sampled_tokens for group in (first, second) for sample in group.samples]
    assert drawn_tokens() - before == sum(sampled), "what the replica counts, as of completions"
    text = characters().decode(second.samples[0].token_ids)
    assert text.startswith("t:1<eos>u:guess, row 1 (a number)<eos>a:<tool_call>")
    assert [hint for _, hint in re.findall(r'"number":(\d+)\}.*?t:([<>=])', text)] == [">", ">", ">"]
    assert await player.bus.length(streams.EPISODES) == 0


WRITTEN = (
    ("I do not know", Ended.STOP),
    ('<tool_call>{"name": "guess", "arguments": {"number": 0}}</tool_call>', Ended.TURNS),
    ('<tool_call>{"name": "reset", "arguments": {"secret": 0}}</tool_call>', Ended.TURNS),
    ('<tool_call>{"name": "guess", "arguments": "[[]]"}</tool_call>', Ended.STOP),
    ('<tool_call>{"name": "guess", "arguments": "{\\"number\\": 1}"}</tool_call>', Ended.TURNS),
    ('<tool_call>{"name": "\\ud800", "arguments": {"\\udfff": "\\ud800"}}</tool_call>', Ended.TURNS),
    ('<tool_call>{"name": "guess", "arguments": [[]]}</tool_call>', Ended.STOP),
    ('{"name": "guess", "arguments": {"nothing": NaN}}', Ended.STOP),
    ("x" * 200, Ended.LENGTH),
)


async def test_whatever_the_policy_writes_its_episode_ends_and_is_scored(playing: Any) -> None:
    def script(prompt: str, *_: Any) -> tuple[str, float]:
        (place,) = re.findall(r"row (\d+)", prompt)
        return WRITTEN[int(place)][0], 0.5

    player = await playing(script, max_turns=2)
    await player.admit(*[7] * len(WRITTEN))
    groups = await player.groups(len(WRITTEN))
    ends = [{(sample.ended, sample.environment_reward) for sample in group.samples} for group in groups]
    assert ends == [{(ended, 0.0)} for _, ended in WRITTEN]


async def buried(player: Player, count: int) -> dict[int, str]:
    """The reasons of dead letters by group, once there are ``count``."""

    async def is_whole() -> bool:
        return await player.bus.length(streams.EPISODES.dead) == count

    await until(is_whole)
    rows = await player.bus.xrange(streams.EPISODES.dead)
    return {int(fields[b"id"]): fields[b"reason"].decode() for _, fields in rows}


async def test_an_environment_that_cannot_work_costs_its_group_and_no_other(playing: Any) -> None:
    player = await playing(environment=TROUBLE)
    await player.admit(-2, -3, -5, 5)
    (group,) = await player.groups(1)
    assert (group.group_id, {sample.environment_reward for sample in group.samples}) == (3, {1.0})
    reasons = await buried(player, 3)
    assert "the process of tests.support.guessing:Trouble died" in reasons[0]
    assert "ConnectionError: no sandbox is free" in reasons[1]
    assert "expected a finite reward, found nan" in reasons[2]


async def test_an_environment_that_hangs_is_killed(playing: Any) -> None:
    player = await playing(environment=TROUBLE, tool_s=1.0)
    await player.admit(-1)
    assert "did not answer `call` within 1 s (episodes.tool_s)" in (await buried(player, 1))[0]


async def test_what_a_tool_raises_is_its_answer(playing: Any) -> None:
    player = await playing(environment=TROUBLE, max_turns=2)
    await player.admit(-4)
    (group,) = await player.groups(1)
    assert "t:ValueError: only even numbers" in characters().decode(group.samples[0].token_ids)
    turns: list[Any] = turns_of(group.samples[0])
    assert [turn.get("turn") for turn in turns] == [None, 0, None, 1]
    assert (turns[1]["versions"], turns[1]["calls"][0]["name"]) == ([3], "guess")
    assert turns[2]["content"] == "ValueError: only even numbers"


async def test_calls_are_counted_by_tool_and_what_a_policy_writes_makes_no_label(playing: Any) -> None:
    def script(prompt: str, *_: Any) -> tuple[str, float]:
        (row,) = re.findall(r"row (\d+)", prompt)
        name = "guess" if row == "0" else f"invented_{len(prompt)}"
        return f'<tool_call>{{"name": "{name}", "arguments": {{"number": 1}}}}</tool_call>', 0.5

    before = {key: counted(TOOL_CALLS, *key) for key in (("guess", "raised"), ("other", "answered"))}
    labels = tools_counted()
    player = await playing(script, environment=TROUBLE, max_turns=2)
    await player.admit(-4, 5)
    await player.groups(2)
    after = {key: counted(TOOL_CALLS, *key) - number for key, number in before.items()}
    assert after == {("guess", "raised"): 4, ("other", "answered"): 4}
    assert tools_counted() - labels <= {"guess", "other"}, (
        "other tests of this process may have counted tools of theirs"
    )


async def test_attempts_without_a_sample_are_counted_by_their_cause(playing: Any) -> None:
    before = {cause: counted(LOST, cause) for cause in ("process", "unavailable")}
    player = await playing(environment=TROUBLE)
    await player.admit(-2, -3)
    await buried(player, 2)
    lost = {cause: counted(LOST, cause) - number for cause, number in before.items()}
    assert lost["process"] >= 3
    assert lost["unavailable"] >= 3, "each of its three attempts"


def tools_counted() -> set[str]:
    return {sample.labels["tool"] for family in TOOL_CALLS.collect() for sample in family.samples}


def counted(counter: Any, *labels: str) -> float:
    return float(counter.labels(*labels)._value.get())


async def test_tools_alone_are_called_and_give_no_reward(playing: Any) -> None:
    def script(prompt: str, *_: Any) -> tuple[str, float]:
        call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 22}}</tool_call>'
        return ("23" if "t:23" in prompt else call), 0.5

    player = await playing(script, environment="", tools=("tests.support.guessing:add",))
    await player.admit(1)
    (group,) = await player.groups(1)
    assert {(sample.text, sample.environment_reward) for sample in group.samples} == {("23", None)}


async def test_a_killed_process_of_the_users_code_costs_its_episodes_an_attempt(playing: Any) -> None:
    pauses = asyncio.Event()
    player = await playing(pause=pauses.wait)
    await player.admit(5)
    await until(lambda: player.contexts[0].status.turns and player.hosts._hosts[0].free != {0, 1, 2, 3})
    os.killpg(player.hosts._hosts[0]._process.pid, signal.SIGKILL)
    pauses.set()
    (group,) = await player.groups(1)
    assert {sample.environment_reward for sample in group.samples} == {1.0}


async def test_a_turn_is_drawn_elsewhere_when_its_replica_dies(playing: Any) -> None:
    pauses = asyncio.Event()
    player = await playing(pause=pauses.wait)
    await player.admit(5)
    await until(lambda: player.contexts[0].status.turns)
    await player.start_replica("rollout-1")
    player.tasks[0].cancel()
    pauses.set()
    (group,) = await player.groups(1)
    assert {sample.environment_reward for sample in group.samples} == {1.0}


async def test_every_client_whose_history_is_its_own_continues_on_one_path_of_tokens(playing: Any) -> None:
    clients = [name for name in CLIENTS if name != "smolagents"]  # it writes its calls as texts
    player = await playing(environment="", agent="tests.support.clients:play")
    await player.admit(*[5] * len(clients), clients=clients)
    for client, group in zip(clients, await player.groups(len(clients)), strict=True):
        for sample in group.samples:
            assert (sample.environment_reward, sample.ended) == (1.0, Ended.AGENT), client
            assert sample.segments[:, 1].tolist() == list(range(-1, len(sample.segments) - 1)), client
            assert len(sample.segments) >= 6


async def test_an_agent_behind_a_url_plays_and_gives_the_reward(playing: Any) -> None:
    with agent_server() as (url, _, aborted):
        player = await playing(environment="", agent=f"{url}/run")
        await player.admit(5)
        (group,) = await player.groups(1)
    assert {(sample.environment_reward, sample.ended) for sample in group.samples} == {(1.0, Ended.AGENT)}
    transcripts = [json.loads(sample.transcript) for sample in group.samples]
    assert [each["metrics"] for each in transcripts] == [{"tries": 3.0}] * 2, "what is no finite number is left out"
    assert aborted == set()


@pytest.mark.parametrize("kind", sorted(HOSTILE))
async def test_an_answer_without_a_reward_is_no_reward_of_zero(playing: Any, kind: str) -> None:
    with agent_server() as (url, begun, aborted):
        player = await playing(environment="", agent=f"{url}/{kind}", deadline_s=2.0 if kind == "slow" else 600.0)
        await player.admit(5)
        reason = (await buried(player, 1))[0]
        assert HOSTILE[kind][0] in reason
        await until(lambda: aborted >= begun)  # by its own name, each that began before the other of its group failed
        assert 3 <= len(begun) <= 6


async def test_an_agent_that_renders_itself_continues_at_the_tokens_that_it_repeats(playing: Any) -> None:
    player = await playing(environment="", agent="tests.support.clients:by_tokens")
    await player.admit(5)
    (group,) = await player.groups(1)
    for sample in group.samples:
        assert (sample.environment_reward, sample.ended) == (1.0, Ended.AGENT)
        assert sample.segments[:, 1].tolist() == list(range(-1, len(sample.segments) - 1))
        shown = json.loads(sample.transcript)["turns"]
        assert [turn["after"] for turn in shown] == [None, *range(len(shown) - 1)]
        assert [turn["messages"][0]["content"][:3] for turn in shown[1:]] == ["t:<", "t:>", "t:="]


async def test_the_endpoint_refuses_what_it_cannot_do_and_draws_a_retry_once(playing: Any) -> None:
    def script(prompt: str, version: PolicyVersion, lot: random.Random) -> tuple[str, float]:
        return f"{lot.randrange(10**9):09}", 0.5

    player = await playing(script, environment="", agent="tests.support.guessing:hostile_agent")
    await player.admit(5)
    (group,) = await player.groups(1)
    assert [sample.environment_reward for sample in group.samples] == [1.0, 1.0]
    assert {int(sample.segments[:, 2].sum()) for sample in group.samples} == {3}


@pytest.mark.parametrize(
    ("version", "kv", "keeps"),
    [
        (3, "keep", True),
        (4, "keep", True),
        (5, "keep", False),
        (2, "keep", False),
        (None, "keep", False),
        (3, "recompute", False),
    ],
)
def test_a_salt_is_kept_while_its_keys_are_at_most_max_lag_old(version: Any, kv: str, *, keeps: bool) -> None:
    assert keeps_salt(PolicyVersion(3), version, 1, kv) is keeps


async def test_strangers_at_a_replicas_port_for_turns_neither_draw_nor_end_it(playing: Any) -> None:
    player = await playing()
    await until(lambda: player.contexts[0].status.turns)
    host, _, port = player.contexts[0].status.turns.rpartition(":")

    async def knock(content: bytes, secret: bytes = b"") -> bytes:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            if secret:
                await introduce(reader, writer, secret)
            writer.write(content)
            await writer.drain()
            return await asyncio.wait_for(reader.read(), PATIENCE_S)
        except (PeerError, ConnectionError):
            return b""
        finally:
            writer.close()

    secret = player.contexts[0].secret()
    assert await knock(frames.pack({"token_ids": b"1234"}), b"another run's") == b""
    for content in (b"\xff" * 100, frames.pack({"challenge": b"x" * 32, "proof": b"y" * 32})):
        assert b"token_ids" not in await knock(content)
    for frame in ({}, {"prompt": b"x", "token_ids": b"123", "number": 0, "salt": 0}, {"prompt": 1, "number": "x"}):
        assert await knock(frames.pack(frame), secret) == b"", "what is no turn closes the connection"
    await player.admit(5)
    (group,) = await player.groups(1)
    assert {sample.environment_reward for sample in group.samples} == {1.0}


async def test_code_that_cannot_be_used_is_refused_with_its_reason() -> None:
    for name, reason in (
        ("tests.support.guessing:Nothing", "AttributeError"),
        ("tests.support.guessing:add", "expected a method reset"),
        ("tests.support.guessing:Silent", "a tool needs typed arguments and a docstring"),
    ):
        hosts = Hosts(settings(environment=name).episodes)
        with pytest.raises(SettingsError, match=reason):
            await hosts.open()
        await hosts.close()
