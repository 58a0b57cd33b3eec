"""The methods of the contract, `treadle.policy.v1`, found by their requests.

A method is `/SERVICE/NAME`, its messages are `NAMERequest` and `NAMEResponse`. Driver and rank
treat all of them alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.message import Message

from treadle.policy.v1 import (
    checkpoint_service_pb2,
    rank_service_pb2,
    training_service_pb2,
    weights_service_pb2,
)

__all__ = ["METHODS", "Method", "method_of", "verb"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method of the contract."""

    service: str
    name: str
    request: type[Any]
    response: type[Any]
    streams: bool

    @property
    def path(self) -> str:
        """As gRPC names it."""
        return f"/{self.service}/{self.name}"


METHODS: Final[Mapping[type[Any], Method]] = MappingProxyType(
    {
        (request := message_factory.GetMessageClass(method.input_type)): Method(
            service=service.full_name,
            name=method.name,
            request=request,
            response=message_factory.GetMessageClass(method.output_type),
            streams=method.client_streaming or method.server_streaming,
        )
        for file in (
            checkpoint_service_pb2,
            rank_service_pb2,
            training_service_pb2,
            weights_service_pb2,
        )
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
)
"""By the class of the request."""


def method_of(request: Message) -> Method:
    """Returns the method that takes a request."""
    return METHODS[type(request)]


def verb(request: Message) -> str:
    """Returns the name of a request's method, for a message."""
    return method_of(request).name
