"""The format of Cohere's Command models: a JSON list of calls, and marks around the answer.

    <|START_THINKING|>...<|END_THINKING|><|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Rome"}}
    ]<|END_ACTION|>

Command R7B and Command A write an answer between `<|START_RESPONSE|>` and `<|END_RESPONSE|>`; later
models between `<|START_TEXT|>` and `<|END_TEXT|>`. Both are read. Invariant: an id is kept as the
model wrote it; the marks of the answer are not content, and may be missing.
"""

from collections.abc import Sequence

from treadle.agent_loop.parsers.json_list import ItemKeys, read_list
from treadle.agent_loop.parsers.json_text import write_json
from treadle.agent_loop.parsers.scan import Scan
from treadle.agent_loop.parsers.schema_values import Schemas
from treadle.agent_loop.types import ToolCall

RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
TEXT = ("<|START_TEXT|>", "<|END_TEXT|>")
_OPEN, _CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
_KEYS = ItemKeys(name="tool_name", arguments="parameters", id="tool_call_id")


class CohereFormat:
    """Cohere tool calls."""

    stop_tokens: tuple[str, ...] = ()
    marks: tuple[str, ...] = (_OPEN, *RESPONSE, *TEXT, _CLOSE)
    element: tuple[str, str] | None = (r"<\|START_(ACTION|RESPONSE|TEXT)\|>", r"<|END_\1|>")
    leads: tuple[str, ...] = ()
    gap = ""

    def new_id(self, number: int, name: str) -> str:
        """As in `CallFormat`; the templates number the calls."""
        return str(number)

    def read(self, scan: Scan, schemas: Schemas) -> None:
        """As in `CallFormat`."""
        frames = (*RESPONSE, *TEXT, _CLOSE)
        while (start := scan.find_first(scan.position, _OPEN, *frames)) >= 0:
            for frame in frames:
                if scan.text.startswith(frame, start):
                    scan.frame(start, start + len(frame))
                    break
            else:
                body = scan.skip_space(start + len(_OPEN))
                read_list(scan, start, body, _CLOSE, _OPEN, keys=_KEYS)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """As in `CallFormat`."""
        items = (
            {"tool_call_id": call.id, "tool_name": call.name, "parameters": dict(call.arguments)}
            for call in calls
        )
        lines = ",\n".join(f"    {write_json(item)}" for item in items)
        return f"{_OPEN}[\n{lines}\n]{_CLOSE}"
