"""The rollout server: calls of every method over real gRPC, with the fake engine.

A part is a call or a message of one: its head is `METHOD TOKEN`, where the token is `right`,
`wrong` or `none`; consecutive parts with the same head are one stream, if the method takes one. The
body is the message's bytes.
"""

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from fuzz.inputs import Input
from fuzz.target import AsyncTarget, Fell
from google.rpc import error_details_pb2, status_pb2

from treadle.rollout.v1 import errors_pb2
from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout_server.config.schema import SecurityConfig, ServerConfig, WeightsConfig
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.services.testing import MODEL, PARAMETERS, want
from treadle.rollout_server.testing import serve_in_process

TOKEN = "right"
_STREAMS = ("GenerateMany", "PushWeights", "PushBuckets", "ServerReflectionInfo")
_GENERATION = "/treadle.rollout.v1.GenerationService/"
_SERVER = "/treadle.rollout.v1.ServerService/"
_WEIGHTS = "/treadle.rollout.v1.WeightSyncService/"
_NAMES = {
    _GENERATION: ("Generate", "GenerateMany"),
    _SERVER: ("GetServerInfo", "Pause", "Resume", "ReleaseMemory", "RestoreMemory"),
    _WEIGHTS: (
        *("BeginUpdate", "PushWeights", "PushBuckets", "GetUpdate", "CommitUpdate"),
        "AbortUpdate",
    ),
    "/grpc.health.v1.Health/": ("Check", "Watch"),
    "/grpc.reflection.v1alpha.ServerReflection/": ("ServerReflectionInfo",),
}
METHODS = tuple(service + name for service, names in _NAMES.items() for name in names)
_DEADLINE_S = 20.0
_WATCH_S = 0.05  # It ends with its caller only.
# What the server may answer. DEADLINE_EXCEEDED is the client's own.
_STATUSES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.PERMISSION_DENIED,
}


class ContractTarget(AsyncTarget):
    """A rollout server."""

    promises = (
        "Every call ends with a status of the contract and a reason, never UNKNOWN or INTERNAL; a "
        "call without the token with UNAUTHENTICATED, whatever its bytes; then the server still "
        "serves and samples the same tokens; no trace is logged."
    )
    form = "protobuf"
    heads = tuple(f"{method} {token}" for method in METHODS for token in ("right", "none", "wrong"))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        with tempfile.TemporaryDirectory() as folder:
            token_file = Path(folder, "token")
            token_file.write_text(TOKEN)  # noqa: ASYNC240
            root = Path(folder, "weights")
            root.mkdir()  # noqa: ASYNC240
            config = ServerConfig(
                security=SecurityConfig(token_file=token_file),
                weights=WeightsConfig(directory=root),
                max_request_bytes=4 << 20,
            )
            engine = FakeEngine(
                model=MODEL, parameters=PARAMETERS, clock=asyncio.get_running_loop()
            )
            async with (
                serve_in_process(engine, config=config) as server,
                grpc.aio.insecure_channel(server.address) as channel,
            ):
                self._channel = channel
                self._tokens = await self._sample()
                yield

    async def give(self, parts: Input) -> None:
        for head, messages in itertools.groupby(parts, key=lambda part: part.head):
            method, _, token = head.partition(" ")
            bodies = [message.body for message in messages]
            if method.rpartition("/")[2] in _STREAMS:
                await self._call(method, token, bodies)
                continue
            for body in bodies:
                await self._call(method, token, [body])
        info = await self._info()
        if info.state == srv.SERVER_STATE_SERVING and info.weight_version == 0:
            if (tokens := await self._sample()) != self._tokens:
                raise Fell(f"the server sampled {self._tokens} before, and now {tokens}")
            self.reset = False

    async def _call(self, method: str, token: str, messages: Sequence[bytes]) -> None:
        call: Any = self._channel.stream_stream(method)
        metadata = () if token == "none" else (("authorization", f"Bearer {token}"),)
        timeout = _WATCH_S if method.endswith("Watch") else _DEADLINE_S
        running = call(iter_of(messages), metadata=metadata, timeout=timeout)
        try:
            async for _ in running:
                pass
        except grpc.aio.AioRpcError as error:
            if is_of_client(error):
                return
            check_status(method, error, ours=method.startswith("/treadle.rollout."))
        code = await running.code()
        open_to_all = method.startswith("/grpc.health") or method not in METHODS
        if token != TOKEN and not open_to_all and code is not grpc.StatusCode.UNAUTHENTICATED:
            raise Fell(f"{method} ended with {code.name} for a caller without the token")

    async def _info(self) -> srv.GetServerInfoResponse:
        ask = self._channel.unary_unary(
            f"{_SERVER}GetServerInfo",
            request_serializer=srv.GetServerInfoRequest.SerializeToString,
            response_deserializer=srv.GetServerInfoResponse.FromString,
        )
        request = srv.GetServerInfoRequest()
        info: srv.GetServerInfoResponse = await ask(request, metadata=_OWN, timeout=_DEADLINE_S)
        return info

    async def _sample(self) -> list[int]:
        ask = self._channel.unary_stream(
            f"{_GENERATION}Generate",
            request_serializer=gen.GenerateRequest.SerializeToString,
            response_deserializer=gen.GenerateResponse.FromString,
        )
        events = ask(want(), metadata=_OWN, timeout=_DEADLINE_S)
        return [i async for event in events for i in event.tokens.token_ids]


_OWN = (("authorization", f"Bearer {TOKEN}"),)


async def iter_of(messages: Sequence[bytes]) -> AsyncIterator[bytes]:
    """The messages of a stream."""
    for message in messages:
        yield message


def is_of_client(error: grpc.aio.AioRpcError) -> bool:
    """Whether the client made the status itself: the server's came while it wrote.

    https://github.com/grpc/grpc/issues/36066
    """
    internal = error.code() is grpc.StatusCode.INTERNAL
    return internal and "Internal error from Core" in str(error.details())


def check_status(method: str, error: grpc.aio.AioRpcError, *, ours: bool) -> None:
    """Checks that a failed call has a status of the contract, with a reason if it is ours.

    Raises:
        Fell: It has not.
    """
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and method.endswith("Watch"):
        return
    if code not in _STATUSES:
        raise Fell(f"{method} ended with {code.name}: {error.details()}")
    trailers = dict(error.trailing_metadata() or ())
    raw = trailers.get("grpc-status-details-bin")
    if raw is None:
        if ours and code is not grpc.StatusCode.UNIMPLEMENTED:
            raise Fell(f"{method} ended with {code.name} and no reason: {error.details()}")
        return
    first = status_pb2.Status.FromString(bytes(raw)).details[0]
    reason = error_details_pb2.ErrorInfo()
    first.Unpack(reason)
    if f"ERROR_REASON_{reason.reason}" not in errors_pb2.ErrorReason.keys():  # noqa: SIM118
        raise Fell(f"{method} ended with the reason {reason.reason!r}, which the contract lacks")
