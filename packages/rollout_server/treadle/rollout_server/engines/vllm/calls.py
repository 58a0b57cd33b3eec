"""Calls to vLLM, which does not answer once its processes have ended.

Who waits: every call waits for vLLM and for the end of its processes, whichever comes first.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from vllm.v1.engine.exceptions import EngineDeadError

from treadle.rollout_server.errors import EngineFailed, ShuttingDown

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
