"""The gRPC client of the rollout servers: a `TokenGenerator` over several replicas.

Only this folder may import gRPC and protobuf. Policies that choose a replica belong in `routing/`.

    async with connect(["127.0.0.1:4000", "127.0.0.1:4001"]) as generator:
        services = Services(generator=generator, ...)
"""

from treadle.agent_loop.rpc.client import GrpcTokenGenerator, connect
from treadle.agent_loop.rpc.handshake import Requirements, ServerInfo
from treadle.agent_loop.rpc.replica_client import RpcDeadlines
from treadle.agent_loop.rpc.retry import RetryPolicy
from treadle.agent_loop.rpc.security import ChannelSecurity

__all__ = [
    "ChannelSecurity",
    "GrpcTokenGenerator",
    "Requirements",
    "RetryPolicy",
    "RpcDeadlines",
    "ServerInfo",
    "connect",
]
