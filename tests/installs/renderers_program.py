"""What the renderers of Tinker's cookbook make of chats; runs in an environment that has it.

Each line of standard input is JSON: a folder with a `tokenizer`, the name of a `renderer`, and
`chats`, each with `messages` and `tools` as a chat template takes them. The answer is a line with
one value per chat: the ids of the prompt for the next turn, or the text of an error.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tinker_cookbook import renderers
from transformers import AutoTokenizer


def _message(given: Mapping[str, Any]) -> Any:
    message: Any = {"role": given["role"], "content": given["content"]}
    if thought := given.get("reasoning_content"):
        message["content"] = [
            renderers.ThinkingPart(type="thinking", thinking=thought),
            renderers.TextPart(type="text", text=given["content"]),
        ]
    message |= {name: given[name] for name in ("tool_call_id", "name") if given.get(name)}
    if calls := given.get("tool_calls"):
        message["tool_calls"] = [
            renderers.ToolCall(
                id=call["id"],
                function=renderers.ToolCall.FunctionBody(
                    name=call["function"]["name"],
                    arguments=json.dumps(call["function"]["arguments"]),
                ),
            )
            for call in calls
        ]
    return message


def _prompt(renderer: Any, chat: Mapping[str, Any]) -> Sequence[int] | str:
    messages = [_message(each) for each in chat["messages"]]
    try:
        if chat["tools"]:
            system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
            tools = [each["function"] for each in chat["tools"]]
            messages = [*renderer.create_conversation_prefix_with_tools(tools, system), *messages]
        ids: Sequence[int] = renderer.build_generation_prompt(messages).to_ints()
        return ids
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Answers lines until they end."""
    load = cache(lambda folder: AutoTokenizer.from_pretrained(folder, local_files_only=True))
    for line in sys.stdin:
        given = json.loads(line)
        renderer = renderers.get_renderer(given["renderer"], load(given["tokenizer"]))
        sys.stdout.write(json.dumps([_prompt(renderer, chat) for chat in given["chats"]]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
