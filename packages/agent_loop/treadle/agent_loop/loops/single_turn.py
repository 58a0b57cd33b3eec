"""The single-turn loop: one completion, no tools."""

from treadle.agent_loop.loops.conversation import Conversation
from treadle.agent_loop.loops.loop import Services
from treadle.agent_loop.trajectory import Trajectory
from treadle.agent_loop.types import AgentTask, StopReason


class SingleTurnLoop:
    """`single_turn_agent`: the model answers once; `Services.tools` are not shown to it."""

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        """Attempts the task once.

        Raises:
            RolloutError: The attempt failed.
        """
        with Conversation(task, services) as chat:
            turn = await chat.generate()
            if turn.closed:
                return chat.finish(StopReason.FINISHED)
            return chat.finish(chat.length_stop() or StopReason.TURN_LENGTH)
