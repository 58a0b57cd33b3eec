"""Tool-call parsers: how a model family writes its calls as text. Pure; they never raise."""

from treadle.agent_loop.parsers.base import ParsedText, ToolCallParser
from treadle.agent_loop.parsers.hermes import HermesParser

__all__ = ["HermesParser", "ParsedText", "ToolCallParser"]
