"""Environments, tools and agents of tests of episodes."""

import os
import time


class Guess:
    """Guess a number; a wrong guess is answered by a hint."""

    def reset(self, secret: int, **row: object) -> str:
        self.secret, self.done, self._tries = secret, False, 0
        return " (a number)"

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The guess.
        """
        self._tries += 1
        self.done = number == self.secret
        return "=" if self.done else "<" if self.secret < number else ">"

    def get_reward(self) -> float:
        return 1.0 if self.done else 0.0


class Trouble(Guess):
    """By its row: hangs, dies, is unavailable, or gives no number."""

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The guess.
        """
        if self.secret == -1:
            time.sleep(10_000)
        if self.secret == -2:
            os._exit(1)
        if self.secret == -3:
            raise ConnectionError("no sandbox is free")
        if self.secret == -4:
            raise ValueError("only even numbers")
        return super().guess(number)

    def get_reward(self) -> float:
        return float("nan") if self.secret == -5 else super().get_reward()


class Silent:
    """Has a tool that says nothing of its arguments."""

    def reset(self) -> None:
        return None

    def guess(self, number):  # type: ignore[no-untyped-def]
        return number


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One number.
        b: Another.
    """
    return a + b
