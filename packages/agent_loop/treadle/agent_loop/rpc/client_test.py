"""The client against real grpc.aio servers that follow a script."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace

import grpc
import pytest

from treadle.agent_loop import (
    Completion,
    ContractError,
    FinishReason,
    GenerationTimeoutError,
    JsonConstraint,
    PromptTooLongError,
    ReplicaUnavailableError,
    RequestContext,
    RequestRejectedError,
    SamplingParams,
    SetupError,
    Tag,
    TagConstraint,
)
from treadle.agent_loop.rpc import (
    ChannelSecurity,
    GrpcTokenGenerator,
    Requirements,
    RetryPolicy,
    RpcDeadlines,
    connect,
)
from treadle.agent_loop.rpc.testing import (
    STARTED,
    Context,
    ScriptedServer,
    fails,
    finished,
    prompt_logprobs,
    says,
    serving,
    tokens,
)
from treadle.agent_loop.testing import FakeClock
from treadle.rollout.v1 import generation_service_pb2 as pb

pytestmark = pytest.mark.asyncio

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, seed=1, stop_token_ids=(99,))


@pytest.fixture(params=[False, True], ids=["own_call", "shared_call"], autouse=True)
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether servers sample many completions over one call: nothing else may differ."""
    monkeypatch.setattr(ScriptedServer, "many", request.param)


async def ask(
    generator: GrpcTokenGenerator,
    params: SamplingParams = PARAMS,
    *,
    deadline: float = math.inf,
    session: str = "s",
) -> Completion:
    request = RequestContext(request_id="r", session_id=session, deadline=deadline)
    return await generator.generate((1, 2, 3), params, request=request)


async def test_a_completion_comes_whole_with_its_versions() -> None:
    server = ScriptedServer(
        says(
            STARTED,
            tokens(4, 5),
            tokens(6),
            tokens(7, version=2),
            tokens(99, version=2),
            finished(5),
        )
    )
    async with serving(server) as addresses, connect(addresses) as generator:
        completion = await ask(generator)
    assert [(c.token_ids, c.weight_version) for c in completion.chunks] == [
        ((4, 5, 6), 1),
        ((7, 99), 2),
    ]
    assert completion.chunks[0].logprobs == (-0.5, -0.625, -0.75)
    assert (completion.finish, completion.cached_prompt_tokens) == (FinishReason.STOP, 2)


async def test_what_is_set_is_sent_and_what_is_not_is_absent() -> None:
    server = ScriptedServer(says(STARTED, tokens(99), finished(1)))
    async with serving(server) as addresses, connect(addresses) as generator:
        await ask(generator)
    (request,) = server.requests
    assert list(request.prompt_token_ids) == [1, 2, 3]
    assert request.sampling.HasField("temperature")
    assert request.sampling.temperature == 0.0
    assert not request.sampling.HasField("top_p")
    assert request.logprob_mode == pb.LOGPROB_MODE_SAMPLED
    assert request.session_id == "s"
    left = server.time_left[0]
    assert left is not None
    assert 0 < left < 2 * RpcDeadlines().generate_s


@pytest.mark.parametrize("reason", ["SHUTTING_DOWN", "ENGINE_FAILED", "PAUSED", "OVERLOADED"])
async def test_another_replica_takes_over_before_the_first_token(reason: str) -> None:
    first = ScriptedServer(fails(grpc.StatusCode.UNAVAILABLE, reason))
    second = ScriptedServer(says(STARTED, tokens(99), finished(1)))
    async with serving(first, second) as addresses, connect(addresses) as generator:
        completion = await ask(generator)
    assert completion.token_ids == (99,)
    assert len(first.requests) == len(second.requests) == 1
    assert first.requests[0].request_id != second.requests[0].request_id


async def test_after_a_lost_stream_the_next_call_is_the_prompt_plus_what_arrived() -> None:
    first = ScriptedServer(
        fails(grpc.StatusCode.UNAVAILABLE, None, STARTED, tokens(4, 5), tokens(6, version=2))
    )
    second = ScriptedServer(says(STARTED, tokens(7, version=1), tokens(99, version=1), finished(2)))
    async with serving(first, second) as addresses, connect(addresses) as generator:
        completion = await ask(generator)
    (resumed,) = second.requests
    assert list(resumed.prompt_token_ids) == [1, 2, 3, 4, 5, 6]
    assert resumed.sampling.max_tokens == 5
    assert resumed.sampling.seed == first.requests[0].sampling.seed == 1
    assert [(c.token_ids, c.weight_version) for c in completion.chunks] == [
        ((4, 5), 1),
        ((6,), 2),
        ((7, 99), 1),
    ]
    assert completion.finish is FinishReason.STOP


@pytest.mark.parametrize(
    ("last", "finish"), [((4, 99), FinishReason.STOP), (tuple(range(8)), FinishReason.LENGTH)]
)
async def test_a_stream_lost_after_its_last_token_is_complete(
    last: tuple[int, ...], finish: FinishReason
) -> None:
    server = ScriptedServer(fails(grpc.StatusCode.UNAVAILABLE, None, STARTED, tokens(*last)))
    async with serving(server) as addresses, connect(addresses) as generator:
        completion = await ask(generator)
    assert (completion.token_ids, completion.finish) == (last, finish)


async def test_an_interrupted_completion_is_resumed() -> None:
    interrupted = pb.FINISH_REASON_INTERRUPTED
    server = ScriptedServer(
        says(STARTED, finished(0, interrupted)),
        says(STARTED, tokens(4), finished(1, interrupted)),
        says(STARTED, tokens(5, version=2), tokens(99, version=2), finished(2)),
    )
    async with serving(server) as addresses, connect(addresses) as generator:
        completion = await ask(generator)
    assert [c.weight_version for c in completion.chunks] == [1, 2]
    assert completion.token_ids == (4, 5, 99)
    assert completion.num_interruptions == 2


async def test_logprobs_of_a_prompt_are_asked_for_once_over_all_calls() -> None:
    interrupted = finished(0, pb.FINISH_REASON_INTERRUPTED)
    server = ScriptedServer(
        says(STARTED, prompt_logprobs(-1.0), interrupted),
        says(STARTED, prompt_logprobs(-2.0), interrupted),
        says(STARTED, tokens(99), finished(1)),
    )
    request = RequestContext(
        request_id="r", session_id="", deadline=math.inf, prompt_logprobs_from=1
    )
    async with serving(server) as addresses, connect(addresses) as generator:
        completion = await generator.generate((1, 2, 3), PARAMS, request=request)
    assert completion.prompt_logprobs == (-1.0, -2.0)
    asked = [sent.prompt_logprobs_from for sent in server.requests]
    assert asked == [1, 2, 0] and not server.requests[2].HasField("prompt_logprobs_from")


async def test_a_constrained_completion_is_not_resumed() -> None:
    """The constraint would begin anew after the tokens that arrived."""
    server = ScriptedServer(
        says(STARTED, finished(0, pb.FINISH_REASON_INTERRUPTED)),
        says(STARTED, tokens(4), finished(1, pb.FINISH_REASON_INTERRUPTED)),
    )
    params = replace(PARAMS, constraint=JsonConstraint(schema="{}"))
    async with serving(server) as addresses, connect(addresses) as generator:
        with pytest.raises(ReplicaUnavailableError, match="interrupted after 1 tokens"):
            await ask(generator, params)
    assert [sent.constraint.json_schema for sent in server.requests] == ["{}", "{}"]


async def test_a_constraint_of_tags_is_sent_whole() -> None:
    server = ScriptedServer(says(STARTED, tokens(4), finished(1)))
    tag = Tag(begin="<f ", schema="{}", end=">")
    constraint = TagConstraint(tags=(tag,), trigger="<", required=True)
    async with serving(server) as addresses, connect(addresses) as generator:
        await ask(generator, replace(PARAMS, constraint=constraint))
    wanted = pb.Tag(begin="<f ", json_schema="{}", end=">")
    assert server.requests[0].constraint.tagged == pb.TaggedText(
        tags=[wanted], trigger="<", required=True
    )


async def test_calls_that_begin_later_need_the_weights_that_are_required_by_then() -> None:
    interrupted = pb.FINISH_REASON_INTERRUPTED
    behind = fails(grpc.StatusCode.FAILED_PRECONDITION, "WEIGHT_VERSION_BEHIND")
    generator: GrpcTokenGenerator

    async def updated(_: pb.GenerateRequest, __: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Is interrupted by an update, and started again with old weights."""
        for event in (STARTED, tokens(4), finished(1, interrupted)):
            yield event
        generator.require_weights(2)

    first = ScriptedServer(updated, behind)
    second = ScriptedServer(says(STARTED, tokens(99, version=2), finished(1)))
    async with serving(first, second) as addresses, connect(addresses) as generator:
        completion = await ask(generator)
    assert [(c.token_ids, c.weight_version) for c in completion.chunks] == [((4,), 1), ((99,), 2)]
    asked = [sent.min_weight_version for sent in (*first.requests, *second.requests)]
    assert asked == [0, 2, 2]


async def test_endless_interruptions_are_an_error() -> None:
    again = says(STARTED, finished(0, pb.FINISH_REASON_INTERRUPTED))
    server = ScriptedServer(again, again, again)
    async with serving(server) as addresses, connect(addresses, max_resumes=2) as generator:
        with pytest.raises(ReplicaUnavailableError, match="interrupted 3 times; max_resumes is 2"):
            await ask(generator)


async def test_overload_is_waited_for_as_long_as_the_server_says() -> None:
    clock = FakeClock()
    busy = fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", retry_after_s=7.0)
    server = ScriptedServer(*[busy] * 5, says(STARTED, tokens(99), finished(1)))
    policy = RetryPolicy(max_failures=1, jitter=0.0, max_s=3.0)
    async with (
        serving(server) as addresses,
        connect(addresses, clock=clock, retry=policy) as generator,
    ):
        call = asyncio.create_task(ask(generator))
        for _ in range(5):
            await clock.until_sleeping(1)
            await clock.advance(7.0)
        assert (await call).token_ids == (99,)
    assert clock.slept == [7.0] * 5


async def test_when_no_replica_is_left_all_are_named() -> None:
    clock = FakeClock()
    dead = [fails(grpc.StatusCode.UNAVAILABLE, None)] * 2
    first, second = ScriptedServer(*dead), ScriptedServer(*dead)
    policy = RetryPolicy(max_failures=2, jitter=0.0)
    async with (
        serving(first, second) as addresses,
        connect(addresses, clock=clock, retry=policy) as generator,
    ):
        call = asyncio.create_task(ask(generator))
        await clock.until_sleeping(1)
        await clock.advance(10.0)
        with pytest.raises(ReplicaUnavailableError, match="no replica is left") as caught:
            await call
        assert all(address in str(caught.value) for address in addresses)
    assert len(first.requests) == len(second.requests) == 2


async def test_a_resting_replica_gets_no_session_until_it_has_rested() -> None:
    clock = FakeClock()
    good = says(STARTED, tokens(99), finished(1))
    first = ScriptedServer(fails(grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN"), good)
    second = ScriptedServer(*[good] * 4)
    async with serving(first, second) as addresses, connect(addresses, clock=clock) as generator:
        for i in range(3):
            await ask(generator, session=f"s{i}")
        assert (len(first.requests), len(second.requests)) == (1, 3)
        await clock.advance(10.0)
        await ask(generator, session="new")
    assert len(first.requests) == 2


async def test_a_refusal_moves_nobody_else() -> None:
    """The other sessions' prefixes are cached at the busy replica; only the refused one leaves."""
    good = says(STARTED, tokens(99), finished(1))
    busy = fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    servers = ScriptedServer(good, busy, good), ScriptedServer(good, good, good)
    async with serving(*servers) as addresses, connect(addresses) as generator:
        for session in ("a", "b", "c", "a"):
            await ask(generator, session=session)
    assert [r.session_id for r in servers[0].requests] == ["a", "c", "a"]
    assert [r.session_id for r in servers[1].requests] == ["b", "c"]


async def test_a_session_stays_where_it_is_and_frees_its_place() -> None:
    good = says(STARTED, tokens(99), finished(1))
    servers = ScriptedServer(*[good] * 7), ScriptedServer(*[good] * 3)
    async with serving(*servers) as addresses, connect(addresses) as generator:
        for session in ("a", "a", "a", "b", "c", "d"):
            await ask(generator, session=session)
        for session in ("a", "a", "c"):
            generator.finish_session(session)
        for session in ("e", "f", "g"):
            await ask(generator, session=session)
    assert [r.session_id for r in servers[0].requests] == ["a", "a", "a", "c", "e", "f"]
    assert [r.session_id for r in servers[1].requests] == ["b", "d", "g"]


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG", PromptTooLongError),
        (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", RequestRejectedError),
        (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", RequestRejectedError),
    ],
)
async def test_what_cannot_change_is_raised_at_once(
    code: grpc.StatusCode, reason: str, error: type[Exception]
) -> None:
    first, second = ScriptedServer(fails(code, reason)), ScriptedServer(fails(code, reason))
    async with serving(first, second) as addresses, connect(addresses) as generator:
        with pytest.raises(error, match=rf"127\.0\.0\.1:\d+: {code.name} {reason}: scripted"):
            await ask(generator)
    assert len(first.requests) + len(second.requests) == 1


class Hanging:
    """A call that never ends by itself, and notes how it did end."""

    def __init__(self) -> None:
        self.began, self.cancelled = asyncio.Event(), asyncio.Event()

    async def __call__(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            yield STARTED
            self.began.set()
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


async def test_the_deadline_ends_the_call_on_both_sides() -> None:
    hanging = Hanging()
    server = ScriptedServer(*[hanging] * 8)
    seconds = 0.5
    async with serving(server) as addresses, connect(addresses) as generator:
        while not hanging.began.is_set():  # a call on a busy machine may end before it arrives
            with pytest.raises(GenerationTimeoutError, match="the deadline passed"):
                await ask(generator, deadline=asyncio.get_running_loop().time() + seconds)
            seconds *= 2
        await hanging.cancelled.wait()


async def test_a_deadline_that_has_passed_sends_nothing() -> None:
    server = ScriptedServer()
    async with serving(server) as addresses, connect(addresses) as generator:
        with pytest.raises(GenerationTimeoutError):
            await ask(generator, deadline=asyncio.get_running_loop().time())
    assert server.requests == []


async def test_cancelling_reaches_the_server() -> None:
    hanging = Hanging()
    async with serving(ScriptedServer(hanging)) as addresses, connect(addresses) as generator:
        call = asyncio.create_task(ask(generator))
        await hanging.began.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await hanging.cancelled.wait()


async def test_leaving_a_stream_early_cancels_it() -> None:
    """A broken promise ends the reading; without cancel the server would go on generating."""
    hanging = Hanging()

    async def broken(
        request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        yield tokens(4)
        async for event in hanging(request, context):
            yield event

    async with serving(ScriptedServer(broken)) as addresses, connect(addresses) as generator:
        with pytest.raises(ContractError, match="tokens came before started"):
            await ask(generator)
        await hanging.cancelled.wait()


async def test_servers_that_do_not_fit_are_refused_at_start() -> None:
    needs = Requirements(tokenizer_sha256=b"\x02", vocab_size=101, context_length=65)
    async with serving(ScriptedServer()) as addresses:
        with pytest.raises(SetupError) as caught:
            async with connect(addresses, requirements=needs):
                pass
    text = str(caught.value)
    assert "sha256 01, the renderer's has 02" in text
    assert "vocabulary has 100 ids, the renderer's 101" in text
    assert "holds 64 tokens, prompt and response need 65" in text


async def test_a_server_that_does_not_answer_is_named() -> None:
    async with serving(ScriptedServer()) as (address,):
        pass
    deadlines = RpcDeadlines(connect_s=0.0)
    with pytest.raises(SetupError, match=rf"does not answer \(1 calls\): {address}"):
        async with connect([address], deadlines=deadlines):
            pass


@pytest.mark.parametrize(
    ("addresses", "message"), [([], "no rollout server"), (["a:1", "a:1"], "given twice")]
)
async def test_a_list_of_servers_that_makes_no_sense(addresses: list[str], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        async with connect(addresses):
            pass


async def test_the_token_is_sent_and_never_in_plain_text() -> None:
    server = ScriptedServer(says(STARTED, tokens(99), finished(1)))
    security = ChannelSecurity(token="secret")
    async with (
        serving(server) as addresses,
        connect(addresses, security=security) as generator,
    ):
        await ask(generator)
    assert server.metadata[0]["authorization"] == "Bearer secret"
    with pytest.raises(SetupError, match="plain text"):
        async with connect(["example.org:1"], security=security):
            pass


async def test_many_calls_run_at_the_same_time() -> None:
    gate = asyncio.Event()
    waiting = asyncio.Semaphore(0)

    async def gated(
        request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        yield STARTED
        waiting.release()
        await gate.wait()
        yield tokens(99)
        yield finished(1)

    async with serving(ScriptedServer(*[gated] * 32)) as addresses, connect(addresses) as generator:
        calls: list[Awaitable[Completion]] = [
            asyncio.create_task(ask(generator, session=f"s{i}")) for i in range(32)
        ]
        for _ in range(32):
            await waiting.acquire()
        gate.set()
        assert all(c.token_ids == (99,) for c in await asyncio.gather(*calls))
