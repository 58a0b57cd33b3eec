"""A class as tools: the typed public methods of an instance, of which each trajectory has its own.

    class Game:
        def __init__(self, number: int) -> None:  # from the row: `extra_info`, or a column
            self.number, self.turns, self.won = number, 0, False

        def guess(self, guess: int) -> str:
            '''Guess the number.'''
            self.turns += 1
            self.won = guess == self.number
            return "right" if self.won else "too low" if guess < self.number else "too high"

        def reward(self) -> float:  # if there is one, no other reward is needed
            return self.won / self.turns if self.turns else 0.0

Invariant: an instance is made at the first call of one of its methods, or for its reward, and runs
one method at a time. Its methods only get arguments that fit their signature, as a function tool.

`reset` is called after the constructor, if there is one, with what it takes of the row; `close` or
`aclose` when the trajectory ends. A method whose name begins with `_` is no tool. A plain method
runs on a thread of the loop's process, where it cannot be ended: what may hang is to be `async`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from treadle.agent_loop.row_arguments import Parameters
from treadle.agent_loop.tools.function_tool import FunctionTool, described
from treadle.agent_loop.tools.tool import ToolSession
from treadle.agent_loop.trajectory import Score
from treadle.agent_loop.types import AgentTask, ToolSpec
from treadle.agent_loop.user_calls import result_of

__all__ = ["ClassSession", "MethodTool", "ToolClass", "class_tools"]

_NO_TOOLS: Final = frozenset({"reset", "reward", "close", "aclose"})
_EVERY: Final = inspect.Parameter.VAR_KEYWORD


@dataclass(frozen=True, slots=True, eq=False)
class ToolClass:
    """A class whose methods are tools.

    Attributes:
        settings: Arguments of the constructor that are the same for all trajectories.
        specs: The descriptions of its tools for the model, in the order of the class.
    """

    made: type
    settings: Mapping[str, object]
    specs: Mapping[str, ToolSpec]

    @property
    def scores(self) -> bool:
        """Whether an instance scores its trajectory."""
        return hasattr(self.made, "reward")

    def check_task(self, task: AgentTask) -> None:
        """See `treadle.agent_loop.ChecksTask`."""
        for call in (self.made, getattr(self.made, "reset", None)):
            if call is not None:
                self._arguments(call, task)

    async def open(self, task: AgentTask) -> ClassSession:
        """Makes the instance of one trajectory."""
        instance = await result_of(
            str(self), partial(self.made, **self._arguments(self.made, task))
        )
        if (reset := getattr(instance, "reset", None)) is not None:
            shown = await result_of(str(self), partial(reset, **self._arguments(reset, task)))
            if shown is not None:
                raise TypeError(
                    f"{self}: reset() returned {shown!r:.80}, which the model does not see: write "
                    "it into the row's prompt"
                )
        return ClassSession(self, instance)

    def _arguments(self, call: Callable[..., object], task: AgentTask) -> dict[str, object]:
        """Returns the arguments of the constructor or `reset`; only the former takes settings."""
        settings = self.settings if call is self.made else {}
        return Parameters.of(call).arguments(str(self), task.fields, settings)

    def __str__(self) -> str:
        return f"the class {self.made.__qualname__}"


class ClassSession:
    """The instance of one trajectory. Made by `ToolClass.open`."""

    def __init__(self, owner: ToolClass, instance: object) -> None:
        self._owner = owner
        self._instance: Any = instance
        self._turn = asyncio.Lock()

    def method(self, name: str) -> ToolSession:
        """Returns one of its tools."""
        call = partial(self._call, getattr(self._instance, name))
        return FunctionTool(spec=self._owner.specs[name], function=call)

    async def reward(self) -> Score:
        """Returns the trajectory's reward; the class has one.

        Raises:
            ValueError: It is neither a number, a `Score` nor a mapping with "score".
        """
        return Score.of(await self._call(self._instance.reward))

    async def aclose(self) -> None:
        """Closes the instance, if it can be."""
        for name in ("close", "aclose"):
            if (close := getattr(self._instance, name, None)) is not None:
                await self._call(close)

    async def _call(self, method: Callable[..., object], **arguments: object) -> Any:
        async with self._turn:
            return await result_of(str(self._owner), partial(method, **arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodTool:
    """One method as a tool; those of a class share the instance of a `Toolbox`."""

    spec: ToolSpec
    owner: ToolClass

    def check_task(self, task: AgentTask) -> None:
        """See `treadle.agent_loop.ChecksTask`."""
        self.owner.check_task(task)

    async def open(self, task: AgentTask) -> ToolSession:
        """Makes an instance for this method alone."""
        return (await self.owner.open(task)).method(self.spec.name)


def class_tools(made: type, settings: Mapping[str, object] = {}) -> Mapping[str, MethodTool]:
    """Makes tools of the typed public methods of a class, each with a docstring.

    Args:
        settings: Arguments of the constructor, for all trajectories; the others are the row's.

    Raises:
        TypeError: It has no such method, one cannot be described, or it takes no such setting.
    """
    parameters = inspect.signature(made).parameters
    every = any(each.kind is _EVERY for each in parameters.values())
    if unknown := [] if every else [name for name in settings if name not in parameters]:
        raise TypeError(
            f"{made.__qualname__} takes no {', '.join(unknown)}; it takes: {', '.join(parameters)}"
        )
    methods = {
        name: value
        for each in reversed(made.__mro__)
        for name, value in vars(each).items()
        if inspect.isfunction(value) and not name.startswith("_") and name not in _NO_TOOLS
    }
    if not methods:
        raise TypeError(
            f"{made.__qualname__} has no public method: each one, with types and a docstring, is a "
            "tool"
        )
    specs = {name: described(method, of_class=True) for name, method in methods.items()}
    owner = ToolClass(made, settings, specs)
    return {name: MethodTool(spec=spec, owner=owner) for name, spec in specs.items()}
