"""The format of DeepSeek V3.2 and V4: invoke elements whose parameters state their type.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

V4 names the block tool_calls; both are parsed. The grammar is that of `invoke`.
"""  # noqa: RUF002 - the bars are the model's

from treadle.agent_loop.parsers.invoke import InvokeFormat, InvokeMarks

_DSML = "｜DSML｜"  # noqa: RUF001 - the bars are the model's


def deepseek_v32_format() -> InvokeFormat:
    """Returns the format of DeepSeek V3.2 tool calls."""
    block = (f"{_DSML}function_calls", f"{_DSML}tool_calls")
    return InvokeFormat(InvokeMarks(block=block, prefix=_DSML, typed=True), gap="\n\n")
