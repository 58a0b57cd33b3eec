"""Calls to vLLM, which does not answer once its processes have ended.

Who waits: every call waits for vLLM and for the end of its processes, whichever comes first.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from vllm.v1.engine.exceptions import EngineDeadError

from treadle.rollout_server.engine import CollectiveGroup
from treadle.rollout_server.engines.common.collective_group import fail_group
from treadle.rollout_server.errors import CollectiveBroken, EngineFailed, ShuttingDown

T = TypeVar("T")


class Calls:
    """Awaits vLLM; created in the event loop that waits.

    Args:
        engine: Name of the engine, for errors.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._ended: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def end(self, cause: Exception) -> bool:
        """Wakes all calls, which then raise the cause; returns whether it is the first one."""
        if first := not self._ended.done():
            self._ended.set_result(cause)
        return first

    async def wait_ended(self) -> Exception:
        """Waits for `end` and returns its cause."""
        return await asyncio.shield(self._ended)

    async def __call__(self, operation: Coroutine[Any, Any, T]) -> T:
        """Awaits one operation.

        Raises:
            EngineFailed: vLLM's processes have ended.
            ShuttingDown: The engine is closed.
        """
        call = asyncio.ensure_future(operation)
        try:
            either: set[asyncio.Future[Any]] = {call, self._ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not call.done():
                call.cancel()
        if not call.done() or isinstance(call.exception(), EngineDeadError):
            cause = await self._ended
            raise cause if isinstance(cause, ShuttingDown) else EngineFailed(self._engine, cause)
        return call.result()

    async def whole(self, operation: Coroutine[Any, Any, T]) -> T:
        """Awaits an operation of the workers, which completes even if the caller is cancelled.

        Raises:
            EngineFailed: It failed, or vLLM's processes have ended.
        """
        call = asyncio.ensure_future(self(operation))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait({call})
            raise
        except EngineFailed:
            raise
        except Exception as error:
            raise EngineFailed(self._engine, error) from error

    async def receive(
        self, group: CollectiveGroup, operation: Coroutine[Any, Any, list[str]]
    ) -> None:
        """Awaits workers that take part in a group, and ends the group if the caller is cancelled.

        Args:
            operation: Returns for each worker why the group ended early; "" on success.

        Raises:
            CollectiveBroken: The group ended early; the weights are a mixture.
            EngineFailed: A worker could not write what it received.
        """
        call = asyncio.ensure_future(operation)
        try:
            causes = await asyncio.shield(call)
        except asyncio.CancelledError:
            # The workers process no messages while they receive.
            await asyncio.to_thread(fail_group, group, "the update was given up")
            await asyncio.wait({call})
            # A worker that could not write ended the group before it said so: this is the cause.
            if (error := call.exception()) is not None:
                raise error from None
            raise
        if any(causes):
            raise CollectiveBroken(max(causes))
