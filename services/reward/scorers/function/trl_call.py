"""Call TRL reward functions: the program of a scorer process.

::

    question   {"function": 0, "group": a RolloutGroup, MessagePack in base64, "answer_field": "answer", "steps": 100}
    answer     {"values": [1.0, null], "extra": ["gold=46", ""], "metrics": {"accuracy": 0.5},
                "parts": {"accuracy": [1.0, null]}}           of a rubric's functions
               {"error": "ZeroDivisionError: … (mine.py:7)"}      raised, or an invalid result

A function receives what TRL's GRPOTrainer passes to it, for the completions of one group.
"""

import ast
import asyncio
import base64
import inspect
import itertools
import math
import sys
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, cast

from penstock.services.reward.scorers.function.function_call import describe, load
from penstock.services.reward.scorers.function.function_call import load_object as named_object
from penstock.services.reward.subprocess_pool import child
from penstock.shared.bus import transcripts
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Prompt, RolloutGroup, Sample

_LONGEST_EXTRA = 120
_EXTRA_CHARACTERS = 20_000
"""For all completions of an answer, which is one line of at most 64 KiB."""
_MOST_METRICS = 32
_LONGEST_NAME = 60
_MOST_PART_VALUES = 1024
TrlFunction: TypeAlias = Callable[..., Any]


def load_function(reference: str) -> TrlFunction:
    """Return ``module:function``, or what ``module:factory(name=literal)`` returns. Raises ValueError: the arguments
    are not literals by name, or the result cannot be called; or the import's error.
    """
    target = load_object(reference)
    if not callable(target):
        raise ValueError(f"{reference} is no function but {type(target).__name__}")
    if _asks_for_environments(target):
        raise ValueError(
            f"{reference} asks for TRL's environments, which live in the service of episodes: use the scorer 'environment'"
        )
    return cast(TrlFunction, target)


def _asks_for_environments(function: Callable[..., Any]) -> bool:
    try:
        given = inspect.signature(function).parameters.get("environments")
    except ValueError:  # of C
        return False
    return given is not None and given.default is given.empty


def load_object(reference: str) -> Any:
    """Return ``module:object``, or what ``module:factory(name=literal)`` returns."""
    name, parenthesis, _ = reference.partition("(")
    if not parenthesis:
        return named_object(name)
    factory = cast(TrlFunction, load(name))
    call = ast.parse(f"f{reference[len(name) :]}", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
        raise ValueError(f"expected arguments by name, such as {name}(max_len=100), found {reference}")
    return factory(**{str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords})


class TrainerState:
    """The part of transformers' TrainerState that a run with separate services has."""

    def __init__(self, global_step: int, max_steps: int) -> None:
        self.global_step = global_step
        self.max_steps = max_steps

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"expected global_step or max_steps of trainer_state, found {name}: Penstock has no other")


def unused(name: str, used: Container[str]) -> str:
    """Return ``name``, numbered if it is used."""
    numbered = (f"{name}_{number}" if number > 1 else name for number in itertools.count(1))
    return next(each for each in numbered if each not in used)


class Notes:
    def __init__(self, completions: int) -> None:
        self._columns: dict[str, list[object]] = {}
        self._metrics: dict[str, list[float]] = {}
        self._parts: dict[str, list[float | None]] = {}
        self._completions = completions

    def log_extra(self, column: str, values: Iterable[object]) -> None:
        self._columns.setdefault(str(column), []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """Note a scalar; the group's value is the mean."""
        self._metrics.setdefault(str(name), []).append(float(value))

    def log_part(self, name: str, values: Sequence[float | None]) -> None:
        """Note the values of a rubric's function, in columns, as a metric and, while the answer is short enough, each."""
        name = unused(name[:_LONGEST_NAME], self._columns)
        self.log_extra(name, values)
        if numbers := [value for value in values if value is not None]:
            self.log_metric(name, sum(numbers) / len(numbers))
        if (len(self._parts) + 1) * len(values) <= _MOST_PART_VALUES:
            self._parts[name] = [None if value is None else float(f"{value:.6g}") for value in values]

    @property
    def parts(self) -> dict[str, list[float | None]]:
        return self._parts

    @property
    def extra(self) -> list[str]:
        limit = min(_LONGEST_EXTRA, _EXTRA_CHARACTERS // self._completions)
        columns = [(name, values) for name, values in self._columns.items() if len(values) == self._completions]
        return [
            ", ".join(f"{name}={values[index]}" for name, values in columns)[:limit]
            for index in range(self._completions)
        ]

    @property
    def metrics(self) -> dict[str, float]:
        means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        kept = [(name[:64], mean) for name, mean in means.items() if math.isfinite(mean)]
        return dict(kept[:_MOST_METRICS])


def arguments(group: RolloutGroup, answer_field: str, steps: int, notes: Notes) -> dict[str, object]:
    """Return the keyword arguments that TRL passes for the completions of ``group``."""
    prompt, count = group.prompt, len(group.samples)
    columns = {answer_field: prompt.answer} | prompt.extra
    given: dict[str, object] = {
        name: [value] * count
        for name, value in columns.items()
        if name not in ("prompt", "completion", "completion_ids") and (name in prompt.extra or value is not None)
    }
    of_samples = [_of_sample(prompt, sample, transcripts.read(sample)) for sample in group.samples]
    for name, values in zip(("prompts", "completions", "completion_ids"), zip(*of_samples, strict=True), strict=True):
        given[name] = list(values)
    return given | {
        "trainer_state": TrainerState(int(group.newest_version), steps),
        "log_extra": notes.log_extra,
        "log_metric": notes.log_metric,
    }


def _of_sample(
    prompt: Prompt, sample: Sample, conversation: transcripts.Conversation | None
) -> tuple[object, object, list[int]]:
    """Return prompt, completion and the completion's token ids; of an episode messages, as TRL has them with tools."""
    if conversation is not None:
        return conversation.prompt, conversation.completion, conversation.token_ids.tolist()
    if prompt.messages is None:
        return prompt.text, sample.text, sample.token_ids.tolist()
    messages = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
    return messages, [{"role": "assistant", "content": sample.text}], sample.token_ids.tolist()


def checked(returned: object, completions: int) -> list[float | None]:
    """Raises TypeError: not a list of numbers and None; ValueError: of another length, or not finite."""
    if isinstance(returned, (str, bytes, dict)) or not isinstance(returned, Iterable):
        raise TypeError(f"expected a list of numbers from the function, found {type(returned).__name__}")
    values = [_number(value, index) for index, value in enumerate(returned)]
    if len(values) != completions:
        raise ValueError(f"expected {completions} rewards from the function, one per completion, found {len(values)}")
    return values


def _number(value: Any, index: int) -> float | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"expected a number or None for completion {index}, found {type(value).__name__}")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"expected a finite number or None for completion {index}, found {number}")
    return number


class TrlCall:
    def __init__(self, reference: str) -> None:
        self.function = load_function(reference)

    async def __call__(self, group: RolloutGroup, answer_field: str, steps: int, notes: Notes) -> list[float | None]:
        returned = self.function(**arguments(group, answer_field, steps, notes))
        return checked(await returned if inspect.isawaitable(returned) else returned, len(group.samples))


class FunctionCall(Protocol):
    function: Callable[..., Any]
    """Named in errors."""

    def __call__(
        self, group: RolloutGroup, answer_field: str, steps: int, notes: Notes
    ) -> Awaitable[list[float | None]]:
        """Return a value of each completion."""


def serve(arguments_of_process: list[str], kind: Callable[[str], FunctionCall]) -> None:
    """Answer calls of the references that the process was started with."""
    *references, parent = arguments_of_process[1:]

    def prepare() -> child.Answerer:
        calls = [kind(reference) for reference in references]
        runner = asyncio.Runner()

        async def awaited(call: FunctionCall, *given: Any) -> list[float | None]:
            return await call(*given)

        def answer(question: dict[str, Any]) -> dict[str, object]:
            group = wire.decode(base64.b64decode(question["group"]), RolloutGroup)
            call, notes = calls[question["function"]], Notes(len(group.samples))
            try:
                values = runner.run(awaited(call, group, question["answer_field"], question["steps"], notes))
                return {"values": values, "extra": notes.extra, "metrics": notes.metrics, "parts": notes.parts}
            except (Exception, SystemExit) as error:  # noqa: BLE001 (the edge: whatever the user's function raises)
                return {"error": describe(error, call.function)}

        return answer

    child.serve(prepare, int(parent))


if __name__ == "__main__":
    serve(sys.argv, TrlCall)
