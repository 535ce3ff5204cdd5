"""The agent of a storm: it plays, or works against its episode by the column ``do``, and records when it does what.

::

    <monotonic seconds> <key> ask <n>     it asks for at most n answers
    <monotonic seconds> <key> answer <n>
    <monotonic seconds> <key> end 0       its episode has ended

A key without an end is of an episode that was killed.
"""

import dataclasses
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.support.guessing import recording_agent
from tests.support.hostile_agents import hostile

_NAME = "turns-{}.txt"
_MAX_TURNS = 4
_WRITING = threading.Lock()


async def agent(task: Any, base_url: str, api_key: str, secret: int, folder: str, do: str = "") -> float:
    """Play by plain HTTP, or do what the row says."""
    path = Path(folder) / _NAME.format(os.getpid())

    def record(event: str, answers: int) -> None:
        with _WRITING, path.open("a") as file:
            file.write(f"{time.monotonic()} {api_key} {event} {answers}\n")

    async def asks(request: Any) -> None:
        record("ask", _answers(request))

    async def answers(response: Any) -> None:
        record("answer", _answers(response.request))

    hooks = {"request": [asks], "response": [answers]}
    if do:
        reward = await hostile(task, base_url, api_key, do, folder, hooks)
    else:
        reward = await recording_agent(task, base_url, api_key, secret, folder, hooks)
    record("end", 0)
    return reward


def _answers(request: Any) -> int:
    """Return how many turns a request may have drawn at a time."""
    return _MAX_TURNS if request.headers.get("x-answers") else 1


@dataclasses.dataclass(slots=True)
class Played:
    """What is recorded of one episode."""

    asked: list[tuple[float, float, int]] = dataclasses.field(default_factory=list)
    """(from, to, turns) of each request; to infinity without an answer."""
    ended_s: float = float("inf")

    def in_progress(self, since_s: float, until_s: float) -> int:
        """Return the turns that were in progress at any time between two."""
        turns = [n for start, end, n in self.asked if start <= until_s and min(end, self.ended_s) >= since_s]
        return min(_MAX_TURNS, sum(turns))

    @property
    def answered(self) -> int:
        return sum(n for _, end, n in self.asked if end < float("inf"))


def living_hosts(folder: Path) -> set[int]:
    """Return the processes of agents that run."""
    pids = {int(path.stem.rpartition("-")[2]) for path in folder.glob(_NAME.format("*"))}
    return {pid for pid in pids if psutil.pid_exists(pid)}


def played(folder: Path, hosts: set[int] | None = None) -> list[Played]:
    """Return what is recorded of each episode, or of those that some processes host."""
    episodes: dict[str, Played] = defaultdict(Played)
    for at_s, key, event, turns in _records(folder, hosts):
        episode = episodes[key]
        if event == "ask":
            episode.asked.append((at_s, float("inf"), turns))
        elif event == "answer":
            place = next(i for i, (_, end, n) in enumerate(episode.asked) if end == float("inf") and n == turns)
            episode.asked[place] = (episode.asked[place][0], at_s, turns)
        else:
            episode.ended_s = at_s
    return list(episodes.values())


def _records(folder: Path, hosts: set[int] | None) -> Iterator[tuple[float, str, str, int]]:
    for path in folder.glob(_NAME.format("*")):
        if hosts is not None and int(path.stem.rpartition("-")[2]) not in hosts:
            continue
        for line in path.read_text().split("\n")[:-1]:  # what follows the last was cut by a kill
            at_s, key, event, turns = line.split(" ")
            yield float(at_s), key, event, int(turns)
