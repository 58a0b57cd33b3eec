"""The parsers by name, and the choice of a parser for a chat template.

Invariant: every name stands for one format of calls and, for families whose templates separate
reasoning, its marks. If a template does not separate reasoning, the parser leaves it in the
content, so that nothing is lost when a message is rendered again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from treadle.agent_loop.errors import SetupError
from treadle.agent_loop.parsers.base import ToolCallParser
from treadle.agent_loop.parsers.deepseek import DeepSeekFormat
from treadle.agent_loop.parsers.deepseek_v32 import deepseek_v32_format
from treadle.agent_loop.parsers.format_parser import FormatParser
from treadle.agent_loop.parsers.glm import GlmFormat
from treadle.agent_loop.parsers.gpt_oss import GptOssParser
from treadle.agent_loop.parsers.hermes import HermesFormat, HermesParser
from treadle.agent_loop.parsers.kimi import KimiFormat
from treadle.agent_loop.parsers.kimi_k3 import KimiK3Format
from treadle.agent_loop.parsers.llama3_json import Llama3JsonFormat
from treadle.agent_loop.parsers.minimax import minimax_format
from treadle.agent_loop.parsers.mistral import MistralFormat
from treadle.agent_loop.parsers.qwen3_coder import Qwen3CoderFormat
from treadle.agent_loop.parsers.thinking import Thinking

_LINES = Thinking(lines=True)
_INLINE = Thinking()
_XTML = Thinking(open="<|open|>think<|sep|>", close="<|close|>think<|sep|>")

_MAKERS: Mapping[str, Callable[[], ToolCallParser]] = MappingProxyType(
    {
        "deepseek": lambda: FormatParser(DeepSeekFormat(), thinking=_INLINE),
        "deepseek_v32": lambda: FormatParser(deepseek_v32_format(), thinking=_INLINE),
        "glm": lambda: FormatParser(GlmFormat(), thinking=_LINES),
        "gpt_oss": GptOssParser,
        "hermes": HermesParser,
        "kimi": lambda: FormatParser(KimiFormat(), thinking=_INLINE),
        "kimi_k3": lambda: FormatParser(KimiK3Format(), thinking=_XTML),
        "llama3_json": lambda: FormatParser(Llama3JsonFormat()),
        "minimax": lambda: FormatParser(minimax_format(), thinking=_LINES),
        "mistral": lambda: FormatParser(MistralFormat()),
        "qwen3": lambda: FormatParser(HermesFormat(), thinking=_LINES),
        "qwen3_5": lambda: FormatParser(Qwen3CoderFormat(), thinking=_LINES),
        "qwen3_coder": lambda: FormatParser(Qwen3CoderFormat()),
    }
)

PARSER_NAMES = tuple(_MAKERS)
"""The names that `parser_named` accepts, sorted."""


def parser_named(name: str) -> ToolCallParser:
    """Returns the parser with this name.

    Raises:
        SetupError: There is no such parser.
    """
    make = _MAKERS.get(name)
    if make is None:
        raise SetupError(f"there is no parser {name!r}; there are {', '.join(PARSER_NAMES)}")
    return make()


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
    _Evidence("minimax", ("minimax:tool_call", "<invoke name=")),
    _Evidence("mistral", ("[TOOL_CALLS]",)),
    _Evidence("qwen3_5", ("<tool_call>", "<function=", "<parameter=", _REASONING)),
    _Evidence("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    _Evidence("glm", ("<tool_call>", "<arg_key>", "<arg_value>")),
    _Evidence(None, ("<tool_calls>",)),
    _Evidence(None, ("]<]minimax[>[",)),
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
