"""Guess a number from 0 to 14 in four turns: an environment as TRL's trainer takes it."""


class Guess:
    """The policy's answers are calls of `guess`; each is answered by a hint."""

    def reset(self, secret: int, **row: object) -> None:
        """Begin an episode of a dataset row."""
        self._secret, self.done = secret, False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess, 0 to 14.
        """
        self.done = number == self._secret
        return "=" if self.done else "<" if self._secret < number else ">"

    def get_reward(self) -> float:
        """Return 1 if it was guessed."""
        return float(self.done)
