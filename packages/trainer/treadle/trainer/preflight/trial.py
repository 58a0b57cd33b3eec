"""Tries the user's own rewards and tools once, before anything starts.

Invariant: a plain reward that raises for a made-up answer to the first row, or returns what is no
reward, and a tool that cannot be opened for that row, are problems. An async reward is not called:
it may wait for a service that the run will have. What takes longer than `_LIMIT_S` is left to the
run, its thread too. The run's own tools are not opened: what they keep would belong to an event
loop that has closed.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Final

from treadle.agent_loop import (
    AgentLoopError,
    AgentTask,
    Message,
    MethodTool,
    Origin,
    RewardError,
    SetupError,
    Span,
    StopReason,
    Tokens,
    Tool,
    ToolError,
    Trajectory,
    boundary,
)
from treadle.tools import load_catalogue
from treadle.tools.rewards import user_functions
from treadle.tools.rewards.time_limited import TimeLimitedReward
from treadle.tools.rewards.user import UserReward
from treadle.trainer.config.schema import Config
from treadle.trainer.data import Prompt, PromptRules, PromptSet
from treadle.trainer.problems import Problems

__all__ = ["try_own_code"]

_LIMIT_S: Final = 60.0
_ANSWER: Final = "The answer is 42."


def try_own_code(
    config: Config,
    rules: PromptRules,
    reward: object,
    train: PromptSet | None,
    val: PromptSet | None,
) -> None:
    """Calls rewards, and opens tools, for the first row.

    Args:
        rules: Have the tools, and the loops that score their trajectories.
        train: The prompts of the training rows; None if there are none.
        val: Prompts of the validation rows, likewise.

    Raises:
        SetupError: A reward or a tool failed.
        SeveralProblems: More than one did.
    """
    found = train or val
    if found is None or not config.agent.try_once:
        return
    prompt, problems = found.prompts[0], Problems(SetupError)
    (task,) = prompt.tasks(samples=1, seed=config.run.seed, step=0)
    opened: set[int] = set()
    for name, tool in _fresh_tools(config, rules.tools_of(prompt.row)).items():
        known = id(tool.owner if isinstance(tool, MethodTool) else tool)
        if known not in opened:
            opened.add(known)
            with problems.collected(), _tried(f"the tool {name!r}, opened", prompt):
                _open(tool, task)
    answered = _answered(task, prompt.num_tokens)
    for call, function in user_functions(reward).items():
        if function.is_async or rules.scored_by_loop(prompt.row):
            continue
        try:
            function.check_row(prompt.row.columns)
        except SetupError:
            continue  # another problem, which is known
        given = (answered, _numbered(answered, 1)) if function.of_group else answered
        with problems.collected(), _tried(f"the reward, called with {_ANSWER!r}", prompt):
            if isinstance(call, TimeLimitedReward):
                call.try_now(given, limit_s=_LIMIT_S)
            else:
                _limited(partial(_call, function, given))
    problems.raise_if_any()


def _fresh_tools(config: Config, tools: Mapping[str, Tool]) -> Mapping[str, Tool]:
    """Returns the user's tools among those of a row, without the objects that the run opens.

    A class of methods has an instance for each trajectory; the catalogue makes objects of the other
    classes again. An object that the user made is left out.
    """
    found: dict[str, Tool] = {n: t for n, t in tools.items() if isinstance(t, MethodTool)}
    objects = {n: t for n, t in tools.items() if not type(t).__module__.startswith("treadle.")}
    path = config.agent.tool_catalogue
    if objects and path is not None:
        with suppress(Exception):  # a second object may be one too many, as of one that locks
            again = load_catalogue(path)
            found |= {n: again[n] for n, t in objects.items() if again.get(n, t) is not t}
    return found


def _limited(call: Callable[[], object]) -> None:
    """Calls it on a thread, which is left behind after the limit.

    Raises:
        BaseException: Whatever it raised in time.
    """
    ended: Future[object] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)

    Thread(target=run, name="trial", daemon=True).start()
    with suppress(TimeoutError):  # one that the user's code raised is another error
        ended.result(_LIMIT_S)


def _call(function: UserReward, given: Trajectory | Sequence[Trajectory]) -> None:
    with boundary(RewardError, f"the reward {function.name}"):
        function(given)


@contextmanager
def _tried(what: str, prompt: Prompt) -> Iterator[None]:
    try:
        yield
    except AgentLoopError as error:
        raise SetupError(
            f"{what} for {prompt.row.place}: {error}. Correct it, or set agent.try_once=false"
        ) from error


def _open(tool: Tool, task: AgentTask) -> None:
    """Opens a tool and closes it again; the instance of a class gives its reward between."""

    async def opened() -> None:
        with boundary(ToolError, f"tool {tool.spec.name!r}"):
            if not isinstance(tool, MethodTool):
                await (await tool.open(task)).aclose()
                return
            session = await tool.owner.open(task)
            try:
                if tool.owner.scores:
                    await session.reward()
            finally:
                await session.aclose()

    _limited(lambda: asyncio.run(opened()))  # a notebook's thread has an event loop of its own


def _answered(task: AgentTask, num_prompt_tokens: int) -> Trajectory:
    """Returns a trajectory of one turn."""
    stop = num_prompt_tokens + 1
    prompt = Span(origin=Origin.PROMPT, start=0, stop=num_prompt_tokens)
    sampled = Span(origin=Origin.SAMPLED, start=num_prompt_tokens, stop=stop, weight_version=0)
    return Trajectory(
        task=task,
        samples=(Tokens(ids=[0] * stop, logprobs=[0.0] * stop, spans=(prompt, sampled)),),
        messages=(*task.messages, Message(role="assistant", content=_ANSWER)),
        stop=StopReason.FINISHED,
        assistant_turns=1,
    )


def _numbered(trajectory: Trajectory, number: int) -> Trajectory:
    return replace(trajectory, task=replace(trajectory.task, rollout_index=number))
