"""A custom agent loop: the model answers, is asked whether it is sure, and answers again."""

from treadle.agent_loop import AgentTask, Conversation, Message, Services, StopReason, Trajectory


class AskTwice:
    """Any object with this `run` is an agent loop; there is nothing to inherit or register."""

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        """Attempts the task once."""
        with Conversation(task, services) as chat:
            turn = await chat.generate()
            if not turn.closed:
                return chat.finish(StopReason.TURN_LENGTH)
            if stop := chat.answer([Message(role="user", content="Are you sure?")]):
                return chat.finish(stop)
            await chat.generate()
            return chat.finish(StopReason.FINISHED)
