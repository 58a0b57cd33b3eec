"""ReTool-SFT: demonstrations with a code interpreter -> messages with calls, for `treadle sft`.

The published set writes a whole conversation into one answer: `<code>` holds a program,
`<interpreter>` what it printed, `<answer>` the end. The result is what verl's
`recipe/retool/retool_sft_preprocess.py` makes: the old instruction is dropped, each program becomes
a call of `code_interpreter`, each output a message of the tool. All functions are pure.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["TOOLS", "make_row"]

TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "A tool for executing code.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The code to execute."}},
                "required": ["code"],
            },
        },
    }
]
"""The tools of each row: that of verl's sandbox_fusion_tool_config.yaml."""
_QUESTION = "*user question:*"
_FENCED = re.compile(r"```python(.*?)```", re.DOTALL)


def make_row(columns: Mapping[str, object], *, split: str, index: int) -> dict[str, object]:
    """Returns one row of the column `messages`: a question and an answer.

    `tools` is written as JSON text: as a column of mappings, Parquet would add nulls.

    Raises:
        ValueError: The messages have another form.
    """
    messages = columns["messages"]
    if not isinstance(messages, Sequence) or len(messages) < 2:
        raise ValueError(f"messages must be a question and an answer, got {messages!r:.80}")
    question, answer = (str(message["content"]) for message in messages[:2])
    _, mark, asked = question.partition(_QUESTION)
    if not mark:
        raise ValueError(f"the question has no {_QUESTION!r}: {question!r:.80}")
    asked = asked.replace("<answer>", "").replace("</answer>", "").strip()
    turns = [{"role": "user", "content": asked}, *_turns(answer)]
    return {"messages": turns, "tools": json.dumps(TOOLS)}


def _turns(text: str) -> list[dict[str, object]]:
    turns: list[dict[str, object]] = []
    while "<code>" in text:
        said, code, text = _cut(text, "code")
        if (fenced := _FENCED.search(code)) is not None:
            code = fenced[1].strip()
        # Arguments as JSON text, as OpenAI writes them: programs may be any text.
        function = {"name": "code_interpreter", "arguments": json.dumps({"code": code})}
        calls = [{"type": "function", "function": function}]
        turns.append({"role": "assistant", "content": said.strip(), "tool_calls": calls})
        between, output, text = _cut(text, "interpreter")
        if between.strip():
            raise ValueError(f"there is text between <code> and <interpreter>: {between!r:.80}")
        turns.append({"role": "tool", "content": output.strip()})
    said, answer, rest = _cut(text, "answer")
    if rest.strip():
        raise ValueError(f"there is text after </answer>: {rest!r:.80}")
    turns.append({"role": "assistant", "content": (said + answer).strip()})
    return turns


def _cut(text: str, tag: str) -> tuple[str, str, str]:
    """Returns what is before, in and after the first element of a tag."""
    before, opened, rest = text.partition(f"<{tag}>")
    inside, closed, after = rest.partition(f"</{tag}>")
    if not opened or not closed:
        raise ValueError(f"there is no <{tag}> with its end in {text!r:.80}")
    return before, inside, after
