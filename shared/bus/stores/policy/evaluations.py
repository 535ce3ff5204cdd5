"""Evaluations: the current one with its holding and answers, results, and the gate's decisions.

::

    coordinator   start: description, holding, prompts ── one script, refused once a newer version is the head
    replica       newer version announced ─▶ reads the holding ─▶ if named and serving that version, keeps it
    coordinator   end: the holding is gone ─▶ the replica continues to the head

The holding is written before a newer version is announced, so replicas see it. They keep a version for at most
``timeout_s`` by their own clocks.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import key
from penstock.shared.bus.messages import PolicyVersion, Prompt
from penstock.shared.bus.streams import EVAL_EPISODES, EVAL_PROMPTS, HOLDS

log = logging.getLogger(__name__)

EVALUATION = key(
    "evaluation",
    "hash",
    "while one is under way",
    "version, description and holding (JSON) of the evaluation under way",
)
EVALUATION_ANSWERS = key(
    "evaluation_answers", "hash", "while one is under way", "problem → correct completions, or with episodes JSON"
)
EVALUATIONS = key("evaluations", "hash", "the run's", "version → what its evaluation found, by set (JSON)")
GATE = key("gate", "hash", "the run's", "version whose accuracy fell → what was done about it: tell, rollback, pause")


@dataclasses.dataclass(frozen=True, slots=True)
class EvaluationRequest:
    set: str
    problems: int
    samples: int
    correct_above: float
    pass_at: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    version: PolicyVersion
    step: int
    sets: tuple[EvaluationRequest, ...]
    initial: bool
    final: bool
    started_at_s: float

    @property
    def problems(self) -> int:
        return sum(asked.problems for asked in self.sets)

    def set_of(self, problem: int) -> EvaluationRequest:
        for asked in self.sets:
            if problem < asked.problems:
                return asked
            problem -= asked.problems
        raise IndexError(f"a problem of another evaluation, with an index of {self.problems} or more: a bug")


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    version: PolicyVersion
    replicas: tuple[str, ...]
    """Replicas that keep it; empty: all."""
    timeout_s: float

    def names(self, replica: str) -> bool:
        """Whether ``replica`` should keep it."""
        return not self.replicas or replica in self.replicas

    def encode(self) -> str:
        return json.dumps(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True, slots=True)
class Played:
    """Sums over the episodes of a problem."""

    episodes: int
    turns: int
    calls: int
    """Of tools."""
    ended: Mapping[str, int]
    """Episodes by how they ended."""


async def start(bus: Bus, description: Description, to_hold: Holding, prompts: Sequence[Prompt]) -> bool:
    """Begin; False if one is under way, the version was evaluated, or a newer one is the head. Raises BusFull: the
    server has no memory for it.
    """
    started = await bus.script(
        "start_evaluation", version=description.version, description=json.dumps(dataclasses.asdict(description)),
        holding=to_hold.encode(), source=EVAL_EPISODES if any(prompt.environment for prompt in prompts) else EVAL_PROMPTS,
        payloads=[wire.encode(prompt) for prompt in prompts],
    )  # fmt: skip
    return bool(started)


async def under_way(bus: Bus) -> Description | None:
    text = await bus.hget(EVALUATION, "description")
    return None if text is None else _description(json.loads(text))


async def holding(bus: Bus) -> Holding | None:
    text = await bus.hget(EVALUATION, "holding")
    if text is None:
        return None
    try:
        fields = json.loads(text)
        replicas = tuple(str(name) for name in fields["replicas"])
        return Holding(PolicyVersion(int(fields["version"])), replicas, float(fields["timeout_s"]))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        log.warning("unreadable holding skipped", extra={"error": repr(error)})
        return None


async def announced(bus: Bus, after: str = "", wait_s: float = 0.0) -> str:
    """Wait until an evaluation begins, ends, or names other replicas; return from where to continue."""
    if not after:
        return await bus.last_generated(HOLDS) or "0-0"
    rows = await bus.xread({HOLDS: after}, 16, wait_s)
    return rows[-1][0] if rows else after


async def appoint(bus: Bus, to_hold: Holding) -> bool:
    """Name other replicas; False if it is over."""
    return bool(await bus.script("appoint", version=to_hold.version, holding=to_hold.encode()))


async def keep_answer(bus: Bus, problem: int, correct: int, played: Played | None = None) -> None:
    """Keep a problem's number of correct completions, and its episodes, once."""
    answer = correct if played is None else {"correct": correct, **dataclasses.asdict(played)}
    await bus.write(EVALUATION_ANSWERS, "HSETNX", str(problem), json.dumps(answer))


async def answers(bus: Bus) -> tuple[dict[int, int], dict[int, Played]]:
    """Return each problem's number of correct completions, and the episodes of those that have any."""
    correct, played = dict[int, int](), dict[int, Played]()
    for problem, text in (await bus.hgetall(EVALUATION_ANSWERS)).items():
        answer = json.loads(text)
        if isinstance(answer, dict):
            correct[int(problem)] = answer.pop("correct")
            played[int(problem)] = Played(**answer)
        else:
            correct[int(problem)] = answer
    return correct, played


async def answered(bus: Bus) -> int:
    return int(await bus.ask("HLEN", EVALUATION_ANSWERS))


async def end(bus: Bus, version: PolicyVersion, evaluations: Sequence[dict[str, Any]]) -> bool:
    """End it and keep results per set; False if not under way."""
    return bool(
        await bus.script("end_evaluation", version=version, result=json.dumps(evaluations) if evaluations else "")
    )


async def results(bus: Bus, versions: Sequence[int]) -> dict[int, bytes]:
    values = await bus.hmget(EVALUATIONS, *map(str, versions)) if versions else []
    return {version: value for version, value in zip(versions, values, strict=True) if value is not None}


async def evaluated(bus: Bus) -> frozenset[PolicyVersion]:
    """Return the versions that have results."""
    return frozenset(PolicyVersion(int(version)) for version in await bus.ask("HKEYS", EVALUATIONS))


async def note_decision(bus: Bus, version: PolicyVersion, action: str) -> None:
    await bus.write(GATE, "HSET", str(version), action)


async def decisions(bus: Bus) -> dict[PolicyVersion, str]:
    return {PolicyVersion(int(version)): action.decode() for version, action in (await bus.hgetall(GATE)).items()}


def _description(fields: dict[str, Any]) -> Description:
    sets = tuple(EvaluationRequest(**{**asked, "pass_at": tuple(asked["pass_at"])}) for asked in fields.pop("sets"))
    return Description(sets=sets, **fields)
