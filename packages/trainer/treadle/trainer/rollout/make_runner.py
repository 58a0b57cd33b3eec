"""Makes the runner of a run's tasks in the process that has the loops, tools and reward.

Invariant: the driver and the loop workers make their runners here, from the same configuration, so
that a task gives the same trajectory wherever it runs.
"""

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from treadle.agent_loop import (
    AgentTask,
    ChatRenderer,
    Retry,
    RewardFn,
    RolloutRunner,
    SamplingParams,
    Services,
    TokenGenerator,
    Trajectory,
)
from treadle.trainer.config.schema import Config
from treadle.trainer.data import PromptRules
from treadle.trainer.rollout.loops_from_config import loop_limits

__all__ = ["Runner", "RunnerSettings", "Sink", "SpanAttributes", "make_runner"]

Sink = Callable[[Trajectory], Awaitable[None]]
SpanAttributes = Callable[[AgentTask], Mapping[str, object]]


class Runner(Protocol):
    """Runs tasks: a `RolloutRunner`, or the loop workers."""

    async def run(
        self, tasks: AsyncIterable[AgentTask] | Iterable[AgentTask], sink: Sink
    ) -> object:
        """Runs every task and passes its trajectory to the sink; see `RolloutRunner`."""
        ...

    def set_max_in_flight(self, max_in_flight: int) -> None:
        """Changes the maximum number of tasks in flight, also of calls of `run` under way."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """The settings of some tasks that a configuration leaves open.

    Attributes:
        min_weight_version: Oldest weights that may sample.
        routed_experts: Whether trajectories have the experts of their rows.
    """

    sampling: SamplingParams
    min_weight_version: int
    routed_experts: bool = False


def make_runner(
    config: Config,
    settings: RunnerSettings,
    *,
    generator: TokenGenerator,
    renderer: ChatRenderer,
    rules: PromptRules,
    reward: RewardFn,
    max_in_flight: int,
    span_attributes: SpanAttributes | None = None,
) -> RolloutRunner:
    """Returns a runner of this process.

    Args:
        rules: Have the loops, tools and interactions.
        max_in_flight: Maximum number of tasks in flight.
    """
    return RolloutRunner(
        rules.loops,
        Services(
            generator=generator,
            renderer=renderer,
            limits=loop_limits(config),
            sampling=settings.sampling,
            tools=rules.tools,
            interactions=rules.interactions,
            reward=reward,
            min_weight_version=settings.min_weight_version,
            routed_experts=settings.routed_experts,
            trace_text=config.tracing.token2text,
        ),
        max_in_flight=max_in_flight,
        deadline_s=config.agent.deadline_s,
        failure_policy=Retry(max_attempts=config.agent.max_attempts),
        watchdog_s=config.agent.watchdog_s,
        span_attributes=span_attributes,
    )
