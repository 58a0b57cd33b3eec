"""The tool. The model sees the name, the docstring and the types of the function."""

import re

from treadle.agent_loop import ToolFailure


def calculator(expression: str) -> str:
    """Evaluate arithmetic."""
    match = re.fullmatch(r"(\d{1,9})([-+*])(\d{1,9})", expression.replace(" ", ""))
    if match is None:
        # The model reads this text, and may call again.
        raise ToolFailure("write two whole numbers with +, - or * between them, such as 12*7")
    a, sign, b = int(match[1]), match[2], int(match[3])
    return str(a + b if sign == "+" else a - b if sign == "-" else a * b)
