"""When a step has guesses of tokens: with few requests, and while enough guesses are right.

A pass of the model reads a request's last token and its guesses (``decoding/siblings.py``), and gives one token more than
the guesses that are right. A step has several passes; its tokens are the most that they may give.
"""

GUESSED = "penstock_guessed"
"""Attribute of a step of vLLM's with guesses."""
GUESSING_UP_TO = "penstock_guessing_up_to"
"""Key of vLLM's ``additional_config``: the maximum number of running requests whose tokens are guessed."""
GUESSES = 7
PASS_TOKENS = GUESSES + 1
_LEAST = 1.5
"""Tokens of a pass from which on it is worth more than one without guesses."""
_FIRST, _SHARE = 2.0, 0.2
"""The mean that is assumed when guesses are tried, and what each step counts for."""
_REST, _LONGEST_REST = 64, 1024
"""Steps without guesses after which they are tried again, twice as many each time that they are wrong."""


class Guessing:
    """Decides for one scheduler, up to ``most`` requests."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.mean = _FIRST
        """Tokens of a request in a pass, lately."""
        self._rest, self._rested = _REST, 0

    def passes(self, requests: int, tokens_each: int, left: int, room: int) -> int:
        """Return the passes with guesses of the next step, 0 for none.

        Args:
            tokens_each: tokens of each request in a step without guesses.
            left: tokens that a request may want yet, if all guesses under way are right.
            room: tokens that the longest request can have yet.
        """
        if requests > self._most or room < PASS_TOKENS:
            return 0
        if self.mean < _LEAST:
            self._rested += 1
            if self._rested < self._rest:
                return 0
            self.mean, self._rest, self._rested = _FIRST, min(2 * self._rest, _LONGEST_REST), 0
        few = max(1, left // (2 * PASS_TOKENS))  # so that the next step need not wait for this one
        return min(tokens_each, few, room // PASS_TOKENS)

    def learn(self, tokens: int, passes: int) -> None:
        """Note that the ``passes`` of all requests together gave ``tokens``."""
        self.mean += _SHARE * (tokens / passes - self.mean)
        if self.mean > _FIRST:
            self._rest = _REST
