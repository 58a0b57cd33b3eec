"""A tool that returns prepared results, and counts its sessions.

Invariant: calling a closed session, or closing a session twice, fails the test.
"""

import asyncio
from collections.abc import Iterable, Mapping

from treadle.agent_loop.tools.tool import ToolResult
from treadle.agent_loop.types import AgentTask, ToolSpec


class ScriptedTool:
    """Returns prepared results in the order of the calls, over all sessions.

    Args:
        results: Each a string, a `ToolResult`, an exception to raise, or an event to wait for
            (the result is then "done").

    Attributes:
        calls: The arguments of each call so far.
    """

    def __init__(
        self,
        name: str = "lookup",
        results: Iterable[str | ToolResult | Exception | asyncio.Event] = (),
    ) -> None:
        self.spec = ToolSpec(name=name, description=f"Scripted {name}.")
        self.calls: list[Mapping[str, object]] = []
        self.num_opened = 0
        self.num_closed = 0
        self._results = iter(tuple(results))
        self._called = asyncio.Condition()

    async def until_called(self, count: int) -> None:
        """Waits until at least `count` calls have come."""
        async with self._called:
            await self._called.wait_for(lambda: len(self.calls) >= count)

    async def open(self, task: AgentTask) -> "_ScriptedSession":
        """Opens a session."""
        self.num_opened += 1
        return _ScriptedSession(self)

    async def take(self, arguments: Mapping[str, object]) -> ToolResult:
        """Returns the next result of the script."""
        self.calls.append(arguments)
        async with self._called:
            self._called.notify_all()
        result = next(self._results, None)
        match result:
            case None:
                raise AssertionError(f"no result left for call {len(self.calls)}")
            case Exception():
                raise result
            case ToolResult():
                return result
            case asyncio.Event():
                await result.wait()
                return ToolResult(content="done")
            case _:
                return ToolResult(content=result)


class _ScriptedSession:
    def __init__(self, tool: ScriptedTool) -> None:
        self._tool = tool
        self._closed = False

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        assert not self._closed, "called after aclose"
        return await self._tool.take(arguments)

    async def aclose(self) -> None:
        assert not self._closed, "closed twice"
        self._closed = True
        self._tool.num_closed += 1
