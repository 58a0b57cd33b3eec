"""A rollout server that someone else started: it is sampled from, and neither started nor ended.

Invariant: nothing here changes the server's weights or state. When it dies, the trajectories in
flight fail with that cause.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

from treadle.agent_loop import StickySession
from treadle.agent_loop.rpc import (
    GrpcTokenGenerator,
    Requirements,
    RpcDeadlines,
    ServerInfo,
    connect,
)
from treadle.trainer.config.schema import Config
from treadle.trainer.rollout.rotation import Routes
from treadle.trainer.rollout.server_security import server_security

__all__ = ["AttachedServer", "UnmanagedServer"]


class UnmanagedServer:
    """The one route to a server that the run neither starts, replaces nor ends."""

    def __init__(self, address: str) -> None:
        self._address = address

    def on_change(self, listener: Callable[[Routes], None]) -> Callable[[], None]:
        """Calls the listener with the one route, which never changes."""
        listener(Routes(serving=(self._address,)))
        return lambda: None

    async def ensure_healthy(self) -> bool:
        """Returns False: a server of someone else is not restarted."""
        return False

    async def wait_for_change(self) -> None:
        """Never returns: there is nothing to replace."""
        await asyncio.Event().wait()

    async def wait_until_all_ended(self) -> None:
        """Never returns: the server's process is not ours to watch."""
        await asyncio.Event().wait()


class AttachedServer(UnmanagedServer):
    """A server at a given address, as the servers of a rollout."""

    _CONNECT_S: ClassVar[float] = 5.0
    """How long the handshake may take; the server runs already."""

    def __init__(self, address: str, config: Config) -> None:
        """Connects to nothing yet.

        Args:
            config: Has the credentials of the server (`rollout.tls_*`, `rollout.token_file`).
        """
        super().__init__(address)
        self._config = config
        self._connection = contextlib.AsyncExitStack()
        self._generator: GrpcTokenGenerator | None = None

    async def __aenter__(self) -> Self:
        """Connects to nothing yet."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Closes the connection."""
        await self._connection.aclose()

    async def connect(self, requirements: Requirements) -> None:
        """Connects to the server.

        Raises:
            SetupError: It does not answer, or its tokenizer, vocabulary, context or capabilities do
                not fit.
        """
        rollout = self._config.rollout
        self._generator = await self._connection.enter_async_context(
            connect(
                [self._address],
                requirements=requirements,
                security=server_security(rollout).read(),
                policy=StickySession(cache_tokens=rollout.cache_tokens),
                deadlines=RpcDeadlines(connect_s=self._CONNECT_S),
            )
        )

    @property
    def generator(self) -> GrpcTokenGenerator:
        """Samples on the server. Needs `connect`."""
        assert self._generator is not None, "it was not connected"
        return self._generator

    @property
    def live(self) -> Sequence[ServerInfo]:
        """The server's answer at the handshake."""
        return self.generator.servers
