"""Turns as the models' own chat templates write them, for tests: with and without reasoning."""

# ruff: noqa: RUF001 - the bars are the model's

from dataclasses import dataclass

from treadle.agent_loop.types import ToolSpec

TOOL = ToolSpec(
    name="get_weather",
    description="Tells the weather.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "deep": {"type": "object"},
            "flag": {"type": "boolean"},
            "zip": {"type": "string"},
        },
        "required": ["city"],
    },
)
ARGUMENTS: dict[str, object] = {
    "city": 'Köln "x"\n  <b>',
    "days": 3,
    "deep": {"a": [1, "b", None]},
    "flag": True,
    "zip": "3",
}
ROME: dict[str, object] = {"city": "Rome"}
# MiniMax-M3's template leaves null out.
WITHOUT_NULL = ARGUMENTS | {"deep": {"a": [1, "b"]}}
REASONING = "First\n\nthis."
_JSON = (
    r'{"city": "Köln \"x\"\n  <b>", "days": 3, "deep": {"a": [1, "b", null]}, '
    r'"flag": true, "zip": "3"}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A turn, and what a parser must return for it.

    Attributes:
        parser: Name of the parser that reads it.
        text: The turn without the token that ends it.
        first: The beginning of the first call.
        prompt_end: Text that the template has written before it.
    """

    parser: str
    models: str
    text: str
    first: str
    calls: tuple[dict[str, object], ...] = (ARGUMENTS, ROME)
    content: str = "Let me see."
    reasoning: str | None = None
    prompt_end: str = "<|im_start|>assistant\n"


_HERMES = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {_JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
_CODER = """<tool_call>
<function=get_weather>
<parameter=city>
Köln "x"
  <b>
</parameter>
<parameter=days>
3
</parameter>
<parameter=deep>
{"a": [1, "b", null]}
</parameter>
<parameter=flag>
True
</parameter>
<parameter=zip>
3
</parameter>
</function>
</tool_call>
<tool_call>
<function=get_weather>
<parameter=city>
Rome
</parameter>
</function>
</tool_call>"""
_GLM_4_6 = """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Köln "x"
  <b></arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
<arg_key>deep</arg_key>
<arg_value>{"a": [1, "b", null]}</arg_value>
<arg_key>flag</arg_key>
<arg_value>true</arg_value>
<arg_key>zip</arg_key>
<arg_value>3</arg_value>
</tool_call>
<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Rome</arg_value>
</tool_call>"""
_GLM_4_7 = (
    '<tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln "x"\n  <b></arg_value>'
    "<arg_key>days</arg_key><arg_value>3</arg_value>"
    '<arg_key>deep</arg_key><arg_value>{"a": [1, "b", null]}</arg_value>'
    "<arg_key>flag</arg_key><arg_value>true</arg_value>"
    "<arg_key>zip</arg_key><arg_value>3</arg_value></tool_call>"
)
_MINIMAX = """<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Köln "x"
  <b></parameter>
<parameter name="days">3</parameter>
<parameter name="deep">{"a": [1, "b", null]}</parameter>
<parameter name="flag">true</parameter>
<parameter name="zip">3</parameter>
</invoke>
<invoke name="get_weather">
<parameter name="city">Rome</parameter>
</invoke>
</minimax:tool_call>"""
_DSML = """<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Köln "x"
  <b></｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
<｜DSML｜parameter name="deep" string="false">{"a": [1, "b", null]}</｜DSML｜parameter>
<｜DSML｜parameter name="flag" string="false">true</｜DSML｜parameter>
<｜DSML｜parameter name="zip" string="true">3</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
_DEEPSEEK_V31 = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_JSON}<｜tool▁call▁end｜>"
    '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>"
)
_DEEPSEEK_R1 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    f"```json\n{_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    '```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
_KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{_JSON}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1"
    '<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>'
)
_K3 = (
    "<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Köln "x"\n  <b><|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    '<|open|>argument key="deep" type="object"<|sep|>{"a": [1, "b", null]}<|close|>argument<|sep|>'
    '<|open|>argument key="flag" type="boolean"<|sep|>true<|close|>argument<|sep|>'
    '<|open|>argument key="zip" type="string"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="get_weather" index="2"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
)
_NEMO = (
    f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_JSON}, "id": "call00000"}}, '
    '{"name": "get_weather", "arguments": {"city": "Rome"}, "id": "call00001"}]'
)
_MISTRAL_3_2 = (
    f"[TOOL_CALLS]get_weather[CALL_ID]call00000[ARGS]{_JSON}"
    '[TOOL_CALLS]get_weather[CALL_ID]call00001[ARGS]{"city": "Rome"}'
)
_DEVSTRAL = f'[TOOL_CALLS]get_weather[ARGS]{_JSON}[TOOL_CALLS]get_weather[ARGS]{{"city": "Rome"}}'
_M1 = (
    f'<tool_calls>\n{{"name": "get_weather", "arguments": {_JSON}}}\n'
    '{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_calls>'
)
_NS = "]<]minimax[>["
_M3 = f"""{_NS}<tool_call>
{_NS}<invoke name="get_weather">{_NS}<city>Köln "x"
  <b>{_NS}</city>{_NS}<days>3{_NS}</days>{_NS}<deep>{_NS}<a>{_NS}<item>1{_NS}</item>{_NS}<item>b{_NS}</item>{_NS}\
</a>{_NS}</deep>{_NS}<flag>true{_NS}</flag>{_NS}<zip>3{_NS}</zip>{_NS}</invoke>
{_NS}<invoke name="get_weather">{_NS}<city>Rome{_NS}</city>{_NS}</invoke>
{_NS}</tool_call>"""
_GEMMA = (
    '<|tool_call>call:get_weather{city:<|"|>Köln "x"\n  <b><|"|>,days:3,'
    'deep:{a:[1,<|"|>b<|"|>,None]},flag:true,zip:<|"|>3<|"|>}<tool_call|>'
    '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'
)
_COHERE = (
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
    f"{_JSON}}},\n"
    '    {"tool_call_id": "1", "tool_name": "get_weather", "parameters": {"city": "Rome"}}\n'
    "]<|END_ACTION|>"
)
_LFM2 = (
    "<|tool_call_start|>[get_weather(city='Köln \"x\"\n  <b>', days=3, "
    'deep={"a": [1, "b", null]}, flag=True, zip=\'3\'), '
    "get_weather(city='Rome')]<|tool_call_end|>"
)
_LLAMA = f'{{"name": "get_weather", "parameters": {_JSON}}}'
_ANALYSIS = "<|channel|>analysis<|message|>First\n\nthis.<|end|><|start|>assistant"

SAMPLES = (
    Sample(parser="hermes", models="Qwen2.5", text=f"Let me see.\n{_HERMES}", first="<tool_call>"),
    Sample(
        parser="qwen3",
        models="Qwen3",
        text=f"<think>\nFirst\n\nthis.\n</think>\n\nLet me see.\n{_HERMES}",
        first="<tool_call>",
        reasoning=REASONING,
    ),
    Sample(
        parser="qwen3",
        models="Qwen3, not thinking",
        text=f"<think>\n\n</think>\n\nLet me see.\n{_HERMES}",
        first="<tool_call>",
        reasoning="",
    ),
    Sample(
        parser="qwen3_coder",
        models="Qwen3-Coder",
        text=f"Let me see.\n\n{_CODER}",
        first="<tool_call>",
    ),
    Sample(
        parser="qwen3_5",
        models="Qwen3.5",
        text=f"First\n\nthis.\n</think>\n\nLet me see.\n\n{_CODER}",
        first="<tool_call>",
        reasoning=REASONING,
        prompt_end="<|im_start|>assistant\n<think>\n",
    ),
    Sample(
        parser="glm",
        models="GLM-4.6",
        text=f"\n<think>First\n\nthis.</think>\nLet me see.\n{_GLM_4_6}",
        first="<tool_call>",
        reasoning=REASONING,
        prompt_end="<|assistant|>",
    ),
    Sample(
        parser="glm",
        models="GLM-4.7",
        text=f"First\n\nthis.</think>Let me see.{_GLM_4_7}",
        first="<tool_call>",
        calls=(ARGUMENTS,),
        reasoning=REASONING,
        prompt_end="<|assistant|><think>",
    ),
    Sample(
        parser="glm",
        models="GLM-4.6, not thinking",
        text=f"\nLet me see.\n{_GLM_4_6}",
        first="<tool_call>",
        reasoning="",
        prompt_end="<|assistant|>\n<think></think>",
    ),
    Sample(
        parser="minimax",
        models="MiniMax-M2",
        text=f"First\n\nthis.\n</think>\n\nLet me see.\n{_MINIMAX}",
        first="<invoke",
        reasoning=REASONING,
        prompt_end="]~b]ai\n<think>\n",
    ),
    Sample(parser="minimax_m1", models="MiniMax-M1", text=_M1, first='{"name"', content=""),
    Sample(
        parser="minimax_m3",
        models="MiniMax-M3",
        text=f"<mm:think>First\n\nthis.</mm:think>Let me see.{_M3}",
        first="]<]minimax[>[<invoke",
        calls=(WITHOUT_NULL, ROME),
        reasoning=REASONING,
        prompt_end="]~b]ai\n",
    ),
    Sample(
        parser="minimax_m3",
        models="MiniMax-M3, not thinking",
        text=f"</mm:think>Let me see.{_M3}",
        first="]<]minimax[>[<invoke",
        calls=(WITHOUT_NULL, ROME),
        reasoning="",
        prompt_end="]~b]ai\n",
    ),
    Sample(
        parser="gemma4",
        models="Gemma 4",
        text=f"<|channel>thought\nFirst\n\nthis.\n<channel|>Let me see.{_GEMMA}",
        first="<|tool_call>",
        reasoning=REASONING,
        prompt_end="<|turn>model\n",
    ),
    Sample(
        parser="gemma4",
        models="Gemma 4, not thinking",
        text=_GEMMA,
        first="<|tool_call>",
        content="",
        reasoning="",
        prompt_end="<|turn>model\n<|channel>thought\n<channel|>",
    ),
    Sample(
        parser="cohere_command3",
        models="Command R7B",
        text=f"<|START_THINKING|>First\n\nthis.<|END_THINKING|>{_COHERE}",
        first='{"tool_call_id"',
        content="",
        reasoning=REASONING,
        prompt_end="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    Sample(
        parser="cohere_command4",
        models="North, not thinking",
        text=f"<|START_TEXT|>Let me see.<|END_TEXT|>{_COHERE}",
        first='{"tool_call_id"',
        reasoning="",
        prompt_end="<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>",
    ),
    Sample(
        parser="cohere_command4",
        models="North",
        text=f"First\n\nthis.<|END_THINKING|>{_COHERE}",
        first='{"tool_call_id"',
        content="",
        reasoning=REASONING,
        prompt_end="<|CHATBOT_TOKEN|><|START_THINKING|>",
    ),
    Sample(parser="lfm2", models="LFM2", text=f"Let me see.{_LFM2}", first="get_weather("),
    Sample(
        parser="lfm2_5",
        models="LFM2.5",
        text=f"<think>First\n\nthis.</think>Let me see.{_LFM2}",
        first="get_weather(",
        reasoning=REASONING,
    ),
    Sample(
        parser="deepseek_v32",
        models="DeepSeek-V3.2",
        text=f"First\n\nthis.</think>Let me see.\n\n{_DSML}",
        first="<｜DSML｜invoke",
        reasoning=REASONING,
        prompt_end="<｜Assistant｜><think>",
    ),
    Sample(
        parser="deepseek_v32",
        models="DeepSeek-V4, not thinking",
        text="Let me see.\n\n" + _DSML.replace("function_calls", "tool_calls"),
        first="<｜DSML｜invoke",
        reasoning="",
        prompt_end="<｜Assistant｜></think>",
    ),
    Sample(
        parser="deepseek",
        models="DeepSeek-V3.1",
        text=f"Let me see.{_DEEPSEEK_V31}",
        first="<｜tool▁call▁begin｜>",
        reasoning="",
        prompt_end="<｜Assistant｜><think></think>",
    ),
    Sample(
        parser="deepseek",
        models="DeepSeek-R1",
        text=f"First\n\nthis.</think>{_DEEPSEEK_R1}",
        first="<｜tool▁call▁begin｜>",
        content="",
        reasoning=REASONING,
        prompt_end="<｜Assistant｜><think>",
    ),
    Sample(
        parser="kimi",
        models="Kimi-K2-Thinking",
        text=f"<think>First\n\nthis.</think>Let me see.{_KIMI}",
        first="<|tool_call_begin|>",
        reasoning=REASONING,
        prompt_end="<|im_assistant|>assistant<|im_middle|>",
    ),
    Sample(
        parser="kimi_k3",
        models="Kimi-K3",
        text=f"First\n\nthis.<|close|>think<|sep|><|open|>response<|sep|>Let me see.{_K3}",
        first="<|open|>call ",
        reasoning=REASONING,
        prompt_end='<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
    ),
    Sample(
        parser="kimi_k3",
        models="Kimi-K3, not thinking",
        text=f"Let me see.{_K3}",
        first="<|open|>call ",
        reasoning="",
        prompt_end='<|open|>message role="assistant"<|sep|><|open|>response<|sep|>',
    ),
    Sample(parser="mistral", models="Nemo", text=_NEMO, first='{"name"', content=""),
    Sample(
        parser="mistral",
        models="Mistral-Small-3.2",
        text=_MISTRAL_3_2,
        first="[TOOL_CALLS]",
        content="",
    ),
    Sample(
        parser="mistral", models="Devstral", text=f"Let me see.{_DEVSTRAL}", first="[TOOL_CALLS]"
    ),
    Sample(
        parser="llama3_json",
        models="Llama-3.1",
        text=_LLAMA,
        first='{"name"',
        calls=(ARGUMENTS,),
        content="",
    ),
    Sample(
        parser="gpt_oss",
        models="gpt-oss, recipient in the role",
        text=f"{_ANALYSIS} to=functions.get_weather<|channel|>commentary json<|message|>{_JSON}",
        first="<|start|>assistant to=",
        calls=(ARGUMENTS,),
        content="",
        reasoning=REASONING,
        prompt_end="<|start|>assistant",
    ),
    Sample(
        parser="gpt_oss",
        models="gpt-oss, as sampled",
        text=f"{_ANALYSIS}<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{_JSON}<|call|>",
        first="<|start|>assistant<|channel|>commentary to=",
        calls=(ARGUMENTS,),
        reasoning=REASONING,
        prompt_end="<|start|>assistant",
    ),
)
