"""A real server in the process and event loop of the test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from treadle.rollout_server.clock import Clock
from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import Engine
from treadle.rollout_server.server import Server, serve


@asynccontextmanager
async def serve_in_process(
    engine: Engine, *, config: ServerConfig | None = None, clock: Clock | None = None
) -> AsyncIterator[Server]:
    """Serves `engine` on a free loopback port over real gRPC.

    Args:
        engine: The engine; closed at the end.
        config: Defaults to `ServerConfig()`; its `engine` is ignored.
        clock: Clock of leases and coalescing; by default the event loop.
    """

    async def factory(_: ServerConfig) -> Engine:
        return engine

    async with serve(config or ServerConfig(), factory=factory, clock=clock) as server:
        yield server
