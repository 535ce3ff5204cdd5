"""Call reward functions written for verifiers, and its rubrics: the program of a scorer process.

Question and answer are those of ``trl_call``. A reference names a function or a rubric: an object with ``funcs`` and
``weights`` (``verifiers.Rubric``), or with ``rubrics`` (``RubricGroup``). A function gets the arguments that it names::

    of a completion    prompt, completion, answer, info, task, state, the row's columns, the rubric's class_objects
    of the group       prompts, completions, answers, infos, tasks, states, the rubric's class_objects

verifiers counts a function that raises as 0; here the group is not scored.
"""

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_origin

from penstock.services.reward.scorers.function.trl_call import Notes, arguments, checked, load_object, serve
from penstock.shared.bus import transcripts
from penstock.shared.bus.messages import RolloutGroup

_OF_A_GROUP = frozenset(("states", "prompts", "completions", "answers", "tasks", "infos"))
_SCORING = ("score_rollout", "score_group")
Function = Callable[..., Any]


def rubrics(target: Any) -> Iterator[Any]:
    """Yield the rubrics of a rubric. Raises ValueError: its reward is not the weighted sum of its functions."""
    if hasattr(target, "rubrics"):
        for inner in target.rubrics:
            yield from rubrics(inner)
        return
    own = [of for of in type(target).__mro__ if not of.__module__.startswith("verifiers.")]
    if changed := next((name for of in own for name in _SCORING if name in vars(of)), None):
        raise ValueError(
            f"expected a rubric whose reward is the weighted sum of its functions, found its own {changed}"
        )
    if len(target.weights) != len(target.funcs):
        raise ValueError(f"expected a weight of each of {len(target.funcs)} funcs, found {len(target.weights)}")
    yield target


def load_rubrics(reference: str) -> Sequence[Any]:
    """Return what ``module:name`` or ``module:factory(name=literal)`` names, as rubrics."""
    target = load_object(reference)
    if hasattr(target, "funcs") or hasattr(target, "rubrics"):
        return list(rubrics(target))
    if callable(target):
        return [_Alone(target)]
    raise ValueError(f"expected a function or a rubric, found {type(target).__name__}")


class _Alone:
    """A function as a rubric."""

    def __init__(self, function: Function) -> None:
        self.funcs, self.weights = [function], [1.0]


def states(group: RolloutGroup, answer_field: str, steps: int) -> list[dict[str, Any]]:
    """Return verifiers' state of each completion."""
    given = arguments(group, answer_field, steps, Notes(len(group.samples)))
    row: dict[str, Any] = {"info": {}, "task": None, "example_id": int(group.group_id), **group.prompt.extra}
    if isinstance(row["info"], str):
        row["info"] = json.loads(row["info"])
    row["answer"] = group.prompt.answer or ""
    made = []
    for sample, prompt, completion in zip(
        group.samples, _list(given["prompts"]), _list(given["completions"]), strict=True
    ):
        conversation = transcripts.read(sample)
        turns = [(prompt, completion)] if conversation is None else conversation.turns
        made.append(
            {
                **row,
                "input": {**row, "prompt": prompt},
                **_step(prompt, completion),
                "trajectory": [_step(*turn) for turn in turns],
                "is_completed": True,
                "is_truncated": sample.finish_reason == "length",
                "metrics": {},
            }
        )
    return made


def _step(prompt: object, completion: object) -> dict[str, object]:
    return {"prompt": prompt, "completion": completion, "reward": None, "advantage": None}


def _list(value: object) -> list[Any]:
    assert isinstance(value, list)
    return value


async def score(rubric: Any, of_states: Sequence[dict[str, Any]], notes: Notes) -> list[float | None]:
    """Return the weighted sums of a rubric's functions, and note each function's values."""
    sums: list[float | None] = [0.0] * len(of_states)
    for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
        values = checked(await _call(function, rubric, of_states), len(of_states))
        notes.log_part(str(getattr(function, "__name__", type(function).__name__)), values)
        sums = [
            None if total is None or value is None else total + weight * value
            for total, value in zip(sums, values, strict=True)
        ]
    return sums


async def _call(function: Function, rubric: Any, of_states: Sequence[dict[str, Any]]) -> object:
    objects = dict(getattr(rubric, "class_objects", {}))
    signature = inspect.signature(function)
    returns = signature.return_annotation
    if _OF_A_GROUP & signature.parameters.keys() or list in (returns, get_origin(returns)):
        columns = {f"{name}s": [state[name] for state in of_states] for name in ("prompt", "completion", "answer")}
        lists = {"infos": [state["info"] for state in of_states], "tasks": [state["task"] for state in of_states]}
        for provider in getattr(rubric, "group_score_object_providers", ()):
            objects.update(provider(list(of_states)))
        return await _awaited(function, signature, {**columns, **lists, "states": list(of_states), **objects})
    calls = []
    for state in of_states:
        row = {name: value for name, value in state["input"].items() if name != "example_id"}
        given = {**row, "completion": state["completion"], "state": state, **objects}
        for provider in getattr(rubric, "score_object_providers", ()):
            given.update(provider(state))
        calls.append(_awaited(function, signature, given))
    return await asyncio.gather(*calls)


async def _awaited(function: Function, signature: inspect.Signature, given: Mapping[str, object]) -> object:
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    named = {name: value for name, value in given.items() if any_name or name in signature.parameters}
    result = function(**named)
    return await result if inspect.isawaitable(result) else result


class RubricCall:
    """One reference's rubrics, called as ``trl_call`` calls a function."""

    def __init__(self, reference: str) -> None:
        self._rubrics = load_rubrics(reference)
        self.function: Function = self._rubrics[0].funcs[0] if self._rubrics[0].funcs else load_rubrics

    async def __call__(self, group: RolloutGroup, answer_field: str, steps: int, notes: Notes) -> list[float | None]:
        of_states = states(group, answer_field, steps)
        sums: list[float | None] = [0.0] * len(of_states)
        for rubric in self._rubrics:
            values = await score(rubric, of_states, notes)
            pairs = zip(sums, values, strict=True)
            sums = [None if total is None or value is None else total + value for total, value in pairs]
        return sums


if __name__ == "__main__":
    serve(sys.argv, RubricCall)
