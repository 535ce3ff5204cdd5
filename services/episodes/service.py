"""The service: an entry of ``episodes`` becomes a sample of several turns.

::

    episodes ──▶ Worker ──▶ Episodes.handle ──▶ driver.play(Episode) ──▶ RolloutGroup of one sample ──▶ rollouts
                                                     └── draw ──▶ Replicas ──▶ a rollout replica
    eval_episodes ──▶ :mod:`evaluation`, the same of a whole group

An episode whose environment, tools or agent could not work is redone; after the last attempt it is lost, or its group is
buried (``assembly``). A killed process loses the episodes that it played, which another replica takes over.
"""

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from prometheus_client import Counter, Gauge

from penstock.services.episodes.answers import AnswerParser
from penstock.services.episodes.drivers.hosts import HostLost, Hosts
from penstock.services.episodes.drivers.loop import ToolLoop
from penstock.services.episodes.drivers.python import Python
from penstock.services.episodes.episode import Episode, Limits
from penstock.services.episodes.evaluation import EvaluationEpisodes, watch
from penstock.services.episodes.renderer import Renderer
from penstock.services.episodes.replicas import Replicas
from penstock.shared.bus import streams
from penstock.shared.bus.assembly import bare
from penstock.shared.bus.claims import Claims
from penstock.shared.bus.crowd import Crowd
from penstock.shared.bus.messages import (
    Ended,
    Int32Array,
    PolicyVersion,
    Prompt,
    Purpose,
    RolloutGroup,
    Sample,
    Sampling,
    no_ids,
)
from penstock.shared.bus.stores.run.functions import episode_functions, note_functions
from penstock.shared.bus.streams import Stream
from penstock.shared.bus.worker import Worker
from penstock.shared.errors import NotHere, PermanentError, SettingsError, TemporaryError
from penstock.shared.files.source import digest
from penstock.shared.model.tokenizer import Limits as ModelLimits
from penstock.shared.model.tokenizer import Tokenizer, open_tokenizer
from penstock.shared.peers.handshake import Secret
from penstock.shared.peers.turns import DrawnTurn, TurnRequest
from penstock.shared.process.service import Context, serve
from penstock.shared.process.telemetry import HandlerFailures, tell, tell_changed
from penstock.shared.settings import Settings
from penstock.shared.tasks import beside, together

ENDED = Counter("penstock_episodes_ended_total", "Episodes by how they ended.", ["reason"])
for _ended in Ended:
    ENDED.labels(_ended.value)
LOST = Counter(
    "penstock_episodes_lost_total",
    "Attempts at an episode that gave no sample, by cause: process (of users' code, which ended), unavailable (what it plays "
    "with), refused (it can never be played).",
    ["cause"],
)
for _cause in ("process", "unavailable", "refused"):
    LOST.labels(_cause)
TURNS = Counter("penstock_episodes_turns_total", "Answers of the policy in episodes that ended.")
RUNNING = Gauge("penstock_episodes_running", "Episodes that this process plays.")


Handle = Callable[[Prompt], Awaitable[RolloutGroup]]


class Driver(Protocol):
    async def play(self, episode: Episode) -> float | None:
        """Play an episode to its end; return the reward that its environment or agent gave. Raises TemporaryError."""


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What turns messages into tokens and back."""

    renderer: Renderer
    parser: AnswerParser
    context_tokens: int

    @classmethod
    def of(cls, settings: Settings, tokenizer: Tokenizer) -> "Policy":
        """Raises SettingsError: the chat template cannot be used."""
        renderer = Renderer(tokenizer, settings.data.chat_template)
        markers = settings.reward.reasoning_markers if renderer.writes_reasoning else {}
        return cls(renderer, AnswerParser(tokenizer, markers), context_tokens(settings))


def context_tokens(settings: Settings) -> int:
    """Return the most tokens of a turn with all before it: of the model's context, and of a row of training."""
    return min(ModelLimits.of(settings).context_tokens, settings.trainer.row_tokens)


class Turns(Protocol):
    """What draws turns: :class:`Replicas`, or a policy of this process."""

    @property
    def newest(self) -> PolicyVersion: ...

    async def draw(self, request: TurnRequest, last: str) -> tuple[DrawnTurn, str]:
        """Raises PermanentError: none can ever; NotHere: an evaluation's version is gone."""


class Episodes:
    """The handler of entries. ``bus``: keeps the experts of tokens on its shelf; None: they are not kept."""

    def __init__(
        self,
        settings: Settings,
        policy: Policy,
        replicas: Turns,
        driver: Driver,
        replica: str,
        bus: Claims | None = None,
    ) -> None:
        self._settings, self._policy, self._replicas = settings.episodes, policy, replicas
        self._driver, self._replica, self._bus = driver, replica, bus

    async def handle(self, prompt: Prompt) -> RolloutGroup:
        """Play an episode. Raises TemporaryError, or PermanentError: it can never be played."""
        if prompt.environment != self._settings.name or prompt.sample is None:
            raise PermanentError(
                f"expected a sample of the environment {self._settings.name!r}, found one of {prompt.environment[:200]!r}: "
                "change [episodes]"
            )
        started_at_s = time.time()
        try:
            sample = await self.play(prompt)
        except (TemporaryError, PermanentError) as error:
            LOST.labels(_cause_of(error)).inc()
            raise
        assert sample.ended is not None
        ENDED.labels(sample.ended.value).inc()
        TURNS.inc(int(sample.segments[:, 2].sum()))
        return RolloutGroup(bare(prompt), no_ids(), (sample,), self._replica, started_at_s, time.time())

    async def play(self, prompt: Prompt) -> Sample:
        """Play an episode. Raises TemporaryError, PermanentError, or NotHere: an evaluation's version is gone."""
        limits = Limits(self._settings.max_turns, self._policy.context_tokens, self._settings.deadline_s)
        drawing = Drawing(prompt, self._replicas)
        episode = Episode(prompt, self._policy.renderer, self._policy.parser, drawing.draw, limits)
        with RUNNING.track_inprogress():
            reward = await self._driver.play(episode)
        if not episode.turns:
            raise TemporaryError(f"the policy had no turn: the episode ended by its {episode.ended.value}")
        sample, experts = episode.sample(reward), episode.routes  # at one time: requests left behind may add turns
        claim = b"" if self._bus is None else await self._bus.claimed(experts, prompt.group_id)
        return dataclasses.replace(sample, routes=claim)


def _cause_of(error: TemporaryError | PermanentError) -> str:
    if isinstance(error, HostLost | NotHere):
        return "process"
    return "refused" if isinstance(error, PermanentError) else "unavailable"


class Drawing:
    """Draws the turns of one episode; the draws of an attempt differ from those of an earlier one, but in an evaluation."""

    def __init__(self, prompt: Prompt, replicas: Turns) -> None:
        self._prompt, self._replicas = prompt, replicas
        is_evaluation = prompt.purpose is Purpose.EVALUATE
        self._attempt = 0 if is_evaluation else secrets.randbelow(1 << 20) << 16
        self._salt = prompt.min_version if is_evaluation else None
        self._last = ""

    async def draw(self, token_ids: Int32Array, sampling: Sampling, number: int) -> DrawnTurn:
        """Draw a turn where the last one was, at the version of the first or a newer one."""
        if self._salt is None:
            self._salt = max(self._replicas.newest, self._prompt.min_version)
        prompt = dataclasses.replace(bare(self._prompt), sampling=sampling, min_version=self._salt)
        request = TurnRequest(prompt, token_ids, self._attempt + number, self._salt)
        drawn, self._last = await self._replicas.draw(request, self._last)
        return drawn


async def run(settings: Settings, replica: str) -> None:
    """Serve until SIGTERM."""
    if not settings.episodes.is_on:
        raise SettingsError(
            "expected episodes.environment, tools, mcp, executor or agent for this service, found none: set one of them"
        )
    async with serve(settings, "episodes", replica) as context, contextlib.AsyncExitStack() as around:
        context.status.start.begin("loading the tokenizer")
        tokenizer = await asyncio.to_thread(open_tokenizer, settings.policy, alone=True)
        policy = await asyncio.to_thread(Policy.of, settings, tokenizer)
        await _tell_branching(context, policy.renderer)
        context.status.start.begin(f"loading {settings.episodes.name}")
        hosts = Hosts(settings.episodes)
        around.push_async_callback(hosts.close)
        await hosts.open()
        await _note_functions(context)
        replicas = Replicas(context.bus, context.secret)
        async with driver_of(settings, context.secret, hosts, policy.context_tokens) as driver:
            await work(context, Episodes(settings, policy, replicas, driver, replica, context.bus), replicas)


@contextlib.asynccontextmanager
async def driver_of(settings: Settings, secret: Secret, hosts: Hosts, tokens: int) -> AsyncIterator[Driver]:
    """Yield what plays episodes of ``tokens`` at most; with an agent, the endpoint is open during the body."""
    answer_field = settings.data.answer_field
    if not settings.episodes.agent:
        python = Python(settings) if settings.episodes.executor else None
        try:
            yield ToolLoop(settings.episodes, hosts, answer_field, python)
        finally:
            if python is not None:
                await python.close()
        return
    from penstock.services.episodes.drivers.agent import AgentFunction, AgentPlayer
    from penstock.services.episodes.drivers.agent_server import AgentServer
    from penstock.services.episodes.http.gateway import Gateway

    gateway = Gateway(settings.episodes.listen, secret, settings.policy.model, tokens)
    server = AgentServer(settings.episodes) if settings.episodes.agent_url else None
    async with beside(gateway.run()):
        try:
            yield AgentPlayer(server or AgentFunction(settings.episodes, hosts), gateway, answer_field)
        finally:
            if server is not None:
                await server.close()


async def _note_functions(context: Context) -> None:
    """Report the user's source files that are others than those of earlier versions."""
    named = episode_functions(context.settings)
    digests = {name: await asyncio.to_thread(digest, reference) for name, reference in named.items()}
    await tell_changed(context.bus, context.replica, await note_functions(context.bus, digests))


async def _tell_branching(context: Context, renderer: Renderer) -> None:
    """Say once where the chat template makes every turn a branch, which costs computation."""
    for role in await asyncio.to_thread(renderer.branching):
        words = (
            f"the chat template writes earlier messages otherwise after a {role}'s message: each turn after one is a branch, whose "
            "history is computed again"
        )
        await tell(context.bus, context.replica, "histories branch", words, role=role)


async def work(context: Context, episodes: Episodes, replicas: Replicas) -> None:
    """Take entries until the service is stopped."""
    failures = HandlerFailures("episodes", context.bus, context.replica, context.status)
    most, crowd, evaluating = context.settings.episodes.max_episodes, Crowd(), asyncio.Event()

    def worker(source: Stream, output: Stream, handler: Handle, taking: asyncio.Event) -> Worker[Prompt, RolloutGroup]:
        return Worker(
            context.bus, context.replica, source, Prompt, output, handler, most, context.patience, taking,
            crowd=crowd, bug=failures.note, unit=1,
        )  # fmt: skip

    evaluations = EvaluationEpisodes(episodes.play, context.replica, most)
    workers = (
        worker(streams.EPISODES, streams.ROLLOUTS, episodes.handle, context.cordon.taking),
        worker(streams.EVAL_EPISODES, streams.EVAL_ROLLOUTS, evaluations.handle, evaluating),
    )
    context.status.start.end()
    async with beside(
        replicas.run(),
        _report(context, workers),
        watch(context.bus, replicas, context.cordon.taking, evaluating),
    ):
        await together(each.run(context.stop) for each in workers)
        context.status.state = "stopping"


async def _report(context: Context, workers: Sequence[Worker[Prompt, RolloutGroup]]) -> None:
    while True:
        held = sum(worker.held for worker in workers)
        context.status.values["held"] = float(held)
        context.status.last_error = next((last for worker in workers if (last := worker.counts.last_error)), "")
        if not context.stop.is_set():
            context.status.state = "working" if held else "waiting"
        await asyncio.sleep(context.settings.internal.heartbeat_s)
