"""The methods of a server, which gRPC asks for by name.

Invariant: what is added last under a name serves it. Stands where generated code expects a server:
a server to which methods are registered keeps a task for each that waits for its next call,
and whatever call comes waits over all of these again. With our two dozen that is 30 microseconds a
call, a tenth of a short one.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import grpc

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stub only


class Methods(grpc.GenericRpcHandler):
    """Give it to `add_..._to_server` of every service, and then to the server."""

    def __init__(self) -> None:
        self._handlers: dict[str, _Handler] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Does nothing: generated code adds each method in both ways, and here one is enough."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, _Handler]
    ) -> None:
        """Adds methods of a service, instead of those that have their names."""
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "_Handler | None":
        """What serves a call; None: nothing does."""
        return self._handlers.get(handler_call_details.method)
