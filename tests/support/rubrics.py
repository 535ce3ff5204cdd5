"""Reward functions and rubrics with verifiers' protocol for tests of their scorer.

``made`` returns a rubric of the package ``verifiers``, if it is installed, else one of the same attributes.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any


class Parser:
    """verifiers' own has this method."""

    def parse_answer(self, completion: Any) -> str:
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        return str(text).split()[-1]


def correct(parser: Parser, completion: Any, answer: str) -> float:
    return float(parser.parse_answer(completion) == answer)


async def brief(completion: Any, level: int, **_: Any) -> float:
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return 1.0 / (level + len(text.split()))


def share_of_equal(completions: Sequence[Any], answers: Sequence[str]) -> list[float]:
    assert len(answers) == len(completions)
    return [completions.count(completion) / len(completions) for completion in completions]


def turns(state: dict[str, Any]) -> float:
    return float(len(state["trajectory"]) + state["is_truncated"] + state["info"].get("bonus", 0))


def fails(completion: Any) -> float:
    raise ZeroDivisionError("no")


class Own:
    """A rubric that is more than its functions."""

    funcs: Sequence[Callable[..., Any]] = (turns,)
    weights = (1.0,)

    async def score_rollout(self, state: dict[str, Any]) -> None:
        state["reward"] = 1.0


def _rubric(funcs: list[Callable[..., Any]], weights: list[float]) -> Any:
    try:
        from verifiers import Rubric
    except ImportError:
        return SimpleNamespace(funcs=funcs, weights=weights, class_objects={"parser": Parser()})
    return Rubric(funcs=funcs, weights=weights, parser=Parser())


def made(turn_weight: float = 0.0) -> Any:
    return _rubric([correct, brief, share_of_equal, turns], [1.0, 0.5, 0.25, turn_weight])


rubric = made()
group = SimpleNamespace(rubrics=[rubric, made(turn_weight=2.0)])
own = Own()
