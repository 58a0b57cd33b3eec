"""The hand-over: device memory, lent by the servers to the policy while it trains.

    rollouts of the step have ended
      give            Pause, ReleaseMemory(KV cache, weights)
    optimizer steps
      take_weights    RestoreMemory(weights)        multi-stage; else of everything
    weight update, while paused
      take_rest       RestoreMemory(KV cache), Resume
    next rollout, or validation

Invariant: a server that has been given away samples nothing until it holds the new weights and all
of its memory; `asleep` are the servers between their `give` and the end of their `take_rest`.
Each move brings a server from wherever it stands to where the move ends, so it may be repeated
after a failure or a cancellation. An answer that got lost is asked for again; a server that still
fails leaves the rotation, since nobody knows what it holds. One that is started meanwhile has all
of its memory from the beginning and takes part in the update only.

A move waits for all servers at once, each bounded by `sync.commit_deadline_s` per call. The policy
does not wait for a server that has left: its memory went with its process.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from treadle.trainer.weight_sync.client import Memory, WeightSyncClient
from treadle.trainer.weight_sync.errors import Outcome, WeightSyncError

__all__ = ["HandOver", "Rotation"]

_EVERYTHING: tuple[Memory, ...] = ("kv_cache", "weights")


class Rotation(Protocol):
    """The part of `ReplicaSet` that is needed here."""

    @property
    def clients(self) -> Sequence[WeightSyncClient]:
        """Of the servers that serve."""
        ...

    async def drop(self, name: str, cause: str) -> None:
        """Takes a server out of the rotation and ends it."""
        ...


class HandOver:
    """Moves the servers of one run."""

    def __init__(
        self, rotation: Rotation, *, multi_stage: bool, interrupt: bool, max_attempts: int
    ) -> None:
        """Takes no server yet.

        Args:
            rotation: The servers, as they come and go.
            multi_stage: Whether the KV cache stays away during the update.
            interrupt: Whether completions still in flight are cut; else they end first.
            max_attempts: Of a call whose answer gets lost.
        """
        self._rotation = rotation
        self._back_first: tuple[Memory, ...] = ("weights",) if multi_stage else _EVERYTHING
        self._interrupt = interrupt
        self._max_attempts = max_attempts
        self._asleep: set[WeightSyncClient] = set()

    @property
    def asleep(self) -> frozenset[str]:
        """Names of the servers that do not hold all of their memory, or do not sample yet."""
        return frozenset(server.name for server in self._sleeping())

    async def give(self) -> None:
        """Stops all servers and has them release their memory.

        Raises:
            WeightSyncError: the servers cannot do that at all.
        """

        async def release(server: WeightSyncClient) -> None:
            await server.pause(interrupt=self._interrupt)
            await server.release_memory(_EVERYTHING)

        servers = list(self._rotation.clients)
        self._asleep.update(servers)
        await self._on_each(servers, release)

    async def take_weights(self) -> None:
        """Makes those that sleep ready for an update."""
        await self._on_each(
            self._sleeping(), lambda server: server.restore_memory(self._back_first)
        )

    async def take_rest(self) -> None:
        """Has those that sleep take everything back and sample again."""

        async def wake(server: WeightSyncClient) -> None:
            await server.restore_memory(_EVERYTHING)
            await server.resume()
            self._asleep.discard(server)

        await self._on_each(self._sleeping(), wake)

    def _sleeping(self) -> list[WeightSyncClient]:
        """Those of them that are still in the rotation; another client is another server."""
        serving = self._rotation.clients
        self._asleep.intersection_update(serving)
        return [server for server in serving if server in self._asleep]

    async def _on_each(
        self,
        servers: Sequence[WeightSyncClient],
        move: Callable[[WeightSyncClient], Awaitable[None]],
    ) -> None:
        results = await asyncio.gather(
            *(self._insist(server, move) for server in servers), return_exceptions=True
        )
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, WeightSyncError) and result.outcome is not Outcome.FATAL:
                await self._rotation.drop(server.name, str(result))
            elif result is not None:
                raise result

    async def _insist(
        self, server: WeightSyncClient, move: Callable[[WeightSyncClient], Awaitable[None]]
    ) -> None:
        """Makes the move, once more for each answer that got lost."""
        for attempt in range(self._max_attempts):
            try:
                return await move(server)
            except WeightSyncError as error:
                if error.outcome is not Outcome.RESUME or attempt + 1 == self._max_attempts:
                    raise
