"""Every second of a server has a cause."""

from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.scheduling.time_use import Cause, SequenceTime, TimeUse


class Watch:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def nonzero(use: TimeUse) -> dict[str, float]:
    return {cause.value: s for cause, s in use.seconds().items() if s}


@pytest.fixture
def watch() -> Watch:
    return Watch()


def serving(watch: Watch, *, slots: int = 4) -> TimeUse:
    use = TimeUse(watch, slots=slots)
    use.entered(ServerState.SERVING)
    return use


def test_a_server_starts_waits_reads_and_samples(watch: Watch) -> None:
    use = TimeUse(watch, slots=4)
    watch.now = 5.0
    use.entered(ServerState.SERVING)
    watch.now = 7.0
    with use.sequence() as sequence:
        watch.now = 10.0
        sequence.sampled()
        watch.now = 14.0
        sequence.sampled()
        watch.now = 15.0
    watch.now = 16.0
    assert nonzero(use) == {"starting": 5.0, "waiting": 3.0, "prefill": 3.0, "decode": 5.0}


def test_reading_beside_sampling_is_divided_by_the_numbers_of_sequences(watch: Watch) -> None:
    use = serving(watch)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(use.sequence()).sampled()
        stack.enter_context(use.sequence())
        watch.now = 8.0
    assert nonzero(use) == {"prefill": 2.0, "decode": 6.0}


def test_sequences_beyond_the_places_of_the_engine_wait_within_it(watch: Watch) -> None:
    use = serving(watch, slots=2)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(use.sequence()).sampled()
        for _ in range(9):
            stack.enter_context(use.sequence())
        watch.now = 8.0
    assert nonzero(use) == {"decode": 8.0}


def test_an_update_and_a_pause_count_though_sequences_are_kept(watch: Watch) -> None:
    use = serving(watch)
    with use.sequence() as sequence:
        sequence.sampled()
        use.entered(ServerState.UPDATING)
        watch.now = 2.0
        use.entered(ServerState.PAUSED)
        watch.now = 3.0
        use.released(True)
        watch.now = 7.0
        use.entered(ServerState.UPDATING)
        watch.now = 8.0
        use.entered(ServerState.LOADING)  # the update ended without its commit
        watch.now = 9.0
        use.entered(ServerState.FAILED)
        watch.now = 11.0
    assert nonzero(use) == {"weights": 5.0, "memory": 4.0, "failed": 2.0}


_STEPS = st.lists(
    st.tuples(
        st.floats(0, 1e4),
        st.sampled_from(["begin", "sample", "end", "release", "restore", *ServerState]),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(steps=_STEPS, slots=st.integers(1, 5))
def test_the_causes_add_up_to_the_time_and_never_fall(
    steps: list[tuple[float, str | ServerState]], slots: int
) -> None:
    watch = Watch()
    use = TimeUse(watch, slots=slots)
    running: list[SequenceTime] = []
    before = use.seconds()
    for passed, step in steps:
        watch.now += passed
        match step:
            case ServerState():
                use.entered(step)
            case "begin":
                running.append(use.sequence().__enter__())
            case "sample" if running:
                running[-1].sampled()
            case "end" if running:
                running.pop(0).__exit__(None, None, None)
            case "release" | "restore":
                use.released(step == "release")
        seconds = use.seconds()
        assert sum(seconds.values()) == pytest.approx(watch.now)
        assert all(seconds[cause] >= before[cause] for cause in Cause)
        before = seconds
