import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from treadle.rollout_server.scheduling.lifecycle import (
    TRANSITIONS,
    IllegalTransition,
    Lifecycle,
    ServerState,
)


class LifecycleMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.lifecycle = Lifecycle()
        self.seen: list[ServerState] = [ServerState.LOADING]
        self.lifecycle.observe(self.seen.append)

    @rule(state=st.sampled_from(ServerState))
    def move(self, state: ServerState) -> None:
        before = self.lifecycle.state
        if state in TRANSITIONS[before]:
            self.lifecycle.move(state)
        else:
            with pytest.raises(IllegalTransition, match=f"{before.value} -> {state.value}"):
                self.lifecycle.move(state)
            assert self.lifecycle.state is before

    @invariant()
    def observers_saw_every_state(self) -> None:
        assert self.seen[-1] is self.lifecycle.state


TestLifecycleMachine = LifecycleMachine.TestCase


def test_the_table_names_every_state_and_every_state_can_stop() -> None:
    assert set(TRANSITIONS) == set(ServerState)
    for state in set(ServerState) - {ServerState.STOPPING}:
        assert ServerState.STOPPING in TRANSITIONS[state]
