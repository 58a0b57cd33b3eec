"""The router: calls of every method over real gRPC; heads and bodies as for the contract."""

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from fuzz.inputs import Input
from fuzz.target import AsyncTarget, Fell
from fuzz.targets.contract import TOKEN, check_status, is_of_client, iter_of

from treadle.agent_loop.rpc.router.server import RouterConfig, serve_router
from treadle.rollout.v1 import routing_service_pb2 as pb

_ROUTING = "/treadle.rollout.v1.RoutingService/"
METHODS = tuple(
    _ROUTING + name
    for name in (
        *("OpenSession", "FinishSession", "RegisterReplica", "DrainReplica", "RemoveReplica"),
        *("ListReplicas", "OpenSessions", "FinishSessions"),
    )
)
REPLICAS = ("10.0.0.1:4000", "10.0.0.2:4000")
_DEADLINE_S = 20.0
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, None)  # None: the client made a status itself.
_OWN = (("authorization", f"Bearer {TOKEN}"),)


class RouterTarget(AsyncTarget):
    """A router with two replicas."""

    promises = (
        "Every call ends with a status of the contract and a reason; without the token with "
        "UNAUTHENTICATED. Then a session still gets a replica, the replicas are addresses, and "
        "the state file can be read by the next router. No trace is logged."
    )
    form = "protobuf"
    heads = tuple(f"{method} {token}" for method in METHODS for token in ("right", "none"))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        with tempfile.TemporaryDirectory() as folder:
            self._state = Path(folder, "state.json")
            # Calls that find no room are refused at once.
            config = RouterConfig(
                replicas=REPLICAS, state_file=self._state, token=TOKEN, hold_s=0.01
            )
            async with (
                serve_router(config) as address,
                grpc.aio.insecure_channel(address) as channel,
            ):
                self._channel = channel
                yield

    async def give(self, parts: Input) -> None:
        for part in parts:
            method, _, token = part.head.partition(" ")
            code = await self._call(method, token, part.body)
            if token != TOKEN and method in METHODS and code not in _REFUSED:
                raise Fell(f"{method} ended with {code} for a caller without the token")
        await self._check_state()

    async def _call(self, method: str, token: str, message: bytes) -> grpc.StatusCode | None:
        metadata = () if token == "none" else (("authorization", f"Bearer {token}"),)
        call: Any = self._channel.stream_stream(method)
        running = call(iter_of([message]), metadata=metadata, timeout=_DEADLINE_S)
        try:
            async for _ in running:
                pass
        except grpc.aio.AioRpcError as error:
            if is_of_client(error):
                return None
            check_status(method, error, ours=method in METHODS)
        code: grpc.StatusCode = await running.code()
        return code

    async def _check_state(self) -> None:
        listed = await self._ask("ListReplicas", pb.ListReplicasRequest(), pb.ListReplicasResponse)
        there = [replica.address for replica in listed.replicas]
        if self._state.exists():
            async with serve_router(RouterConfig(state_file=self._state)) as address:
                if not address:
                    raise Fell("the next router does not serve")
        if not set(there) <= set(REPLICAS):
            return  # Another one was added: the next input gets a new router.
        self.reset = there != list(REPLICAS) or any(replica.draining for replica in listed.replicas)
        if not self.reset:
            request = pb.OpenSessionRequest(session_id="after", context_tokens=1)
            opened = await self._ask("OpenSession", request, pb.OpenSessionResponse)
            if opened.address not in REPLICAS:
                raise Fell(f"a session was sent to {opened.address!r}")
            self.reset = sum(replica.open_sessions for replica in listed.replicas) > 1000

    async def _ask(self, name: str, request: Any, kind: Any) -> Any:
        ask = self._channel.unary_unary(
            _ROUTING + name,
            request_serializer=type(request).SerializeToString,
            response_deserializer=kind.FromString,
        )
        return await ask(request, metadata=_OWN, timeout=_DEADLINE_S)
