"""What differs from calls of their own: completions that share one. `client_test` has the rest."""

import asyncio
import math
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from treadle.agent_loop import Completion, RequestContext, SamplingParams
from treadle.agent_loop.rpc import GrpcTokenGenerator, connect
from treadle.agent_loop.rpc.shared_call import MAX_REQUEST_BYTES
from treadle.agent_loop.rpc.testing import (
    STARTED,
    Context,
    ScriptedServer,
    finished,
    says,
    serving,
    tokens,
)
from treadle.rollout.v1 import generation_service_pb2 as pb
from treadle.tracing import MemorySink, span, use_sink

pytestmark = pytest.mark.asyncio

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, seed=1, stop_token_ids=(99,))


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedServer, "many", True)


async def ask(
    generator: GrpcTokenGenerator, session: str, prompt: tuple[int, ...] = (1, 2, 3)
) -> Completion:
    request = RequestContext(request_id="r", session_id=session, deadline=math.inf)
    return await generator.generate(prompt, PARAMS, request=request)


async def test_completions_share_one_call() -> None:
    server = ScriptedServer(*[says(STARTED, tokens(99), finished(1))] * 5)
    async with serving(server) as addresses, connect(addresses) as generator:
        await asyncio.gather(*(ask(generator, f"s{number}") for number in range(4)))
        await ask(generator, "later")
    assert server.num_shared == 1


async def test_a_large_request_is_a_call_of_its_own() -> None:
    class Own(ScriptedServer):
        async def GenerateMany(self, requests: object, context: Context) -> None:
            raise AssertionError("the request is too large")

    prompt = (90,) * MAX_REQUEST_BYTES
    server = Own(says(STARTED, tokens(99), finished(1)))
    async with serving(server) as addresses, connect(addresses) as generator:
        assert (await ask(generator, "s", prompt)).token_ids == (99,)


async def test_what_a_lost_call_has_brought_is_kept() -> None:
    """Each of its completions continues elsewhere after its own tokens; a new call is opened."""
    lost = asyncio.Event()
    running = asyncio.Semaphore(0)

    async def first_tokens(
        request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        yield STARTED
        yield tokens(4 if request.session_id == "a" else 5)
        running.release()
        await asyncio.Event().wait()

    class Lost(ScriptedServer):
        async def GenerateMany(self, requests: object, context: Context) -> None:
            serve = asyncio.create_task(super().GenerateMany(requests, context))
            await lost.wait()
            serve.cancel()
            await asyncio.wait({serve})
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is gone")

    bad = Lost(first_tokens, first_tokens)
    good = ScriptedServer(*[says(STARTED, tokens(6), tokens(99), finished(2))] * 2)
    async with serving(bad, good) as addresses, connect(addresses) as generator:
        generator.drain_replica(good.address)
        asking = [asyncio.create_task(ask(generator, session)) for session in "ab"]
        await running.acquire()
        await running.acquire()
        await generator.add_replica(good.address)
        lost.set()
        found = [completion.token_ids for completion in await asyncio.gather(*asking)]
        assert found == [(4, 6, 99), (5, 6, 99)]
        resumed = sorted(list(request.prompt_token_ids) for request in good.requests)
        assert resumed == [[1, 2, 3, 4], [1, 2, 3, 5]]
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert names.count("read GenerateMany") == 1, "of the new call"
        assert names.count("write GenerateMany") == 1


async def test_who_leaves_cancels_no_other() -> None:
    left = asyncio.Event()
    running = asyncio.Semaphore(0)
    go_on = asyncio.Event()

    async def held(
        request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        yield STARTED
        running.release()
        try:
            await go_on.wait()
        finally:
            if request.session_id == "a":
                left.set()
        yield tokens(99)
        yield finished(1)

    async with serving(ScriptedServer(held, held)) as addresses, connect(addresses) as generator:
        leaving, staying = (asyncio.create_task(ask(generator, session)) for session in "ab")
        await running.acquire()
        await running.acquire()
        leaving.cancel()
        await left.wait()
        go_on.set()
        assert (await staying).token_ids == (99,)


async def test_each_completion_names_its_span() -> None:
    parents = []

    async def notes(
        request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        parents.append(context.traceparent)
        yield STARTED
        yield tokens(99)
        yield finished(1)

    server, sink = ScriptedServer(notes, notes), MemorySink()
    async with serving(server) as addresses, connect(addresses) as generator:
        with use_sink(sink):
            for name in ("first", "second"):
                async with span(name):
                    await ask(generator, name)
    spans = {each.name: each.span_id for each in sink.spans}
    assert [parent.split("-")[2] for parent in parents] == [spans["first"], spans["second"]]
