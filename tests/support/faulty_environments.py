"""Environments with faults."""

import random
import subprocess
import time
from typing import Any

from tests.support.guessing import Guess


class Moody(Guess):
    def reset(self, secret: int, **row: object) -> str:
        super().reset(secret)
        return str(random.random())


class Hanging(Guess):
    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The guess.
        """
        time.sleep(10_000)
        return super().guess(number)


class Wrong(Guess):
    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The guess.
        """
        return number.text  # type: ignore[attr-defined,no-any-return]


class Picky(Guess):
    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The guess.
        """
        raise ValueError("not today")


class Endless(Guess):
    def get_reward(self) -> float:
        return float("inf")


class Scoreless:
    def reset(self) -> None:
        """Begin."""

    def wait(self, mode: Any = None, seconds: list[int] | None = None) -> None:
        """Wait.

        Args:
            mode: How.
            seconds: How long.
        """


class Constant(Scoreless):
    def get_reward(self) -> float:
        return 0.5


class Leaking(Constant):
    opened: list[Any] = []  # noqa: RUF012

    def reset(self) -> None:
        self.opened.append(open("/dev/null"))  # noqa: SIM115, PTH123
        self.opened.append(subprocess.Popen(["sleep", "300"]))
