"""Plain gRPC stubs of one server's services."""

from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from treadle.rollout.v1.generation_service_pb2_grpc import GenerationServiceStub
from treadle.rollout.v1.server_service_pb2_grpc import ServerServiceStub
from treadle.rollout.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub


@dataclass(frozen=True, slots=True, kw_only=True)
class Stubs:
    """Generated stubs carry no types, hence `Any`.

    Attributes:
        generation: Of GenerationService.
        weights: Of WeightSyncService.
        control: Of ServerService.
    """

    generation: Any
    weights: Any
    control: Any


def stubs_for(channel: grpc.aio.Channel | grpc.Channel) -> Stubs:
    """The stubs on one channel."""
    return Stubs(
        generation=GenerationServiceStub(channel),  # type: ignore[no-untyped-call]
        weights=WeightSyncServiceStub(channel),  # type: ignore[no-untyped-call]
        control=ServerServiceStub(channel),  # type: ignore[no-untyped-call]
    )
