from types import SimpleNamespace
from typing import Any, cast

import grpc

from treadle.rollout_server.services.methods import Methods


def test_what_is_added_last_under_a_name_serves_it() -> None:
    async def answer(request: object, context: object) -> object:
        return request

    handlers: list[Any] = [
        grpc.unary_unary_rpc_method_handler(cast("Any", answer)) for _ in range(3)
    ]
    first, second, other = handlers
    methods = Methods()
    methods.add_registered_method_handlers("x.Y", {"A": first, "B": other})
    methods.add_registered_method_handlers("x.Y", {"A": second})

    def found(method: str) -> object:
        details: Any = SimpleNamespace(method=method, invocation_metadata=())
        return methods.service(details)

    assert [found(f"/x.Y/{name}") for name in "ABC"] == [second, other, None]
