"""Held-out problems are played by exactly the version under evaluation."""

import asyncio
import dataclasses
import json
import random
from pathlib import Path

from penstock.services.coordinator.evaluation.results import played_in, summarize
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion, Purpose, RolloutGroup
from penstock.shared.bus.stores.policy import evaluations
from penstock.shared.bus.stores.policy.evaluations import Description, EvaluationRequest, Holding, Played
from tests.conftest import PATIENCE_S, until
from tests.episodes.test_service import Player, binary_search, playing
from tests.rollout.test_service import announce

__all__ = ["playing"]
V3 = PolicyVersion(3)


def described(problems: int) -> Description:
    asked = EvaluationRequest("heldout", problems, 2, 0.5, ())
    return Description(V3, 3, (asked,), initial=False, final=False, started_at_s=0.0)


async def begin(player: Player, *secrets: int) -> None:
    made = [player.prompt(problem, secret) for problem, secret in enumerate(secrets)]
    prompts = [dataclasses.replace(prompt, purpose=Purpose.EVALUATE) for prompt in made]
    assert await evaluations.start(player.bus, described(len(prompts)), Holding(V3, (), PATIENCE_S), prompts)


async def evaluated(bus: Bus, count: int) -> list[RolloutGroup]:
    groups: list[RolloutGroup] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(groups) < count:
            groups += [
                entry.message() for entry in await bus.read(streams.EVAL_ROLLOUTS, RolloutGroup, "test", 10, 1.0)
            ]
    return sorted(groups, key=lambda group: group.group_id)


async def test_every_turn_of_an_evaluation_is_of_its_version_while_newer_ones_are_live(
    playing: object, bus: Bus, tmp_path: Path
) -> None:
    drawn: list[PolicyVersion] = []

    def script(prompt: str, version: PolicyVersion, lot: random.Random) -> tuple[str, float]:
        drawn.append(version)
        return binary_search(prompt, version, lot)

    player: Player = await playing(script)  # type: ignore[operator]
    await until(lambda: player.contexts[0].status.version == 3)  # before the newer one, which it would pull instead
    await begin(player, 5, 14)
    await announce(bus, tmp_path / "newer", 4)
    await player.start_replica("rollout-1")  # holds whichever it finds
    first, second = await evaluated(bus, 2)
    assert {version for group in (first, second) for version in group.versions} == {3} == set(drawn)
    assert [sample.environment_reward for sample in (*first.samples, *second.samples)] == [1.0] * 4
    assert (first.prompt.text, len(first.samples)) == ("guess, row 0", 2), "a group, with what scorers read"
    await evaluations.end(bus, V3, [])
    await until(lambda: all(context.status.version == 4 for context in player.contexts if context.status.turns))


async def test_problems_of_a_version_that_is_gone_are_not_played(playing: object, bus: Bus, tmp_path: Path) -> None:
    player: Player = await playing()  # type: ignore[operator]
    await until(lambda: player.contexts[0].status.version == 3)
    await announce(bus, tmp_path / "newer", 4)
    await until(lambda: player.contexts[0].status.version == 4)
    await begin(player, 5)
    await player.admit(5)
    await player.groups(1)
    assert (await bus.length(streams.EVAL_EPISODES), await bus.length(streams.EVAL_ROLLOUTS)) == (1, 0)


async def test_results_say_how_long_episodes_were_and_how_they_ended(playing: object, bus: Bus) -> None:
    player: Player = await playing(max_turns=2)  # type: ignore[operator]
    await begin(player, 7, 14)  # at once; not in two turns
    groups = await evaluated(bus, 2)
    for group in groups:
        await evaluations.keep_answer(bus, group.group_id, 2 * (group.group_id == 0), played_in(group))
    await evaluations.keep_answer(bus, 0, 0, Played(9, 9, 9, {}))  # late
    answers, played = await evaluations.answers(bus)
    assert (answers, played[1]) == ({0: 2, 1: 0}, Played(2, 4, 4, {"turns": 2}))
    (result,) = summarize(described(2), answers, "", 1.0, played)
    assert (result.accuracy, result.turns, result.calls) == (0.5, 1.5, 1.5)
    assert result.ended == {"stop": 0.5, "turns": 0.5}
    json.dumps(dataclasses.asdict(result))
