"""`calculate(a, b, operand)`: one operator of an expression, applied; ``a @ b`` is ``3a - 2b``.

Invariant: a call has no state and no side effect. An error in its arguments is the model's
fault and is reported to the model (`ToolFailure`). All functions are pure.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from treadle.agent_loop import AgentTask, SetupError, ToolFailure, ToolResult, ToolSpec

__all__ = ["OPERATORS", "SPEC", "CalculateTool"]


def _at(a: int, b: int) -> int:
    return 3 * a - 2 * b


OPERATORS: Final[Mapping[str, Callable[[int, int], int]]] = MappingProxyType(
    {"+": operator.add, "-": operator.sub, "*": operator.mul, "@": _at}
)
"""The function of each operator."""

SPEC: Final = ToolSpec(
    name="calculate",
    description="Apply an operator to two numbers.",
    parameters={
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "integer"},
            "operand": {"type": "string"},
        },
        "required": ["a", "b", "operand"],
        "type": "object",
    },
)


class CalculateTool:
    """The tool, which is its own session: it has nothing to remember.

    Args:
        config: No settings are known; any key is an error.
        spec: Description for the model; None: `SPEC`. It must keep the three arguments.

    Raises:
        SetupError: `config` has a key.
    """

    def __init__(
        self, *, config: Mapping[str, object] | None = None, spec: ToolSpec = SPEC
    ) -> None:
        if config:
            raise SetupError(f"CalculateTool has no settings; remove {', '.join(config)}")
        self.spec = spec

    async def open(self, task: AgentTask) -> CalculateTool:
        """Returns itself."""
        return self

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        """Applies `arguments["operand"]` to `arguments["a"]` and `arguments["b"]`.

        Raises:
            ToolFailure: A number is missing or not whole, or the operator is unknown.
        """
        a, b = (_whole(arguments, name) for name in ("a", "b"))
        symbol = arguments.get("operand")
        if not isinstance(symbol, str) or symbol not in OPERATORS:
            raise ToolFailure(f"operand is {symbol!r}; expected one of {' '.join(OPERATORS)}")
        return ToolResult(content=str(OPERATORS[symbol](a, b)))

    async def aclose(self) -> None:
        """Nothing to free."""


def _whole(arguments: Mapping[str, object], name: str) -> int:
    value = arguments.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ToolFailure(f"{name} is {value!r}; expected a whole number")
    return value
