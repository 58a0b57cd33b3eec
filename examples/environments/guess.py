"""A text environment with Gymnasium's interface: guess a number, with hints."""

import random
import re
from typing import Any


class Guess:
    """Guess the number in a few tries; the reward is 1 at the first try and less at later ones.

    Args:
        highest: Numbers are from 1 to this.
        tries: Number of guesses.
    """

    def __init__(self, highest: int = 9, tries: int = 4) -> None:
        self._highest = highest
        self._tries = tries
        self._number = 0
        self._made = 0

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Draws a number."""
        self._number = random.Random(seed).randint(1, self._highest)
        self._made = 0
        return f"Guess a number from 1 to {self._highest}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes a guess: the first number in the text."""
        self._made += 1
        last = self._made == self._tries
        guess = re.search(r"\d+", action)
        if guess is None:
            return "Say a number.", 0.0, False, last, {}
        if int(guess[0]) == self._number:
            return "Right.", 1.0 - (self._made - 1) / self._tries, True, False, {}
        hint = "higher" if int(guess[0]) < self._number else "lower"
        return f"It is {hint}.", 0.0, False, last, {}
