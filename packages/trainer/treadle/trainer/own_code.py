"""The user's own objects, as a script gives them to `train`, checked and in the form a run uses.

Invariant: an object that a run could not use, or that the configuration contradicts, is a
`SetupError` before anything starts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from treadle.agent_loop import (
    AgentLoop,
    FunctionTool,
    RewardFn,
    SetupError,
    Tool,
    ToolFunction,
    ToolSpec,
    class_tools,
    function_tool,
)
from treadle.tools import rewards
from treadle.tools.schema_check import check_schema
from treadle.trainer.config.schema import Config

__all__ = ["NOTHING", "OnStep", "OwnCode", "collect"]

OnStep = Callable[[int, Mapping[str, float]], object]
"""Called with a step's number and metrics after each step; plain or async. Step 0 is the validation
before training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCode:
    """The objects that a script adds to a configuration.

    Attributes:
        reward: Scores every row. None: the configuration's reward.
        tools: By name, beside those of `agent.tool_catalogue`.
        loops: By name, beside those of `agent.loops`.
    """

    reward: RewardFn | None = None
    tools: Mapping[str, Tool] = field(default_factory=dict)
    loops: Mapping[str, AgentLoop] = field(default_factory=dict)
    on_step: OnStep | None = None


NOTHING = OwnCode()
"""A run that its configuration alone describes has no more."""


def collect(
    config: Config,
    *,
    reward: Callable[..., object] | Sequence[Callable[..., object]] | None,
    tools: Sequence[Tool | ToolFunction],
    loops: Mapping[str, AgentLoop | type[AgentLoop]],
    on_step: OnStep | None,
) -> OwnCode:
    """Returns the objects in the form that a run uses.

    Args:
        reward: A function with one of the signatures of `reward.name`, or several.
        tools: Typed functions with a docstring, or tools.
        loops: Classes to instantiate without arguments, or loops.

    Raises:
        SetupError: An object does not have the needed form, two tools have one name, or the
            configuration sets what contradicts the objects.
    """
    return OwnCode(
        reward=None if reward is None else _reward(config, reward),
        tools=_tools(tools),
        loops={name: _loop(name, loop) for name, loop in loops.items()},
        on_step=on_step,
    )


def _reward(
    config: Config, reward: Callable[..., object] | Sequence[Callable[..., object]]
) -> RewardFn:
    settings = config.reward
    if settings.name is not None:
        raise SetupError(
            f"train got reward={reward!r}, and reward.name={settings.name} names another: give one"
        )
    if settings.mode is not None:
        raise SetupError(
            f"reward.mode={settings.mode} is for rewards of treadle.tools, and train got "
            f"reward={reward!r}: remove one"
        )
    if settings.timeout_s is not None:
        raise SetupError(
            f"reward.timeout_s={settings.timeout_s:g} scores in another process, which cannot get "
            f"reward={reward!r} from this one: put the function into a file and name it by "
            "reward.name=path.py:function, or set no limit"
        )
    one = cast(Callable[..., object], reward)
    several = list(reward) if isinstance(reward, list | tuple) else [one]
    if not several:
        raise SetupError(
            f"train got reward={reward!r}, which has no function: give one, or leave it out"
        )
    return rewards.weighed(
        [(rewards.function_name(f), partial(rewards.from_function, f)) for f in several],
        settings.weights,
    )


def _tools(given: Sequence[Tool | ToolFunction]) -> Mapping[str, Tool]:
    tools: dict[str, Tool] = {}
    for each in given:
        described = isinstance(getattr(each, "spec", None), ToolSpec) and not isinstance(each, type)
        if described and not isinstance(each, FunctionTool):
            check_schema(cast(Tool, each).spec, "train")
        for tool in [cast(Tool, each)] if described else _described(each):
            if tool.spec.name in tools:
                name = tool.spec.name
                raise SetupError(f"train got two tools with the name {name!r}: rename one")
            tools[tool.spec.name] = tool
    return tools


def _described(function: object) -> Sequence[Tool]:
    if not callable(function):
        raise SetupError(
            f"train got the tool {function!r}; a tool is a typed function with a docstring, a "
            "class of such methods, or an object with a ToolSpec `spec` and `open`"
        )
    try:
        if isinstance(function, type):
            return list(class_tools(function).values())
        return [function_tool(function)]
    except TypeError as error:
        raise SetupError(f"train got a tool that cannot be described: {error}") from error


def _loop(name: str, given: object) -> AgentLoop:
    try:
        loop = given() if isinstance(given, type) else given
    except Exception as error:  # the user's class may raise anything
        raise SetupError(
            f"agent loop {name!r} cannot be made without arguments: {type(error).__name__}: "
            f"{error}; give an object instead of the class"
        ) from error
    if not callable(getattr(loop, "run", None)):
        raise SetupError(f"agent loop {name!r} is {given!r}; it needs a method run(task, services)")
    return cast(AgentLoop, loop)
