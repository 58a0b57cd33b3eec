"""The base of every part of the engine contract: how it gets the engine and its properties."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import pytest

from treadle.conformance.contracts.reader import stream
from treadle.rollout_server.engine import Engine, InFlightPolicy, NamedTensor

LONG = 300
"""Default of `ContractBase.long`."""


class ContractBase:
    """Inherit from a contract, name the subclass `Test...`, and define `engine` and `weights`.

    Attributes:
        long: Length in tokens of completions that must still be running when a test interferes.
        turn_tokens: Length of a prompt that is long enough for the prefix cache to keep.
        draws: Number of sequences used to measure a distribution.
        logprob_tolerance: Maximum difference between a token's log-probs in two batches, in nats.
        fresh: Whether `engine` returns an engine with empty prefix caches.
        ends: Whether `aclose` ends the engine rather than a connection to it.
        caches_prefixes: Whether a second turn must find the first in the cache.
        places: Number of sequences that the engine runs at once; None if too many to fill.
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
        """Returns an engine with weight set 0 or 1 and nothing in flight."""

    @abstractmethod
    def weights(self, which: int) -> Sequence[NamedTensor]:
        """Returns weight set 0 or 1; their greedy completions differ."""

    def takes_in_place(self, engine: Engine) -> bool:
        """Returns whether updates in place reach the engine."""
        return True

    async def update_in_flight(
        self, engine: Engine, tensors: Sequence[NamedTensor], version: int
    ) -> None:
        """Loads weights under running sequences, with CONTINUE."""
        await engine.pause(InFlightPolicy.CONTINUE)
        await engine.load_weights(stream(tensors), version=version)
        await engine.resume()

    async def break_engine(self, engine: Engine) -> None:
        """Breaks the engine for good, as the death of a worker does."""
        pytest.skip("the suite does not know how to break this engine")


def skip_unless(condition: bool, reason: str) -> None:
    """Skips the test if the engine lacks what it needs."""
    if not condition:
        pytest.skip(reason)
