"""Function tools of a catalogue: a plain function runs in processes that can be ended.

Invariant: a call that is cancelled is over, whatever the function does: code that holds the
interpreter's lock too. The function returns and raises to the loop what it does in its process;
an error other than `ToolFailure` becomes a `ToolError` with its file and line.

An `async` function runs on the loop, as the session of a tool with state does.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import isawaitable, iscoroutinefunction

from treadle.agent_loop import FunctionTool, ToolError, ToolFailure, ToolResult
from treadle.agent_loop.time_limited import TimeLimited, TimeLimitedError

_PROCESSES, _MOST_PROCESSES = 2, 32

_Answer = str | ToolResult | ToolFailure


def isolated(tool: FunctionTool, load: Callable[[], FunctionTool]) -> FunctionTool:
    """Returns a tool whose function runs in other processes, if it is a plain function.

    Args:
        load: Returns the tool in such a process; picklable.
    """
    if iscoroutinefunction(tool.function):
        return tool
    name = f"tool {tool.spec.name!r}"
    function: TimeLimited[Mapping[str, object], _Answer] = TimeLimited(
        partial(_answering, load), name=name, processes=_PROCESSES, most=_MOST_PROCESSES
    )

    async def call(**arguments: object) -> str | ToolResult:
        try:
            answer = await function(arguments)
        except TimeLimitedError as error:
            raise ToolError(f"{name}: {error}") from error
        if isinstance(answer, ToolFailure):
            raise answer
        return answer

    return replace(tool, function=call)


def _answering(load: Callable[[], FunctionTool]) -> Callable[[Mapping[str, object]], object]:
    function = load().function

    def answer(arguments: Mapping[str, object]) -> object:
        try:
            result = function(**arguments)
        except ToolFailure as failure:
            return failure
        return result if isinstance(result, ToolResult) or isawaitable(result) else str(result)

    return answer
