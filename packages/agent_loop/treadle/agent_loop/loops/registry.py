"""The loop registry: a mapping from names to agent loops.

Invariant: nothing registers itself at import. A run can use the loops in its registry, and those
that a task names in full as "module:Class" or "path/to/file.py:Class". Resolving an unknown name is
an error that lists the known names, and no name stands for two loops.

    loops = default_loops().adding("ask_twice", AskTwice())

An installed package offers its loops as entry points, which `default_loops` finds. Such a loop is
imported at its first use:

    [project.entry-points."treadle.agent_loops"]
    ask_twice = "my_package.loops:AskTwice"
"""

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Final, cast

from treadle.agent_loop.errors import SetupError, UnknownLoopError
from treadle.agent_loop.import_path import load_import_path
from treadle.agent_loop.loops.loop import AgentLoop
from treadle.agent_loop.loops.single_turn import SingleTurnLoop
from treadle.agent_loop.loops.tool_loop import OnMalformedCall, ToolAgentLoop

SINGLE_TURN_AGENT = "single_turn_agent"
"""The name of the loop with one completion."""
TOOL_AGENT = "tool_agent"
"""The name of the loop that calls tools."""
LOOP_ENTRY_POINTS: Final = "treadle.agent_loops"
"""The entry point group in which packages offer agent loops."""

_log = logging.getLogger(__name__)


class LoopRegistry:
    """Agent loops by name; immutable.

    Args:
        loops: By the name in a row's `agent_name`: the loop, or "module:Class" or
            "path/to/file.py:Class", which is imported and instantiated without arguments at its
            first use.
    """

    def __init__(self, loops: Mapping[str, AgentLoop | str]) -> None:
        self._loops = dict(loops)
        self._imported: dict[str, AgentLoop] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the loops, sorted."""
        return tuple(sorted(self._loops))

    def adding(self, name: str, loop: AgentLoop | str) -> "LoopRegistry":
        """Returns a registry with one more loop, given as an object or as "module:Class".

        Raises:
            SetupError: The name is taken, or the string does not have that form.
        """
        if name in self._loops:
            raise SetupError(f"the agent loop {name!r} is already registered")
        if isinstance(loop, str) and ":" not in loop:
            raise SetupError(
                f'agent loop {name!r} is {loop!r}; it must be "path.py:Class" or "module:Class"'
            )
        return LoopRegistry({**self._loops, name: loop})

    def resolve(self, name: str) -> AgentLoop:
        """Returns the loop with this name; imports and instantiates "module:Class".

        Raises:
            UnknownLoopError: There is no such loop; the message lists the known names.
        """
        target = self._loops.get(name, name)
        if not isinstance(target, str):
            return target
        if ":" not in target:
            raise UnknownLoopError(
                f"agent loop {name!r} is not registered; registered agent loops: "
                f'{", ".join(self.names)}; or name one in full as "path.py:Class" or "module:Class"'
            )
        if name not in self._imported:
            shown = repr(name) if name == target else f"{name!r} ({target})"
            self._imported[name] = _import_loop(target, shown)
        return self._imported[name]

    def required_capabilities(self, names: Iterable[str]) -> frozenset[str]:
        """Returns what servers must be able to do for loops, named as in the contract.

        Raises:
            UnknownLoopError: There is no such loop.
        """
        loops = map(self.resolve, names)
        return frozenset[str]().union(*(getattr(o, "required_capabilities", ()) for o in loops))

    @asynccontextmanager
    async def opened(self, names: Iterable[str]) -> AsyncIterator[None]:
        """Opens the loops that are async context managers, and closes them in reverse order.

        A loop that does not close is logged, and the result of the run stands.

        Args:
            names: Loops that will run; each one is opened once.

        Raises:
            SetupError: A loop does not open; the others have been closed.
            UnknownLoopError: There is no such loop.
        """
        async with AsyncExitStack() as stack:
            opened: set[int] = set()
            for name in sorted(set(names)):
                loop = self.resolve(name)
                if isinstance(loop, AbstractAsyncContextManager) and id(loop) not in opened:
                    opened.add(id(loop))
                    await _open(name, loop, stack)
            yield


def default_loops(*, on_malformed_call: OnMalformedCall = OnMalformedCall.ANSWER) -> LoopRegistry:
    """Returns a registry of `single_turn_agent`, `tool_agent` and the loops of installed packages.

    Raises:
        SetupError: Two packages offer the same name, or one offers a built-in name.
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


async def _open(name: str, loop: AbstractAsyncContextManager[Any], stack: AsyncExitStack) -> None:
    async def close(
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await loop.__aexit__(kind, error, traceback)
        except Exception as problem:  # the user's, or that of an environment's library
            _log.warning("agent loop %r did not close", name, exc_info=problem)

    try:
        await loop.__aenter__()
    except SetupError:
        raise
    except Exception as error:
        raise SetupError(
            f"agent loop {name!r} does not open: {type(error).__name__}: {error}"
        ) from error
    stack.push_async_exit(close)


def _import_loop(target: str, shown: str) -> AgentLoop:
    try:
        factory = load_import_path(target, "agent loop")
    except SetupError as error:
        raise UnknownLoopError(str(error)) from error
    try:
        loop = factory() if isinstance(factory, type) else factory
    except Exception as error:
        raise UnknownLoopError(
            f"agent loop {shown} cannot be made without arguments: {type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(loop, "run", None)):
        raise UnknownLoopError(f"agent loop {shown} has no method run(task, services)")
    return cast(AgentLoop, loop)
