"""The parsers by name, and the choice of a parser for a chat template.

Invariant: every name stands for one format of calls and, for families whose templates separate
reasoning, its marks. If a template does not separate reasoning, the parser leaves it in the
content, so that nothing is lost when a message is rendered again; calls in it are none all the
same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from treadle.agent_loop.errors import SetupError
from treadle.agent_loop.parsers.base import ToolCallParser
from treadle.agent_loop.parsers.cohere import RESPONSE, TEXT, CohereFormat
from treadle.agent_loop.parsers.deepseek import DeepSeekFormat
from treadle.agent_loop.parsers.deepseek_v32 import deepseek_v32_format
from treadle.agent_loop.parsers.format_parser import CallFormat, FormatParser
from treadle.agent_loop.parsers.gemma4 import Gemma4Format
from treadle.agent_loop.parsers.glm import GlmFormat
from treadle.agent_loop.parsers.gpt_oss import GptOssParser
from treadle.agent_loop.parsers.hermes import HermesFormat, HermesParser
from treadle.agent_loop.parsers.kimi import KimiFormat
from treadle.agent_loop.parsers.kimi_k3 import KimiK3Format
from treadle.agent_loop.parsers.lfm2 import Lfm2Format
from treadle.agent_loop.parsers.llama3_json import Llama3JsonFormat
from treadle.agent_loop.parsers.minimax import minimax_format
from treadle.agent_loop.parsers.minimax_m1 import MinimaxM1Format
from treadle.agent_loop.parsers.minimax_m3 import MinimaxM3Format
from treadle.agent_loop.parsers.mistral import MistralFormat
from treadle.agent_loop.parsers.qwen3_coder import Qwen3CoderFormat
from treadle.agent_loop.parsers.thinking import Thinking, UnclosedReasoning

_LINES = Thinking(lines=True)
_INLINE = Thinking()
_XTML = Thinking(open="<|open|>think<|sep|>", close="<|close|>think<|sep|>")
_COHERE = Thinking(open="<|START_THINKING|>", close="<|END_THINKING|>")
_CHANNEL = Thinking(open="<|channel>thought", close="<channel|>", lines=True, tight=True)
_NAMESPACED = Thinking(open="<mm:think>", close="</mm:think>")
_BRACKETS = Thinking(open="[THINK]", close="[/THINK]")


def _parser(
    calls: Callable[[], CallFormat],
    thinking: Thinking,
    *,
    separates: bool = True,
    frame: tuple[str, str] = ("", ""),
) -> "_Maker":
    def make(unclosed: UnclosedReasoning) -> ToolCallParser:
        return FormatParser(
            calls(), thinking=thinking, separates=separates, frame=frame, unclosed=unclosed
        )

    return make


_Maker = Callable[[UnclosedReasoning], ToolCallParser]
_MAKERS: Mapping[str, _Maker] = MappingProxyType(
    {
        "cohere_command3": _parser(CohereFormat, _COHERE, frame=RESPONSE),
        "cohere_command4": _parser(CohereFormat, _COHERE, frame=TEXT),
        "deepseek": _parser(DeepSeekFormat, _INLINE),
        "deepseek_v32": _parser(deepseek_v32_format, _INLINE),
        "gemma4": _parser(Gemma4Format, _CHANNEL),
        "glm": _parser(GlmFormat, _LINES),
        "gpt_oss": lambda unclosed: GptOssParser(unclosed=unclosed),
        "hermes": lambda unclosed: HermesParser(unclosed=unclosed),
        "kimi": _parser(KimiFormat, _INLINE),
        "kimi_k3": _parser(KimiK3Format, _XTML),
        "lfm2": _parser(Lfm2Format, _INLINE, separates=False),
        "lfm2_5": _parser(Lfm2Format, _INLINE),
        "llama3_json": _parser(Llama3JsonFormat, _INLINE, separates=False),
        "minimax": _parser(minimax_format, _LINES),
        "minimax_m1": _parser(MinimaxM1Format, _INLINE, separates=False),
        "minimax_m3": _parser(MinimaxM3Format, _NAMESPACED),
        "mistral": _parser(MistralFormat, _BRACKETS, separates=False),
        "qwen3": _parser(HermesFormat, _LINES),
        "qwen3_5": _parser(Qwen3CoderFormat, _LINES),
        "qwen3_coder": _parser(Qwen3CoderFormat, _INLINE, separates=False),
    }
)

PARSER_NAMES = tuple(_MAKERS)
"""The names of the parsers, sorted."""

PARSER_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "cohere": "cohere_command3",
        "deepseek_v3": "deepseek",
        "deepseek_v31": "deepseek",
        "deepseek_v4": "deepseek_v32",
        "deepseekv3": "deepseek",
        "deepseekv31": "deepseek",
        "deepseekv32": "deepseek_v32",
        "deepseekv4": "deepseek_v32",
        "glm45": "glm",
        "glm47": "glm",
        "gpt-oss": "gpt_oss",
        "kimi_k2": "kimi",
        "llama3": "llama3_json",
        "minimax-m2": "minimax",
        "minimax-m3": "minimax_m3",
        "minimax_m2": "minimax",
        "openai": "gpt_oss",
        "qwen": "hermes",
        "qwen25": "hermes",
        "qwen3_xml": "qwen3_coder",
    }
)
"""Names that vLLM and SGLang give to the same formats -> our name."""


def parser_named(
    name: str, *, unclosed: UnclosedReasoning = UnclosedReasoning.CALL
) -> ToolCallParser:
    """Returns the parser with this name.

    Args:
        name: One of `PARSER_NAMES` or `PARSER_ALIASES`.
        unclosed: The meaning of a call behind reasoning that was never closed.

    Raises:
        SetupError: There is no such parser.
    """
    make = _MAKERS.get(PARSER_ALIASES.get(name, name))
    if make is None:
        raise SetupError(f"there is no parser {name!r}; there are {', '.join(PARSER_NAMES)}")
    return make(unclosed)


@dataclass(frozen=True, slots=True)
class _Evidence:
    """Strings that a template of a parser's family contains.

    Attributes:
        name: Name of the parser; None if no parser reads the format.
        holds: All of these strings must be in the template.
    """

    name: str | None
    holds: tuple[str, ...]


_REASONING = "reasoning_content"
_EVIDENCE = (
    _Evidence("gpt_oss", ("<|channel|>", "<|call|>")),
    _Evidence("deepseek_v32", ("｜DSML｜", "invoke name=")),  # noqa: RUF001
    _Evidence("deepseek", ("<｜tool▁call▁begin｜>",)),  # noqa: RUF001
    _Evidence("kimi", ("<|tool_call_begin|>", "<|tool_call_argument_begin|>")),
    _Evidence("kimi_k3", ("<|open|>", "<|close|>", "'argument'", "'think'")),
    _Evidence("cohere_command4", ("<|START_ACTION|>", "<|START_TEXT|>")),
    _Evidence("cohere_command3", ("<|START_ACTION|>", "tool_name")),
    _Evidence("gemma4", ("<|tool_call>call:", "<tool_call|>")),
    # transformers gives the reasoning to Liquid's own template as `thinking`.
    _Evidence("lfm2_5", ("<|tool_call_start|>", "message.thinking")),
    _Evidence("lfm2_5", ("<|tool_call_start|>", _REASONING)),
    _Evidence("lfm2", ("<|tool_call_start|>",)),
    _Evidence("lfm2", ("<|tool_list_start|>", "<|tool_response_start|>")),
    _Evidence("lfm2", ("List of tools: [", "keep_past_thinking")),
    _Evidence("minimax", ("minimax:tool_call", "<invoke name=")),
    _Evidence("mistral", ("[TOOL_CALLS]",)),
    _Evidence("qwen3_5", ("<tool_call>", "<function=", "<parameter=", _REASONING)),
    _Evidence("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    _Evidence("glm", ("<tool_call>", "<arg_key>", "<arg_value>")),
    _Evidence("minimax_m1", ("<tool_calls>", "<beginning_of_sentence>ai", '"arguments": ')),
    _Evidence(None, ("<tool_calls>",)),
    _Evidence("minimax_m3", ("]<]minimax[>[", "<invoke name=")),
    _Evidence("qwen3", ("<tool_call>", '{"name": "', '"arguments": ', _REASONING)),
    _Evidence("hermes", ("<tool_call>", "name", "arguments")),
    _Evidence("llama3_json", ("<|eot_id|>", "ipython<|end_header_id|>", '"parameters": ')),
)


def parser_for_template(template: str) -> str | None:
    """Returns the name of the parser that fits a chat template, or None if none is known.

    The parser separates reasoning if the template does.
    """
    for evidence in _EVIDENCE:
        if all(text in template for text in evidence.holds):
            return evidence.name
    return None
