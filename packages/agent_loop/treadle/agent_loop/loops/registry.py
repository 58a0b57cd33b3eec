"""The loop registry: names of agent loops, as a value.

Invariant: nothing registers itself at import; what a run can call is what its registry holds, or
what a task names in full as "module:Class". A name that cannot be resolved is an error with the
names that can, and no name means two loops.

    loops = default_loops().adding("ask_twice", AskTwice())

An installed package offers its loops in its metadata, where `default_loops` finds them; such a
loop is imported when it is first asked for:

    [project.entry-points."treadle.agent_loops"]
    ask_twice = "my_package.loops:AskTwice"
"""

import importlib
from collections.abc import Mapping
from operator import attrgetter
from typing import Final, cast

from treadle.agent_loop.errors import SetupError, UnknownLoopError
from treadle.agent_loop.loops.loop import AgentLoop
from treadle.agent_loop.loops.single_turn import SingleTurnLoop
from treadle.agent_loop.loops.tool_loop import OnMalformedCall, ToolAgentLoop

SINGLE_TURN_AGENT = "single_turn_agent"
TOOL_AGENT = "tool_agent"
LOOP_ENTRY_POINTS: Final = "treadle.agent_loops"
"""Group of the entry points by which packages offer agent loops."""


class LoopRegistry:
    """Agent loops by name. What it holds is not changed after it is made.

    Args:
        loops: By the name that a row's `agent_name` gives: the loop, or "module:Class", which is
            imported and made without arguments when it is first asked for.
    """

    def __init__(self, loops: Mapping[str, AgentLoop | str]) -> None:
        self._loops = dict(loops)
        self._imported: dict[str, AgentLoop] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names held, sorted."""
        return tuple(sorted(self._loops))

    def adding(self, name: str, loop: AgentLoop | str) -> "LoopRegistry":
        """Returns a registry with one more loop, or "module:Class" of one.

        Raises:
            SetupError: The name is taken, or the text is not of that form.
        """
        if name in self._loops:
            raise SetupError(f"the agent loop {name!r} is registered already")
        if isinstance(loop, str) and ":" not in loop:
            raise SetupError(f'agent loop {name!r} is {loop!r}; it must be "module:Class"')
        return LoopRegistry({**self._loops, name: loop})

    def resolve(self, name: str) -> AgentLoop:
        """Returns the loop of a name, or makes the one that "module:Class" names.

        Raises:
            UnknownLoopError: There is no such loop; the text lists the known names.
        """
        target = self._loops.get(name, name)
        if not isinstance(target, str):
            return target
        if ":" not in target:
            raise UnknownLoopError(
                f"agent loop {name!r} is not registered; registered agent loops: "
                f'{", ".join(self.names)}; or name one in full as "module:Class"'
            )
        if name not in self._imported:
            shown = repr(name) if name == target else f"{name!r} ({target})"
            self._imported[name] = _import_loop(target, shown)
        return self._imported[name]


def default_loops(*, on_malformed_call: OnMalformedCall = OnMalformedCall.ANSWER) -> LoopRegistry:
    """Returns a registry of `single_turn_agent`, `tool_agent` and what installed packages offer.

    Args:
        on_malformed_call: Of `tool_agent`.

    Raises:
        SetupError: Two packages offer a loop of one name, or one offers a name of ours.
    """
    from importlib import metadata  # costs more to import than the rest of the package

    registry = LoopRegistry(
        {
            SINGLE_TURN_AGENT: SingleTurnLoop(),
            TOOL_AGENT: ToolAgentLoop(on_malformed_call=on_malformed_call),
        }
    )
    for point in metadata.entry_points(group=LOOP_ENTRY_POINTS):
        try:
            # A value may end with the extras that the loop needs: "module:Class [extra]".
            registry = registry.adding(point.name, point.value.partition("[")[0].strip())
        except SetupError as error:
            package = point.dist.name if point.dist is not None else "an installed package"
            raise SetupError(f"{package} offers an agent loop: {error}") from error
    return registry


def _import_loop(target: str, shown: str) -> AgentLoop:
    module_name, _, attribute = target.partition(":")
    try:  # a module of the user's may raise anything
        factory = attrgetter(attribute)(importlib.import_module(module_name))
    except Exception as error:
        raise UnknownLoopError(
            f"agent loop {shown} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    try:
        loop = factory() if isinstance(factory, type) else factory
    except Exception as error:
        raise UnknownLoopError(
            f"agent loop {shown} cannot be made without arguments: {type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(loop, "run", None)):
        raise UnknownLoopError(f"agent loop {shown} has no method run(task, services)")
    return cast(AgentLoop, loop)
