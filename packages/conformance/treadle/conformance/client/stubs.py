"""The gRPC stubs of one server."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio

from treadle.conformance.client.request_stream import RequestStream
from treadle.rollout.v1.generation_service_pb2_grpc import GenerationServiceStub
from treadle.rollout.v1.server_service_pb2_grpc import ServerServiceStub
from treadle.rollout.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub

_SENDS_STREAM = (grpc.aio.StreamUnaryMultiCallable, grpc.aio.StreamStreamMultiCallable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stubs:
    """The stubs of a server; `Any`, because generated stubs have no types."""

    generation: Any
    weights: Any
    control: Any


def stubs_for(
    channel: grpc.aio.Channel | grpc.Channel, metadata: tuple[tuple[str, str], ...] = ()
) -> Stubs:
    """Returns the stubs on a channel, which send `metadata` with every call."""
    return Stubs(
        generation=_Sending(GenerationServiceStub(channel), metadata),
        weights=_Sending(WeightSyncServiceStub(channel), metadata),
        control=_Sending(ServerServiceStub(channel), metadata),
    )


class _Sending:
    """A stub whose calls carry metadata and keep the server's status."""

    def __init__(self, stub: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._stub = stub
        self._metadata = metadata

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)
        call = partial(method, metadata=self._metadata) if self._metadata else method
        if isinstance(method, _SENDS_STREAM):
            return lambda *args, **kwargs: RequestStream(call(*args, **kwargs))
        return call
