"""Images over real gRPC, in front of the fake engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from treadle.conformance.client.stubs import stubs_for
from treadle.rollout.v1 import errors_pb2
from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import (
    EngineCapabilities,
    EngineInfo,
    EngineRequest,
    ModelInfo,
    PromptImage,
)
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.errors import (
    CapabilityMissing,
    ImageUnreadable,
    InvalidField,
    PlaceholderMismatch,
    PromptTooLong,
)
from treadle.rollout_server.services.codec import decode_generate
from treadle.rollout_server.testing import serve_in_process

MODEL = ModelInfo(architecture="fake", vocab_size=64, context_length=256)
PNG = b"\x89PNG\r\n\x1a\n"


def want(*images: gen.PromptImage) -> gen.GenerateRequest:
    return gen.GenerateRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 9, 9, 9, 3, 9, 4],
        sampling=gen.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
        logprob_mode=gen.LOGPROB_MODE_NONE,
        images=images,
    )


def image(data: bytes = PNG, start: int = 2, count: int = 3, **fields: Any) -> gen.PromptImage:
    values = {"media_type": "image/png"} | fields
    return gen.PromptImage(data=data, first_placeholder=start, num_placeholders=count, **values)


def info(**capabilities: bool) -> EngineInfo:
    return EngineInfo(
        name="e", version="1", model=MODEL, capabilities=EngineCapabilities(**capabilities)
    )


def decode(*images: gen.PromptImage, sees: bool = True) -> EngineRequest:
    return decode_generate(want(*images), info(images=sees))


def test_places_and_bytes_arrive_as_they_were_sent() -> None:
    jpeg = image(b"\xff\xd8\xff\xe0", 6, 1, media_type="image/jpeg")
    assert decode(image(), jpeg).images == (
        PromptImage(data=PNG, media_type="image/png", start=2, num_tokens=3),
        PromptImage(data=b"\xff\xd8\xff\xe0", media_type="image/jpeg", start=6, num_tokens=1),
    )


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([image(media_type="video/mp4")], r"images\[0\].media_type is 'video/mp4'.*video is not s"),
        ([image(media_type="image/bmp")], r"media_type is 'image/bmp', expected one of image/png"),
        ([image(count=0)], r"images\[0\].num_placeholders is 0, expected at least 1"),
        ([image(start=6)], r"images\[0\].first_placeholder is 6, expected from 0 .* to 5"),
        ([image(), image(start=4)], r"images\[1\].first_placeholder is 4, expected from 5"),
    ],
)
def test_what_is_not_accepted_names_its_place(images: list[gen.PromptImage], message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        decode(*images)


@pytest.mark.parametrize(
    ("data", "media_type", "message"),
    [
        (b"", "image/png", "it begins with no byte"),
        (b"\xff\xd8\xff\xe0", "image/png", "it begins with ff d8 ff e0"),
        (b"RIFF\0\0\0\0AVI ", "image/webp", "52 49 46 46 00 00 00 00 41 56 49 20"),
    ],
)
def test_bytes_of_another_kind_are_refused(data: bytes, media_type: str, message: str) -> None:
    with pytest.raises(ImageUnreadable, match=message) as caught:
        decode(image(), image(data, start=5, count=1, media_type=media_type))
    assert caught.value.image_index == 1


def test_a_prompt_that_is_far_too_long_is_refused_before_its_ids_are_looked_at() -> None:
    request = want()
    request.prompt_token_ids[:] = [MODEL.vocab_size] * MODEL.context_length
    with pytest.raises(PromptTooLong, match="256"):
        decode_generate(request, info(images=True))


def test_an_engine_without_vision_takes_no_image() -> None:
    with pytest.raises(CapabilityMissing, match="lacks 'images'"):
        decode(image(), sees=False)
    assert decode(sees=False).images == ()


class MiscountingEngine(FakeEngine):
    """Finds every number of placeholders wrong."""

    async def generate(self, request: EngineRequest) -> Any:
        placed = request.images[0]
        raise PlaceholderMismatch(0, placed.start, placed.num_tokens, 12)
        yield


@asynccontextmanager
async def serving(kind: type[FakeEngine] = FakeEngine) -> AsyncIterator[Any]:
    engine = kind(model=MODEL, clock=asyncio.get_running_loop())
    config = ServerConfig(max_request_bytes=8 << 20)
    async with (
        serve_in_process(engine, config=config) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield stubs_for(channel)


async def sampled(stubs: Any, request: gen.GenerateRequest) -> list[int]:
    messages = [message async for message in stubs.generation.Generate(request, timeout=60)]
    return [i for message in messages for i in message.tokens.token_ids]


@pytest.mark.asyncio
async def test_the_handshake_says_so_and_how_large_a_request_may_be() -> None:
    async with serving() as stubs:
        told = await stubs.control.GetServerInfo(srv.GetServerInfoRequest(), timeout=60)
    assert told.capabilities.images
    assert told.limits.max_request_bytes == 8 << 20


@pytest.mark.asyncio
async def test_an_image_beyond_the_limit_of_grpc_reaches_the_engine() -> None:
    async with serving() as stubs:
        large = await sampled(stubs, want(image(PNG + bytes(6 << 20))))
        other = await sampled(stubs, want(image(PNG + bytes(6 << 20) + b"\1")))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sampled(stubs, want(image(PNG + bytes(8 << 20))))
    assert len(large) == len(other) == 8 and large != other
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "sent", "detail"),
    [
        (
            FakeEngine,
            image(b"GIF89a"),
            errors_pb2.ImageUnreadable(
                media_type="image/png", problem="it begins with 47 49 46 38 39 61"
            ),
        ),
        (
            MiscountingEngine,
            image(),
            errors_pb2.ImagePlaceholders(first_placeholder=2, received=3, expected=12),
        ),
    ],
)
async def test_refusals_are_typed_and_the_server_goes_on(
    kind: type[FakeEngine], sent: gen.PromptImage, detail: Any
) -> None:
    async with serving(kind) as stubs:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sampled(stubs, want(sent))
        told = await stubs.control.GetServerInfo(srv.GetServerInfoRequest(), timeout=60)
    status = rpc_status.from_call(caught.value)
    assert status is not None
    reason, received = error_details_pb2.ErrorInfo(), type(detail)()
    assert status.details[0].Unpack(reason) and status.details[1].Unpack(received)
    assert (caught.value.code(), received) == (grpc.StatusCode.INVALID_ARGUMENT, detail)
    assert reason.reason.startswith("IMAGE_")
    assert told.state == srv.SERVER_STATE_SERVING
