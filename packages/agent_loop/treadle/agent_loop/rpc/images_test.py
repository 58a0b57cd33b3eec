"""Prompts with images, from the client to servers that follow a script."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from treadle.agent_loop import (
    Completion,
    Image,
    ImageRejectedError,
    PlacedImage,
    RequestContext,
    SamplingParams,
    SetupError,
)
from treadle.agent_loop.rpc import GrpcTokenGenerator, Requirements, connect
from treadle.agent_loop.rpc.testing import (
    STARTED,
    Context,
    ScriptedServer,
    fails,
    finished,
    says,
    serving,
    tokens,
)
from treadle.rollout.v1 import generation_service_pb2 as pb

pytestmark = pytest.mark.asyncio

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=(99,))
PLACED = (
    PlacedImage(image=Image(data=b"first", mime="image/png"), start=1, num_tokens=3),
    PlacedImage(image=Image(data=b"second", mime="image/jpeg"), start=5, num_tokens=1),
)


async def ask(generator: GrpcTokenGenerator, images: Sequence[PlacedImage] = PLACED) -> Completion:
    deadline = asyncio.get_running_loop().time() + 60
    request = RequestContext(request_id="r", session_id="s", deadline=deadline)
    return await generator.generate((1, 9, 9, 9, 2, 9, 3), PARAMS, request=request, images=images)


async def test_images_travel_as_bytes_with_their_places_also_when_a_completion_is_resumed() -> None:
    interrupted = finished(2, pb.FINISH_REASON_INTERRUPTED)
    server = ScriptedServer(
        says(STARTED, tokens(4, 5), interrupted),
        says(STARTED, tokens(99), finished(1)),
        images=True,
    )
    async with serving(server) as addresses, connect(addresses) as generator:
        completion = await ask(generator)
    assert completion.token_ids == (4, 5, 99)
    assert list(server.requests[1].prompt_token_ids) == [1, 9, 9, 9, 2, 9, 3, 4, 5]
    sent = [
        pb.PromptImage(
            data=b"first", media_type="image/png", first_placeholder=1, num_placeholders=3
        ),
        pb.PromptImage(
            data=b"second", media_type="image/jpeg", first_placeholder=5, num_placeholders=1
        ),
    ]
    assert [list(request.images) for request in server.requests] == [sent, sent]


async def test_a_server_without_vision_is_sent_no_image() -> None:
    server = ScriptedServer(says(STARTED, tokens(99), finished(1)))
    async with serving(server) as addresses, connect(addresses) as generator:
        with pytest.raises(ImageRejectedError, match=r"'scripted' with Test takes no images"):
            await ask(generator)
        assert not server.requests
        assert (await ask(generator, ())).token_ids == (99,)


async def test_a_blind_server_that_joins_while_a_completion_is_resumed_is_sent_no_image() -> None:
    sees = ScriptedServer(images=True)
    blind = ScriptedServer(says(STARTED, tokens(99), finished(1)))
    async with serving(sees, blind) as (first, second), connect([first]) as generator:

        async def fail_and_let_join(
            request: pb.GenerateRequest, context: Context
        ) -> AsyncIterator[pb.GenerateResponse]:
            yield STARTED
            await generator.add_replica(second)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

        sees.handlers.append(fail_and_let_join)
        with pytest.raises(ImageRejectedError, match=rf"{second}: .* takes no images"):
            await ask(generator)
    assert (len(sees.requests), len(blind.requests)) == (1, 0)


@pytest.mark.parametrize(
    ("name", "fix"), [("images", ""), ("sampling_mask", "top_p, top_k or min_p needs it: sample")]
)
async def test_the_handshake_can_ask_for_what_few_servers_can(name: str, fix: str) -> None:
    needs = Requirements(capabilities=frozenset({"sampled_logprobs", name}))
    async with serving(ScriptedServer()) as addresses:
        with pytest.raises(SetupError, match=f"lacks the capability '{name}'.*{fix}"):
            async with connect(addresses, requirements=needs):
                pass


async def test_a_request_that_the_server_would_not_take_is_not_sent() -> None:
    server = ScriptedServer(images=True)  # It names no size: 4 MiB.
    large = PlacedImage(image=Image(data=bytes(4 << 20), mime="image/webp"), start=1, num_tokens=3)
    async with serving(server) as addresses, connect(addresses) as generator:
        with pytest.raises(ImageRejectedError, match=r"1 images has 41\d{5} bytes; .* 4194304"):
            await ask(generator, (large,))
    assert not server.requests


@pytest.mark.parametrize("reason", ["IMAGE_UNREADABLE", "IMAGE_PLACEHOLDERS"])
async def test_a_refused_image_is_not_tried_again(reason: str) -> None:
    server = ScriptedServer(fails(grpc.StatusCode.INVALID_ARGUMENT, reason), images=True)
    async with serving(server) as addresses, connect(addresses) as generator:
        with pytest.raises(ImageRejectedError, match=reason):
            await ask(generator)
    assert len(server.requests) == 1
    assert not ImageRejectedError.retryable
