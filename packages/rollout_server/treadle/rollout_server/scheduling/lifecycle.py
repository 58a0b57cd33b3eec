"""The lifecycle: what one server does now, and what it may do next.

Invariant: the state changes only along the table; an illegal step is a bug and raises.
Observers are called with every change, in order, before `move` returns.
"""

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType


class ServerState(enum.Enum):
    """The state of a server; the value is the word used in messages."""

    LOADING = "loading"  # no engine yet, or its weights are a mixture
    SERVING = "serving"
    PAUSED = "paused"
    UPDATING = "updating"  # switching weights; calls queue
    FAILED = "failed"  # the engine broke; only a restart helps
    STOPPING = "stopping"


_ALWAYS = frozenset({ServerState.FAILED, ServerState.STOPPING})

TRANSITIONS: Mapping[ServerState, frozenset[ServerState]] = MappingProxyType(
    {
        ServerState.LOADING: frozenset({ServerState.SERVING, ServerState.UPDATING}) | _ALWAYS,
        ServerState.SERVING: frozenset({ServerState.PAUSED, ServerState.UPDATING}) | _ALWAYS,
        ServerState.PAUSED: frozenset({ServerState.SERVING, ServerState.UPDATING}) | _ALWAYS,
        ServerState.UPDATING: frozenset(
            {ServerState.SERVING, ServerState.PAUSED, ServerState.LOADING}
        )
        | _ALWAYS,
        ServerState.FAILED: frozenset({ServerState.STOPPING}),
        ServerState.STOPPING: frozenset(),
    }
)
"""State -> the states that may follow it."""


class IllegalTransition(AssertionError):
    """Our own code tried a transition that is not in the table."""


class Lifecycle:
    """Holds the state; starts LOADING."""

    def __init__(self) -> None:
        self._state = ServerState.LOADING
        self._observers: list[Callable[[ServerState], None]] = []

    @property
    def state(self) -> ServerState:
        """The state of the server now."""
        return self._state

    def observe(self, observer: Callable[[ServerState], None]) -> None:
        """Calls `observer` with every new state."""
        self._observers.append(observer)

    def move(self, state: ServerState) -> None:
        """Changes the state.

        Raises:
            IllegalTransition: The table has no such step.
        """
        if state not in TRANSITIONS[self._state]:
            raise IllegalTransition(f"{self._state.value} -> {state.value}")
        self._state = state
        for observer in self._observers:
            observer(state)
