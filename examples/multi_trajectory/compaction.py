"""Context compaction: when the context is nearly full, the model writes notes and starts over.

One task gives one trajectory with a sample for every context that was filled. The notes are
sampled like anything else, so that the reward of the whole also teaches what is worth noting down.

A context is full when the next tool results would leave less than `reserve` tokens. The reserve
holds the request for notes and the notes themselves; ordinary turns are cut before it.
"""

from treadle.agent_loop import (
    AgentTask,
    Conversation,
    Message,
    Services,
    StopReason,
    Toolbox,
    Trajectory,
    selected_tools,
)

ASK = (
    "The context is full, so this result is kept for you. Write down what you have found out and "
    "what is still to do; you will go on with your notes and the latest results alone."
)


class CompactingAgent:
    """A tool loop that outlives its context.

    Args:
        reserve: Tokens kept for asking for notes and writing them.
        max_compactions: How often; then a full context ends the trajectory.
    """

    def __init__(self, *, reserve: int = 512, max_compactions: int = 8) -> None:
        self._reserve = reserve
        self._max_compactions = max_compactions

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        """Attempts the task once."""
        tools = selected_tools(task, services.tools)
        specs = [tool.spec for tool in tools.values()]
        compactions = 0
        with Conversation(task, services, tools=specs) as first:
            chat, stop = first, None
            async with Toolbox(task, tools, services.limits, codec=services.renderer) as toolbox:
                while stop is None:
                    turn = await chat.generate(max_tokens=max(1, chat.tokens_left - self._reserve))
                    if not turn.closed:
                        stop = chat.length_stop() or StopReason.TURN_LENGTH
                    elif not turn.requests:
                        stop = StopReason.FINISHED
                    else:
                        stop = services.limits.turn_stop(
                            assistant_turns=chat.all_assistant_turns, user_turns=chat.all_user_turns
                        )
                    if stop is not None:
                        break
                    answers = await toolbox.run(turn.requests)
                    if any(answer.stop for answer in answers):
                        stop = StopReason.TOOL_STOP
                        break
                    results = [answer.message for answer in answers]
                    full = chat.answer(results, reserve=self._reserve)
                    if full is not None and compactions == self._max_compactions:
                        stop = full
                    elif full is not None:
                        compactions += 1
                        notes = await self._notes(chat, results)
                        if notes is None:
                            stop = full
                        else:
                            chat = first.another(_begin_anew(task, notes, results), tools=specs)
            return chat.finish(stop, tool_rewards=toolbox.rewards, metrics=toolbox.metrics)

    async def _notes(self, chat: Conversation, results: list[Message]) -> str | None:
        """Returns what the model writes down; None when there is no room for it."""
        kept = [
            Message(role="tool", content=ASK, tool_call_id=r.tool_call_id, name=r.name)
            for r in results
        ]
        if chat.answer(kept) is not None:
            return None
        turn = await chat.generate()
        return turn.parsed.message.content if turn.closed else None


class SmallCompactingAgent(CompactingAgent):
    """The same for the contexts of two hundred tokens that config.yaml gives the demo's model."""

    def __init__(self) -> None:
        super().__init__(reserve=150, max_compactions=2)


def _begin_anew(task: AgentTask, notes: str, results: list[Message]) -> list[Message]:
    """Returns the task, with the notes and the latest results at the end of the question."""
    *before, question = task.messages
    latest = "\n".join(result.content for result in results)
    content = f"{question.content}\n\nYour notes so far:\n{notes}\n\nThe latest results:\n{latest}"
    return [*before, Message(role=question.role, content=content)]
