"""What every part of the engine contract is told about the engine it tests."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import pytest

from treadle.rollout_server.engine import Engine, NamedTensor

LONG = 300
"""Tokens of a completion that must still run when something happens to it."""


class ContractBase:
    """Inherit from a contract, name the subclass `Test...`, and give it these two.

    Attributes:
        long: Tokens of a completion that must still run when something happens to it.
        turn_tokens: Tokens of a prompt that is long enough for the prefix cache to keep.
        draws: Sequences by which a distribution is measured.
        logprob_tolerance: Nats by which the log-prob of a token may differ between batches.
        fresh: Whether `engine` gives one whose prefix caches are empty.
        ends: Whether `aclose` ends the engine, rather than a connection to it.
        caches_prefixes: Whether a second turn must find its first in the cache.
        places: Sequences that the engine runs side by side; None: too many to fill.
    """

    long: int = LONG
    turn_tokens: int = 200
    draws: int = 300
    logprob_tolerance: float = 1e-3
    fresh: bool = True
    ends: bool = True
    caches_prefixes: bool = True
    places: int | None = None

    @abstractmethod
    def engine(self, weights: int = 0) -> AbstractAsyncContextManager[Engine]:
        """An engine with nothing in flight that holds weight set 0 or 1."""

    @abstractmethod
    def weights(self, which: int) -> Sequence[NamedTensor]:
        """Weight set 0 or 1; they lead to different greedy completions."""

    def takes_in_place(self, engine: Engine) -> bool:
        """Whether updates in place reach the engine."""
        return True

    async def break_engine(self, engine: Engine) -> None:
        """Breaks it as a worker that dies would; it is of no use afterwards."""
        pytest.skip("nothing here knows how to break this engine")


def need(holds: bool, lack: str) -> None:
    """Skips the test where the engine has not what it needs."""
    if not holds:
        pytest.skip(lack)
