"""Lines of a run's records as words, figures and columns of figures. What is missing, or of another kind, is none."""

from collections.abc import Mapping, Sequence

from shared.bus.messages import Json

Line = dict[str, Json]
"""One line of a JSONL file."""


def number(line: Mapping[str, Json], name: str) -> float | None:
    """Return a figure of a line."""
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def word(line: Mapping[str, Json], name: str) -> str:
    """Return a text of a line; empty where there is none."""
    value = line.get(name)
    return value if isinstance(value, str) else ""


def column(lines: Sequence[Line], name: str) -> list[float | None]:
    """Return a figure of every line."""
    return [number(line, name) for line in lines]


def known(lines: Sequence[Line], name: str) -> list[float]:
    """Return a figure of the lines that have it."""
    return [value for value in column(lines, name) if value is not None]


def last(lines: Sequence[Line], name: str) -> float | None:
    """Return a figure of the last line."""
    return number(lines[-1], name) if lines else None


def steps_of(lines: Sequence[Line]) -> list[float]:
    """Return the step of every line: the axis that the others are drawn over."""
    return [number(line, "step") or 0.0 for line in lines]


def one_line_a_step(lines: Sequence[Line]) -> list[Line]:
    """Return the lines of the branch that holds: a run that was taken back to a checkpoint wrote some steps twice."""
    by_step: list[Line] = []
    for line in lines:
        step = number(line, "step")
        if step is None:
            continue
        while by_step and (number(by_step[-1], "step") or 0.0) >= step:
            by_step.pop()
        by_step.append(line)
    return by_step


def by_set(evaluations: Sequence[Line]) -> dict[str, list[Line]]:
    """Return evaluations by the held-out set that they are of, in the order in which sets first come."""
    sets: dict[str, list[Line]] = {}
    for line in evaluations:
        sets.setdefault(word(line, "set") or "heldout", []).append(line)
    return sets
