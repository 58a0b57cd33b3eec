"""Sub-agents: the model hands questions to helpers, who have the tools, and sums up.

One task gives one trajectory. The helpers' conversations and the one that delegates are its
samples; they share its reward, so that a helper learns from how the whole went.
"""

from collections.abc import Mapping

from treadle.agent_loop import (
    AgentTask,
    Conversation,
    Message,
    Services,
    ToolAgentLoop,
    Toolbox,
    ToolFailure,
    ToolResult,
    ToolSpec,
    Trajectory,
    selected_tools,
)

DELEGATE = ToolSpec(
    name="delegate",
    description="Hands a question to a helper, who has tools, and gives the helper's answer.",
    parameters={
        "type": "object",
        "properties": {"question": {"type": "string", "description": "All that there is to know."}},
        "required": ["question"],
    },
)


class DelegatingAgent:
    """Shows the model one tool, `delegate`; the run's tools are for its helpers."""

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        """Attempts the task once."""
        limits, codec = services.limits, services.renderer
        tools = selected_tools(task, services.tools)
        with Conversation(task, services, tools=[DELEGATE]) as chat:
            async with Toolbox(task, tools, limits, codec=codec) as toolbox:
                delegate = {DELEGATE.name: _Delegate(chat, toolbox, services)}
                async with Toolbox(task, delegate, limits, codec=codec) as helpers:
                    stop = await ToolAgentLoop().converse(chat, helpers, limits)
            return chat.finish(
                stop,
                tool_rewards=toolbox.rewards,
                metrics=(*toolbox.metrics, *helpers.metrics),
            )


class _Delegate:
    """The tool of one trajectory; each call is a conversation of the same trajectory."""

    spec = DELEGATE

    def __init__(self, chat: Conversation, toolbox: Toolbox, services: Services) -> None:
        self._chat = chat
        self._toolbox = toolbox
        self._limits = services.limits

    async def open(self, task: AgentTask) -> "_Delegate":
        """Is its own session."""
        return self

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        """Lets a helper answer a question; the calls of one turn run at the same time."""
        question = arguments.get("question")
        if not isinstance(question, str):
            raise ToolFailure("give the helper a question, as a text")
        asked = [Message(role="user", content=question)]
        with self._chat.another(asked, tools=self._toolbox.specs) as helper:
            await ToolAgentLoop().converse(helper, self._toolbox, self._limits)
        return ToolResult(content=helper.messages[-1].content)

    async def aclose(self) -> None:
        """Has nothing to free."""
