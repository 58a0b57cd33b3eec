"""The agent loop interface: any object with `run`, and the services that it gets.

Invariant: what `run` makes for a task ends with it, and a loop reaches the model only through
`Services`. So the same loop runs against the fakes of `testing`, one local server or a cluster.
The runner waits in `run` and cancels it at the trajectory's deadline.

What all tasks share, such as the servers of an environment, a loop opens and closes as an async
context manager; see `AgentLoop`.
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from treadle.agent_loop.generator import TokenGenerator
from treadle.agent_loop.loops.limits import LoopLimits
from treadle.agent_loop.runner.watchdog import Pulse
from treadle.agent_loop.tokens.renderer import ChatRenderer
from treadle.agent_loop.tools.interaction import Interaction
from treadle.agent_loop.tools.tool import Tool
from treadle.agent_loop.trajectory import Score, Trajectory
from treadle.agent_loop.types import AgentTask, SamplingParams

RewardFn: TypeAlias = Callable[[Trajectory], float | Score | Awaitable[float | Score]]
"""Scores a trajectory that ended without error; plain or async."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services that a loop works with; shared by the trajectories of a run.

    Attributes:
        sampling: How completions are sampled. `max_tokens` bounds one completion; loops lower
            it to what the limits leave.
        tools: By the name that the model calls.
        interactions: By the name in a row's `interaction_kwargs`.
        reward: Called by the runner on every trajectory that has no reward yet.
        deadline: `loop.time()` seconds at which the trajectory ends; the runner sets it.
        min_weight_version: Oldest weights that may sample.
        routed_experts: Whether completions report the experts of their rows, for a policy that
            replays them.
        trace_text: Whether spans carry the text of prompts and completions (`prompt_text`,
            `response_text`), decoded where a sink writes them.
        pulse: Records what the trajectory does, for the runner's watchdog; the runner sets it.

    Raises:
        ValueError: The key of a tool is not its name.
    """

    generator: TokenGenerator
    renderer: ChatRenderer
    limits: LoopLimits
    sampling: SamplingParams
    tools: Mapping[str, Tool] = field(default_factory=dict)
    interactions: Mapping[str, Interaction] = field(default_factory=dict)
    reward: RewardFn | None = None
    deadline: float = math.inf
    min_weight_version: int = 0
    routed_experts: bool = False
    trace_text: bool = False
    pulse: Pulse = field(default_factory=Pulse)

    def __post_init__(self) -> None:
        for name, tool in self.tools.items():
            if tool.spec.name != name:
                raise ValueError(
                    f"tool {tool.spec.name!r} has the key {name!r}; its key must be its name"
                )


class AgentLoop(Protocol):
    """Runs one task to its end; one object may run many tasks at once.

    Three things are optional, and loops without them stay as they are:

    - `async def __aenter__(self)` and `__aexit__`: open and close what all tasks share. A run opens
      its loops once per process before the first task, and closes them when it ends, also after
      errors and interrupts (`LoopRegistry.opened`).
    - `scores_itself = True`: every trajectory of the loop that ends well has its reward, so a run
      needs no reward function for its rows (`scores_itself`).
    - `required_capabilities`: what servers must be able to do for it, by the contract's names; a
      run refuses others before it starts (`LoopRegistry.required_capabilities`).
    """

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        """Attempts the task once.

        Raises:
            RolloutError: The attempt failed; the runner turns it into a failed trajectory.
        """
        ...


def scores_itself(loop: AgentLoop) -> bool:
    """Returns whether a loop sets the rewards of its own trajectories."""
    return getattr(loop, "scores_itself", False) is True
