"""Evaluations: the one under way with the replicas that keep its version, its answers, all results, and the gate's decisions.

::

    coordinator   start: description, holding, prompts ── one script, refused once a newer version is the head
    replica       told of a newer version ─▶ reads the holding ─▶ it is named, and serves that version: it stays on it
    coordinator   end: the holding is gone ─▶ the replica goes on to the head

A version newer than the held one is told only after the holding was written, so a replica that reads it then cannot miss it. Nobody has to
let go by himself but for the time: a replica keeps a version for ``timeout_s`` at most, counted by its own clock from when it first saw it.
"""

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

from shared.bus import wire
from shared.bus.bus import Bus
from shared.bus.keys import key
from shared.bus.messages import PolicyVersion, Prompt

log = logging.getLogger(__name__)

EVALUATION = key(
    "evaluation",
    "hash",
    "while one is under way",
    "version, description and holding (JSON) of the evaluation under way",
)
EVALUATION_ANSWERS = key("evaluation_answers", "hash", "while one is under way", "problem → correct completions")
EVALUATIONS = key("evaluations", "hash", "the run's", "version → what its evaluation found, by set (JSON)")
GATE = key("gate", "hash", "the run's", "version whose accuracy fell → what was done about it: tell, rollback, pause")


@dataclasses.dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """What of a set an evaluation asks."""

    set: str
    problems: int
    samples: int
    correct_above: float
    pass_at: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """An evaluation that is under way. Problems are numbered through, set after set."""

    version: PolicyVersion
    step: int
    sets: tuple[EvaluationRequest, ...]
    initial: bool
    final: bool
    started_at_s: float

    @property
    def problems(self) -> int:
        """How many problems it asks, of all sets."""
        return sum(asked.problems for asked in self.sets)

    def set_of(self, problem: int) -> EvaluationRequest:
        """Return the set of the problem of a number."""
        for asked in self.sets:
            if problem < asked.problems:
                return asked
            problem -= asked.problems
        raise IndexError(f"expected a problem below {self.problems}, found one of another evaluation: a bug")


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    """A version that is evaluated now."""

    version: PolicyVersion
    replicas: tuple[str, ...]
    """Those that keep it and answer; empty: all."""
    timeout_s: float

    def names(self, replica: str) -> bool:
        """Whether ``replica`` is to keep it."""
        return not self.replicas or replica in self.replicas

    def encode(self) -> str:
        """Return it as the bus holds it."""
        return json.dumps(dataclasses.asdict(self))


async def start(bus: Bus, description: Description, to_hold: Holding, prompts: Sequence[Prompt]) -> bool:
    """Begin an evaluation; False where one is under way, the version was evaluated before, or a newer one is the head.

    Raises:
        BusFull: the server has no memory for it.
    """
    started = await bus.script(
        "start_evaluation", version=description.version, description=json.dumps(dataclasses.asdict(description)),
        holding=to_hold.encode(), payloads=[wire.encode(prompt) for prompt in prompts],
    )  # fmt: skip
    return bool(started)


async def under_way(bus: Bus) -> Description | None:
    """Return the evaluation under way."""
    text = await bus.hget(EVALUATION, "description")
    return None if text is None else _description(json.loads(text))


async def holding(bus: Bus) -> Holding | None:
    """Return what is held now, if anything."""
    text = await bus.hget(EVALUATION, "holding")
    if text is None:
        return None
    try:
        fields = json.loads(text)
        replicas = tuple(str(name) for name in fields["replicas"])
        return Holding(PolicyVersion(int(fields["version"])), replicas, float(fields["timeout_s"]))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        log.warning("unreadable holding passed over", extra={"error": repr(error)})
        return None


async def appoint(bus: Bus, to_hold: Holding) -> bool:
    """Name other replicas for the evaluation under way; False when it is over."""
    return bool(await bus.script("appoint", version=to_hold.version, holding=to_hold.encode()))


async def keep_answer(bus: Bus, problem: int, correct: int) -> None:
    """Keep the number of correct completions of a problem, unless it is answered."""
    await bus.write(EVALUATION_ANSWERS, "HSETNX", str(problem), str(correct))


async def answers(bus: Bus) -> dict[int, int]:
    """Return problem → correct completions of the evaluation under way."""
    return {int(problem): int(correct) for problem, correct in (await bus.hgetall(EVALUATION_ANSWERS)).items()}


async def answered(bus: Bus) -> int:
    """Return the number of problems that are answered."""
    return int(await bus.ask("HLEN", EVALUATION_ANSWERS))


async def end(bus: Bus, version: PolicyVersion, found: Sequence[dict[str, Any]]) -> bool:
    """End the evaluation of ``version`` and keep what it found, set by set; False where it is not under way."""
    return bool(await bus.script("end_evaluation", version=version, result=json.dumps(found) if found else ""))


async def results(bus: Bus) -> dict[bytes, bytes]:
    """Return version → what its evaluation found (JSON)."""
    return await bus.hgetall(EVALUATIONS)


async def evaluated(bus: Bus) -> int:
    """Return the number of versions that were evaluated."""
    return int(await bus.ask("HLEN", EVALUATIONS))


async def note_decision(bus: Bus, version: PolicyVersion, action: str) -> None:
    """Note what the gate did about the fall of a version's accuracy."""
    await bus.write(GATE, "HSET", str(version), action)


async def decisions(bus: Bus) -> dict[PolicyVersion, str]:
    """Return what the gate did, by version."""
    return {PolicyVersion(int(version)): action.decode() for version, action in (await bus.hgetall(GATE)).items()}


def _description(fields: dict[str, Any]) -> Description:
    """Return the evaluation under way from its fields on the bus."""
    sets = tuple(EvaluationRequest(**{**asked, "pass_at": tuple(asked["pass_at"])}) for asked in fields.pop("sets"))
    return Description(sets=sets, **fields)
