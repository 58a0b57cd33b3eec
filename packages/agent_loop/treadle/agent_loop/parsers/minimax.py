"""The format of MiniMax-M2: invoke elements in <minimax:tool_call>, arguments as plain text.

    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Rome</parameter>
    </invoke>
    </minimax:tool_call>

M1 and M3 write calls differently (`minimax_m1`, `minimax_m3`). The grammar is that of `invoke`.
"""

from treadle.agent_loop.parsers.invoke import InvokeFormat, InvokeMarks


def minimax_format() -> InvokeFormat:
    """Returns the format of MiniMax-M2 tool calls."""
    return InvokeFormat(InvokeMarks(block=("minimax:tool_call",)), gap="\n")
