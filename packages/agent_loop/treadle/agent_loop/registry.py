"""The loop registry: names of agent loops, as a value.

Invariant: nothing registers itself at import; what a run can call is what its registry holds, or
what a task names in full as "module:Class". A name that cannot be resolved is an error with the
names that can.

    loops = default_loops().adding("ask_twice", AskTwice())
"""

import importlib
from collections.abc import Mapping
from typing import cast

from treadle.agent_loop.errors import SetupError, UnknownLoopError
from treadle.agent_loop.loop import AgentLoop
from treadle.agent_loop.single_turn import SingleTurnLoop
from treadle.agent_loop.tool_loop import OnMalformedCall, ToolAgentLoop

SINGLE_TURN_AGENT = "single_turn_agent"
TOOL_AGENT = "tool_agent"


class LoopRegistry:
    """Agent loops by name. Not changed after it is made.

    Args:
        loops: By the name that a row's `agent_name` gives.
    """

    def __init__(self, loops: Mapping[str, AgentLoop]) -> None:
        self._loops = dict(loops)
        self._imported: dict[str, AgentLoop] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names held, sorted."""
        return tuple(sorted(self._loops))

    def adding(self, name: str, loop: AgentLoop) -> "LoopRegistry":
        """Returns a registry with one more loop.

        Raises:
            SetupError: The name is taken.
        """
        if name in self._loops:
            raise SetupError(f"the agent loop {name!r} is registered already")
        return LoopRegistry({**self._loops, name: loop})

    def resolve(self, name: str) -> AgentLoop:
        """Returns the loop of a name, or makes the one that "module:Class" names.

        Raises:
            UnknownLoopError: There is no such loop; the text lists the known names.
        """
        if (loop := self._loops.get(name)) is not None:
            return loop
        if ":" not in name:
            raise UnknownLoopError(
                f"agent loop {name!r} is not registered; registered agent loops: "
                f'{", ".join(self.names)}; or name one in full as "module:Class"'
            )
        if name not in self._imported:
            self._imported[name] = _import_loop(name)
        return self._imported[name]


def default_loops(*, on_malformed_call: OnMalformedCall = OnMalformedCall.ANSWER) -> LoopRegistry:
    """Returns a registry of `single_turn_agent` and `tool_agent`."""
    return LoopRegistry(
        {
            SINGLE_TURN_AGENT: SingleTurnLoop(),
            TOOL_AGENT: ToolAgentLoop(on_malformed_call=on_malformed_call),
        }
    )


def _import_loop(name: str) -> AgentLoop:
    module_name, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownLoopError(f"agent loop {name!r} cannot be imported: {error}") from error
    try:
        loop = factory() if isinstance(factory, type) else factory
    except TypeError as error:
        raise UnknownLoopError(
            f"agent loop {name!r} cannot be made without arguments: {error}"
        ) from error
    if not callable(getattr(loop, "run", None)):
        raise UnknownLoopError(f"agent loop {name!r} has no method run(task, services)")
    return cast(AgentLoop, loop)
