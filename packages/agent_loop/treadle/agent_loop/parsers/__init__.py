"""Tool-call parsers: read the calls and the reasoning that a model family writes as text.

One module per family. Parsers are pure, work on decoded text only, and never raise.
"""

from treadle.agent_loop.parsers.base import ParsedText, ToolCallParser
from treadle.agent_loop.parsers.hermes import HermesParser
from treadle.agent_loop.parsers.names import (
    PARSER_ALIASES,
    PARSER_NAMES,
    parser_for_template,
    parser_named,
)
from treadle.agent_loop.parsers.thinking import UnclosedReasoning

__all__ = [
    "PARSER_ALIASES",
    "PARSER_NAMES",
    "HermesParser",
    "ParsedText",
    "ToolCallParser",
    "UnclosedReasoning",
    "parser_for_template",
    "parser_named",
]
