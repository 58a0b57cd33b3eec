"""Memory offload: the servers lend their device memory to the policy while it trains.

    rollouts of the step have ended
      sleep           Pause, ReleaseMemory(KV cache, weights)
    optimizer steps
      wake_weights    RestoreMemory(weights)        multi-stage; else RestoreMemory(everything)
    weight update, while paused
      wake_kv_cache   RestoreMemory(everything), Resume
    next rollout, or validation

Invariant: a server that sleeps samples nothing until it holds the new weights and all of its
memory; it sleeps from the start of `sleep` to the end of its `wake_kv_cache`.
Each move brings a server from any state to the state that the move ends in, so it may be repeated
after a failure or a cancellation. A call whose answer was lost is repeated. A server that still
fails leaves the rotation, since its state is unknown. A server that is restarted meanwhile has all
of its memory from the start and takes part in the update only.

A move waits for all servers at once, each bounded by `sync.commit_deadline_s` per call. The policy
does not wait for a server that has left: its memory went with its process.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

from treadle.policy.weight_sync.client import Memory, WeightSyncClient, with_retries
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError

__all__ = ["MemoryOffload", "ServersInRotation"]

_EVERYTHING: tuple[Memory, ...] = ("kv_cache", "weights")


class ServersInRotation(Protocol):
    """The part of `ServerPool` that is needed here."""

    @property
    def clients(self) -> Sequence[WeightSyncClient]:
        """The clients of the servers in the rotation."""
        ...

    async def remove(self, name: str, cause: str) -> None:
        """Takes a server out of the rotation and ends it."""
        ...


class MemoryOffload:
    """Releases and restores the device memory of a run's servers."""

    def __init__(
        self, rotation: ServersInRotation, *, multi_stage: bool, interrupt: bool, max_attempts: int
    ) -> None:
        """Calls no server yet.

        Args:
            rotation: The servers, as they come and go.
            multi_stage: Whether the KV cache stays released during the update.
            interrupt: Whether to interrupt in-flight completions; else they end first.
            max_attempts: Maximum number of calls when answers get lost.
        """
        self._rotation = rotation
        self._before_update: tuple[Memory, ...] = ("weights",) if multi_stage else _EVERYTHING
        self._interrupt = interrupt
        self._max_attempts = max_attempts
        self._sleeping: set[WeightSyncClient] = set()

    async def sleep(self) -> None:
        """Pauses all servers and makes them release their memory.

        Raises:
            WeightSyncError: The servers cannot do that at all.
        """

        async def release(server: WeightSyncClient) -> None:
            await server.pause(interrupt=self._interrupt)
            await server.release_memory(_EVERYTHING)

        servers = list(self._rotation.clients)
        self._sleeping.update(servers)
        await self._on_each(servers, release)

    async def wake_weights(self) -> None:
        """Makes the sleeping servers ready for an update."""
        await self._on_each(
            self._sleepers(), lambda server: server.restore_memory(self._before_update)
        )

    async def wake_kv_cache(self) -> None:
        """Restores the rest of the sleeping servers' memory, and lets them sample again."""

        async def wake(server: WeightSyncClient) -> None:
            await server.restore_memory(_EVERYTHING)
            await server.resume()
            self._sleeping.discard(server)

        await self._on_each(self._sleepers(), wake)

    def _sleepers(self) -> list[WeightSyncClient]:
        """Returns those that are still in the rotation; a restarted server has a new client."""
        serving = self._rotation.clients
        self._sleeping.intersection_update(serving)
        return [server for server in serving if server in self._sleeping]

    async def _on_each(
        self,
        servers: Sequence[WeightSyncClient],
        move: Callable[[WeightSyncClient], Awaitable[None]],
    ) -> None:
        results = await asyncio.gather(
            *(
                with_retries(partial(move, server), max_attempts=self._max_attempts)
                for server in servers
            ),
            return_exceptions=True,
        )
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, WeightSyncError) and result.outcome is not Outcome.FATAL:
                await self._rotation.remove(server.name, str(result))
            elif result is not None:
                raise result
