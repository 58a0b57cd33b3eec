"""Tools in both directions: LangChain tools as `Tool`s, and a trajectory's tools for LangChain.

Invariants:

1. However it is called, a tool runs in the trajectory's `Toolbox`, which applies timeout and
   limits, and records counts and rewards.
2. The model sees the same description on either side, key for key: `tool_spec` of a
   `TrajectoryTool` is the spec of the tool behind it.

The caller waits; a cancellation reaches the tool. LangChain runs a plain function on a thread,
where it cannot be cancelled, so a function that may take long should be `async`.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, ToolException
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field, ValidationError

from treadle.agent_loop.langgraph.messages import Content, read_content, write_content
from treadle.agent_loop.tools.tool import ToolFailure, ToolResult
from treadle.agent_loop.types import AgentTask, Message, ToolCall, ToolSpec

__all__ = ["LangChainTool", "TrajectoryTool", "tool_spec"]

AnswerCall: TypeAlias = Callable[[ToolCall], Awaitable[Message]]
"""Runs one call in the trajectory's toolbox."""


def tool_spec(tool: object) -> ToolSpec:
    """Returns the description for the model of anything that LangChain accepts as a tool.

    Args:
        tool: A `BaseTool`, a function, a pydantic model or an OpenAI function schema.

    Raises:
        ValueError: LangChain cannot describe it.
    """
    if isinstance(tool, TrajectoryTool):
        return tool.spec
    function = convert_to_openai_tool(cast(Any, tool))["function"]
    return ToolSpec(
        name=function["name"],
        description=function.get("description", ""),
        parameters=function.get("parameters", {"type": "object", "properties": {}}),
    )


@dataclass(frozen=True, slots=True)
class LangChainTool:
    """A LangChain tool as a `Tool`. It keeps no state, so it is its own session.

    Arguments that do not fit its schema, and a `ToolException`, are the model's fault. If a tool
    with `response_format="content_and_artifact"` has a `ToolResult` as its artifact, that is its
    result; so it can set a reward, or stop the trajectory.
    """

    tool: BaseTool

    @property
    def spec(self) -> ToolSpec:
        """The description for the model."""
        return tool_spec(self.tool)

    async def open(self, task: AgentTask) -> "LangChainTool":
        """Returns itself."""
        return self

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        """Calls the tool.

        Raises:
            ToolFailure: The arguments do not fit, or the tool raised a `ToolException`.
        """
        call = {"name": self.tool.name, "args": dict(arguments), "id": "", "type": "tool_call"}
        try:
            answer = await self.tool.ainvoke(call)
        except ToolException as error:
            raise ToolFailure(str(error)) from error
        except ValidationError as error:
            if error.title != _schema_title(self.tool):  # it concerns the tool's own data
                raise
            raise ToolFailure(_describe(error)) from error
        if not isinstance(answer, ToolMessage):
            raise TypeError(
                f"tool {self.tool.name!r} gave a {type(answer).__name__}; as part of a trajectory "
                "it has to give a text (a Command would change a graph, which it is not called by)"
            )
        if isinstance(answer.artifact, ToolResult):
            return answer.artifact
        text, images = read_content(cast(Content, answer.content))
        return ToolResult(content=text, images=images)

    async def aclose(self) -> None:
        """Does nothing; there is nothing to free."""


class TrajectoryTool(BaseTool):
    """A tool of a trajectory's toolbox as a LangChain tool; one per trajectory.

    Attributes:
        spec: The description for the model.
        answer: Runs a call in the toolbox.
    """

    spec: ToolSpec = Field(exclude=True)
    answer: AnswerCall = Field(exclude=True)

    @classmethod
    def of(cls, spec: ToolSpec, answer: AnswerCall) -> "TrajectoryTool":
        """Returns the tool with this spec."""
        return cls(
            name=spec.name,
            description=spec.description,
            args_schema=dict(spec.parameters),
            spec=spec,
            answer=answer,
        )

    def _run(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(
            f"tool {self.name!r} runs on the event loop of its trajectory only; "
            "call the graph with ainvoke"
        )

    async def _arun(self, *args: object, **kwargs: object) -> object:
        message = await self.answer(ToolCall(id="", name=self.name, arguments=kwargs))
        return write_content(message.content, message.images)


def _schema_title(tool: BaseTool) -> str:
    schema = tool.args_schema
    return schema.__name__ if isinstance(schema, type) else ""


def _describe(error: ValidationError) -> str:
    return "; ".join(
        f"argument {'.'.join(str(part) for part in found['loc'])}: {found['msg']}"
        for found in error.errors(include_url=False, include_context=False)
    )
