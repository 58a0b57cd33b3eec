"""The tables of states and of repeated calls in docs/protocol.md are what a server answers.

The real servicer in front of a fake engine whose loads end when the machine says so; the model
keeps only the row that each update is in, and looks every answer up in the page.
"""

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from treadle.rollout.v1 import weight_sync_service_pb2 as pb
from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import (
    ElementType,
    EngineRequest,
    InFlightPolicy,
    ModelInfo,
    NamedTensor,
    Sampling,
    TensorSpec,
)
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.errors import CapabilityMissing, RolloutServerError
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.services.errors import reason_name
from treadle.rollout_server.services.push_message import PushedChunk
from treadle.rollout_server.services.weight_sync import WeightSyncServicer
from treadle.rollout_server.testing import FakeClock

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
LEASE_S = 10
TENSORS = tuple(TensorSpec(name=n, element_type=ElementType.FLOAT32, shape=(1,)) for n in "ab")
VERSIONS = {"u": 1, "v": 2, "in place": 3}
SIZES = [4, 4]
NEVER, LACKS, WHOLE = "was never begun", "lacks bytes", "is whole"
COMMITTING, SERVES, SERVED = "is being committed", "serves", "served before"
ABORTED, EXPIRED = "was aborted", "ran out of its lease"
REFUSED = "was refused by its engine, in place"
LIVE = (LACKS, WHOLE, COMMITTING)


def read_table(heading: str) -> dict[str, dict[str, str]]:
    """Returns the table below a heading of the page as state -> call -> answer."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n##")[0]
    rows = [line.strip("|").split("|") for line in re.findall(r"^\|.*\|$", section, re.MULTILINE)]
    cells = [[cell.strip().replace("`", "") for cell in row] for row in rows]
    return {row[0]: dict(zip(cells[0][1:], row[1:], strict=True)) for row in cells[2:]}


TABLE = read_table("A call that comes again")
STATES = read_table("States")


class Engine(FakeEngine):
    """A fake engine whose loads end, or are refused, only when the test allows it."""

    def __init__(self, clock: FakeClock) -> None:
        model = ModelInfo(architecture="fake", vocab_size=8, context_length=8)
        super().__init__(model=model, parameters=TENSORS, clock=clock)
        self.may_end = asyncio.Event()
        self.breaks = asyncio.Event()
        self.refuses = False

    async def load_weights(
        self, tensors: AsyncIterator[NamedTensor], *, version: int, in_place: bool = False
    ) -> None:
        await super().load_weights(tensors, version=version, in_place=in_place)
        await self.may_end.wait()
        if self.refuses:
            raise CapabilityMissing("fake", "float32")

    async def wait_failed(self) -> Exception:
        await self.breaks.wait()
        return RuntimeError("the device is lost")


class Calls(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.run(self.start())

    async def start(self) -> None:
        self.clock = FakeClock()
        self.engine = Engine(self.clock)
        self.replica = Replica(ServerConfig(), self.clock)
        self.replica.serve(self.engine)
        self.service = WeightSyncServicer(self.replica)
        self.commits: list[asyncio.Task[pb.CommitUpdateResponse]] = []
        self.rows = dict.fromkeys(VERSIONS, NEVER)
        self.held = {update_id: [0, 0] for update_id in VERSIONS}
        self.serving = 0

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def settled() -> Any:
            try:
                return await work
            finally:
                for _ in range(30):
                    await asyncio.sleep(0)

        return self.loop.run_until_complete(settled())

    def live(self) -> str | None:
        return next((name for name, row in self.rows.items() if row in LIVE), None)

    def end(self, update_id: str, row: str) -> None:
        """Moves a live update to its final row; ending one in place also loses the weights."""
        if update_id == "in place" or row == SERVES:
            self.rows |= {name: SERVED for name, old in self.rows.items() if old == SERVES}
        self.rows[update_id] = row

    def answer(self, call: str, update_id: str, work: Coroutine[Any, Any, Any]) -> Any:
        """Makes a call and returns its answer, or checks that it is refused and returns None."""
        expected = TABLE[self.rows[update_id]][call]
        if not expected.isupper():
            return self.run(work)
        with pytest.raises(RolloutServerError) as caught:
            self.run(work)
        assert reason_name(caught.value) == expected
        return None

    ids = st.sampled_from(list(VERSIONS))
    live_or_any = st.none() | ids
    rarely = st.integers(0, 9)

    @rule()
    def push_the_rest(self) -> None:
        live = self.live()
        if live is not None and self.rows[live] == LACKS:
            for index in range(len(TENSORS)):
                self.push(live, index)

    @rule(update_id=ids)
    def begin(self, update_id: str) -> None:
        work = self.service.BeginUpdate(_announcement(update_id), None)  # type: ignore[arg-type]
        if TABLE[self.rows[update_id]]["BeginUpdate, as before"] == "opens it":
            behind = VERSIONS[update_id] <= self.serving
            if behind or self.live():
                with pytest.raises(RolloutServerError) as caught:
                    self.run(work)
                wanted = "WEIGHT_VERSION_BEHIND" if behind else "UPDATE_IN_PROGRESS"
                assert reason_name(caught.value) == wanted
                return
            self.rows[update_id], self.held[update_id] = LACKS, [0, 0]
        if (begun := self.answer("BeginUpdate, as before", update_id, work)) is not None:
            assert list(begun.received_bytes) == self.held[update_id]
            assert self.rows[update_id] != SERVES or self.held[update_id] == SIZES

    @rule(which=live_or_any)
    def get(self, which: str | None) -> None:
        update_id = which or self.live() or "u"
        request = pb.GetUpdateRequest(update_id=update_id)
        got = self.answer("GetUpdate", update_id, self.service.GetUpdate(request, None))  # type: ignore[arg-type]
        assert got is None or list(got.received_bytes) == self.held[update_id]

    @rule(update_id=ids, index=st.integers(0, 1))
    def push(self, update_id: str, index: int) -> None:
        if self.rows[update_id] == LACKS and self.held[update_id][index]:
            return
        pushed = self.service.PushWeights(_chunks(update_id, index), None)  # type: ignore[arg-type]
        if self.answer("pushes", update_id, pushed) is not None:
            self.held[update_id][index] = 4
            if self.held[update_id] == SIZES:
                self.rows[update_id] = WHOLE

    @rule(which=live_or_any)
    def commit(self, which: str | None) -> None:
        update_id = which or self.live() or "u"
        request = pb.CommitUpdateRequest(update_id=update_id, in_flight=pb.IN_FLIGHT_POLICY_DRAIN)
        work = self.service.CommitUpdate(request, None)  # type: ignore[arg-type]
        if self.rows[update_id] not in (WHOLE, COMMITTING):
            committed = self.answer("CommitUpdate", update_id, work)
            assert committed is None or committed.weight_version == VERSIONS[update_id]
            return
        self.rows[update_id] = COMMITTING

        async def begin() -> None:
            self.commits.append(asyncio.create_task(work))

        self.run(begin())
        assert not self.commits[-1].done()

    @precondition(lambda self: self.commits)
    @rule(refuses=st.booleans())
    def end_commit(self, refuses: bool) -> None:
        update_id = self.live()
        assert update_id is not None
        self.engine.refuses = refuses
        self.engine.may_end.set()
        results = self.run(_gathered(self.commits))
        self.commits.clear()
        self.engine.may_end.clear()
        if not refuses:
            assert {result.weight_version for result in results} == {VERSIONS[update_id]}
            self.serving = VERSIONS[update_id]
            self.end(update_id, SERVES)
            return
        assert all(isinstance(result, CapabilityMissing) for result in results)
        if update_id == "in place":
            self.end(update_id, REFUSED)
        else:
            self.rows[update_id] = WHOLE

    @rule(update_id=ids)
    def abort(self, update_id: str) -> None:
        request = pb.AbortUpdateRequest(update_id=update_id)
        work = self.service.AbortUpdate(request, None)  # type: ignore[arg-type]
        if self.answer("AbortUpdate", update_id, work) and self.rows[update_id] != ABORTED:
            self.end(update_id, ABORTED)

    @precondition(lambda self: self.rows[self.live() or "u"] != COMMITTING)
    @rule(really=rarely)
    def be_silent(self, really: int = 9) -> None:
        if really < 9:
            return
        live = self.live()
        self.clock.advance(LEASE_S)
        self.run(asyncio.sleep(0))
        if live is not None:
            self.end(live, EXPIRED)

    @precondition(lambda self: not self.commits)
    @rule(really=rarely)
    def start_again(self, really: int) -> None:
        if really < 9:
            return
        self.run(self.replica.aclose())
        self.run(self.start())

    @precondition(lambda self: not self.live())
    @rule(update_id=ids, row=st.sampled_from([SERVES, SERVES, *TABLE]))
    def reach(self, update_id: str, row: str) -> None:
        """Brings an update that can begin into `row`, if it can reach that row."""
        if VERSIONS[update_id] <= self.serving or row == NEVER:
            return
        self.begin(update_id)
        if row in (WHOLE, COMMITTING, SERVES, SERVED, REFUSED):
            self.push_the_rest()
        if row in (COMMITTING, SERVES, SERVED, REFUSED):
            self.commit(update_id)
        if row in (SERVES, SERVED, REFUSED):
            self.end_commit(refuses=row == REFUSED)
        if row == ABORTED:
            self.abort(update_id)
        if row == EXPIRED:
            self.be_silent()
        if row == SERVED and update_id != "in place":
            self.begin("in place")
            self.abort("in place")

    def teardown(self) -> None:
        self.engine.may_end.set()
        self.run(_gathered(self.commits))
        self.run(self.replica.aclose())
        self.loop.close()


async def _gathered(tasks: list[asyncio.Task[pb.CommitUpdateResponse]]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


def _announcement(update_id: str) -> pb.BeginUpdateRequest:
    request = pb.BeginUpdateRequest(
        update_id=update_id,
        weight_version=VERSIONS[update_id],
        tensors=[
            pb.TensorSpec(name=s.name, element_type=pb.ELEMENT_TYPE_FLOAT32, shape=s.shape)
            for s in TENSORS
        ],
        inline=pb.InlineTransport(),
    )
    request.lease.FromSeconds(LEASE_S)
    if update_id == "in place":
        request.in_place.in_flight = pb.IN_FLIGHT_POLICY_DRAIN
    return request


async def _chunks(update_id: str, index: int) -> AsyncIterator[pb.PushHeader | PushedChunk]:
    yield pb.PushHeader(update_id=update_id)
    yield PushedChunk(
        tensor_index=index, offset=0, crc32=zlib.crc32(b"abcd"), data=memoryview(b"abcd")
    )


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("call", ["begin", "get", "push", "commit", "abort"])
def test_each_answer_of_the_table(row: str, call: str) -> None:
    calls = Calls()
    update_id = "in place" if row == REFUSED else "u"
    calls.reach(update_id, row)
    assert calls.rows[update_id] == row
    getattr(calls, call)(*((update_id, 0) if call == "push" else (update_id,)))
    calls.teardown()


async def fail(calls: Calls) -> None:
    calls.engine.breaks.set()


async def stop(calls: Calls) -> None:
    calls.replica.stop()


async def load(calls: Calls) -> None:
    await calls.replica.aclose()
    calls.replica = Replica(ServerConfig(), calls.clock)
    calls.service = WeightSyncServicer(calls.replica)


STATE_OF: dict[str, Callable[[Calls], object]] = {
    "LOADING, at the start": lambda calls: calls.run(load(calls)),
    "LOADING, after an update [in place](#in-place) without Commit": lambda calls: calls.reach(
        "in place", ABORTED
    ),
    "SERVING": lambda calls: None,
    "PAUSED": lambda calls: calls.run(calls.replica.pause(InFlightPolicy.DRAIN)),
    "UPDATING, staged": lambda calls: calls.reach("u", COMMITTING),
    "UPDATING, in place": lambda calls: calls.reach("in place", LACKS),
    "FAILED": lambda calls: calls.run(fail(calls)),
    "STOPPING": lambda calls: calls.run(stop(calls)),
}
"""State of the page -> brings the server into it."""


async def sample(calls: Calls) -> None:
    request = EngineRequest(request_id="r", prompt=(1,), sampling=Sampling(max_tokens=1))
    async with aclosing(calls.replica.generate(request)) as events:
        await anext(events)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("call", ["Generate", "Pause", "Resume", "BeginUpdate"])
def test_each_answer_of_the_states(state: str, call: str) -> None:
    calls = Calls()
    STATE_OF[state](calls)
    assert state.startswith(calls.replica.state.name)
    makes: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "Generate": lambda: sample(calls),
        "Pause": lambda: calls.replica.pause(InFlightPolicy.DRAIN),
        "Resume": lambda: calls.replica.resume(),
        "BeginUpdate": lambda: calls.service.BeginUpdate(_announcement("v"), None),  # type: ignore[arg-type]
    }

    async def begin() -> asyncio.Task[Any]:
        return asyncio.create_task(makes[call]())

    task, expected = calls.run(begin()), STATES[state][call]
    assert task.done() == (expected not in ("queues", "waits"))
    if expected.isupper():
        error = task.exception()
        assert isinstance(error, RolloutServerError)
        assert reason_name(error) == expected
    elif task.done():
        task.result()
    task.cancel()
    calls.teardown()


def test_the_states_are_those_of_a_server() -> None:
    assert set(STATES) == set(STATE_OF)
    assert {state.partition(",")[0] for state in STATES} == {state.name for state in ServerState}


def test_the_table_names_every_state() -> None:
    assert set(TABLE) == {NEVER, *LIVE, SERVES, SERVED, ABORTED, EXPIRED, REFUSED}


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
