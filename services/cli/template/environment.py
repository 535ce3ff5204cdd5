"""A calculator, each use of which costs a tenth of the reward: an environment as TRL's trainer takes it."""

import re


class Calculator:
    """`get_reward` is what a right answer is worth; the scorer `answer` says whether it is right."""

    def reset(self, **row: object) -> None:
        """Begin an episode of a dataset row."""
        self._calls = 0

    def calculator(self, expression: str) -> str:
        """Multiply or add two numbers.

        Args:
            expression: Such as 37*48 or 7+8.
        """
        self._calls += 1
        numbers = re.fullmatch(r"([0-9]{1,9})([*+])([0-9]{1,9})", expression)
        if numbers is None:
            return "?"
        left, sign, right = numbers.groups()
        return str(int(left) * int(right) if sign == "*" else int(left) + int(right))

    def get_reward(self) -> float:
        """Return 1, less a tenth for each call."""
        return max(0.0, 1 - 0.1 * self._calls)
