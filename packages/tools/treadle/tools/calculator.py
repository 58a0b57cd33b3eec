"""The calculator: a tool that gives the value of an arithmetic expression.

Invariant: a call has no state and no side effect, and takes well under a millisecond whatever the
model wrote. Everything that can go wrong is the model's fault and is told to the model
(`ToolFailure`). What an expression may be is in `treadle.tools.arithmetic`.
"""

from __future__ import annotations

from collections.abc import Mapping

from treadle.agent_loop import AgentTask, ToolFailure, ToolResult, ToolSpec
from treadle.tools.arguments import no_settings, text_argument
from treadle.tools.arithmetic import ArithmeticRefusal, evaluate, format_number

SPEC = ToolSpec(
    name="calculator",
    description="Evaluate an arithmetic expression with + - * / // % ** and parentheses.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "For example (12 + 3) * 4"}},
        "required": ["expression"],
    },
)


class CalculatorTool:
    """`calculator(expression: str)`: the value as text, or a sentence that names the error.

    Args:
        config: No settings are known; any key is an error.
        spec: Description for the model; None: `SPEC`. It must keep the argument `expression`.
    """

    def __init__(
        self, *, config: Mapping[str, object] | None = None, spec: ToolSpec = SPEC
    ) -> None:
        no_settings(type(self).__name__, config)
        self.spec = spec

    async def open(self, task: AgentTask) -> CalculatorTool:
        """Returns the tool itself: it has nothing to remember between calls."""
        return self

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        """Evaluates `arguments["expression"]`.

        Raises:
            ToolFailure: The argument is missing or not a string, or has no value.
        """
        expression = text_argument(self.spec.name, arguments, "expression")
        try:
            return ToolResult(content=format_number(evaluate(expression)))
        except ArithmeticRefusal as refusal:
            raise ToolFailure(f"Cannot evaluate: {refusal}.") from None

    async def aclose(self) -> None:
        """Nothing to free."""
