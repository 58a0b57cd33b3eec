"""Messages in the form in which a chat template takes them.

Invariant: texts go in as they are; only their wrapping differs between templates.
"""

import hashlib
import json
import re
from dataclasses import dataclass

from treadle.agent_loop.types import Message, ToolCall

_NINE = re.compile(r"[a-zA-Z0-9]{9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """The form in which a template accepts messages.

    Attributes:
        parts: Contents are lists of parts, as in templates of models that see.
        arguments_as_text: A call's arguments are JSON text, not an object.
        nine_character_ids: Ids of calls have nine letters and digits (Mistral); others are hashed.
    """

    parts: bool = False
    arguments_as_text: bool = False
    nine_character_ids: bool = False

    def as_dict(self, message: Message) -> dict[str, object]:
        """Returns a message as `apply_chat_template` takes it."""
        content: object = message.content
        if message.images or self.parts:
            content = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
                for part in message.parts or ("",)
            ]
        entry: dict[str, object] = {"role": message.role, "content": content}
        if message.tool_calls:
            entry["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            entry["tool_call_id"] = self._id(message.tool_call_id)
        if message.name is not None:
            entry["name"] = message.name
        if message.reasoning is not None:
            entry["reasoning_content"] = message.reasoning
        return entry

    def _call(self, call: ToolCall) -> dict[str, object]:
        arguments: object = dict(call.arguments)
        if self.arguments_as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {
            "id": self._id(call.id),
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _id(self, call_id: str) -> str:
        if not self.nine_character_ids or _NINE.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]
