"""Conversions between LangChain's messages and this package's.

Invariant: `from_langchain(to_langchain(message))` keeps role, text, calls, the answered call,
reasoning and images. Other fields of a LangChain message (a sender's name, metadata) are not part
of a prompt and are dropped. Content that would be part of it and is not supported (audio, files)
is refused. Pure; nothing waits.
"""

import base64
import copy
from collections.abc import Mapping
from typing import TypeAlias, cast

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages import ToolCall as LangChainCall

from treadle.agent_loop.types import IMAGE_MARK, Image, Message, ToolCall

__all__ = ["from_langchain", "read_content", "to_langchain", "write_content"]

REASONING_KEY = "reasoning_content"
"""The key of the reasoning in `AIMessage.additional_kwargs`, as in LangChain's integrations."""

Content: TypeAlias = str | list[str | dict[str, object]]


def to_langchain(message: Message, *, id: str | None = None) -> BaseMessage:
    """Returns LangChain's message.

    Args:
        id: Id of the message in a graph's state. None means that the graph sets it.
    """
    content = write_content(message.content, message.images)
    match message.role:
        case "system":
            return SystemMessage(content=content, id=id)
        case "user":
            return HumanMessage(content=content, id=id)
        case "tool":
            # LangChain requires an id; the answer to a malformed call has none.
            call_id = message.tool_call_id or ""
            return ToolMessage(content=content, tool_call_id=call_id, name=message.name, id=id)
        case "assistant":
            reasoning = {} if message.reasoning is None else {REASONING_KEY: message.reasoning}
            calls = [
                LangChainCall(name=c.name, args=copy.deepcopy(dict(c.arguments)), id=c.id)
                for c in message.tool_calls
            ]
            return AIMessage(content=content, tool_calls=calls, additional_kwargs=reasoning, id=id)


def from_langchain(message: BaseMessage) -> Message:
    """Returns this package's message.

    Raises:
        TypeError: Chat templates have no such kind of message.
        ValueError: The content has parts other than text and images.
    """
    content, images = read_content(cast(Content, message.content))
    match message:
        case SystemMessage():
            return Message(role="system", content=content, images=images)
        case HumanMessage():
            return Message(role="user", content=content, images=images)
        case ToolMessage():
            return Message(
                role="tool",
                content=content,
                images=images,
                tool_call_id=message.tool_call_id or None,
                name=message.name,
            )
        case AIMessage():
            return Message(
                role="assistant",
                content=content,
                tool_calls=tuple(
                    ToolCall(id=c["id"] or "", name=c["name"], arguments=c["args"])
                    for c in message.tool_calls
                ),
                reasoning=message.additional_kwargs.get(REASONING_KEY),
            )
    raise TypeError(
        f"a {type(message).__name__} cannot be rendered by a chat template; use a SystemMessage, "
        "HumanMessage, AIMessage or ToolMessage"
    )


def write_content(text: str, images: tuple[Image, ...]) -> Content:
    """Returns the text; with images, a list of blocks with each image at its mark."""
    if not images:
        return text
    parts = text.split(IMAGE_MARK) if IMAGE_MARK in text else ["", *[""] * (len(images) - 1), text]
    blocks: list[str | dict[str, object]] = []
    for index, part in enumerate(parts):
        if index > 0:
            image = images[index - 1]
            data = base64.b64encode(image.data).decode("ascii")
            blocks.append({"type": "image", "base64": data, "mime_type": image.mime})
        if part:
            blocks.append({"type": "text", "text": part})
    return blocks


def read_content(content: Content) -> tuple[str, tuple[Image, ...]]:
    """Returns the text, with a mark per image, and the images.

    Raises:
        ValueError: A block is neither text nor a base64-encoded image.
    """
    if isinstance(content, str):
        return content, ()
    texts: list[str] = []
    images: list[Image] = []
    for block in content:
        if isinstance(block, str):
            texts.append(block)
        elif block.get("type") == "text":
            texts.append(str(block["text"]))
        else:
            images.append(_image(block))
            texts.append(IMAGE_MARK)
    return "".join(texts), tuple(images)


def _image(block: Mapping[str, object]) -> Image:
    match block:
        case {"type": "image", "base64": str(data), "mime_type": str(mime)}:
            return Image(data=base64.b64decode(data), mime=mime)
        case {"type": "image_url", "image_url": {"url": str(url)} | str(url)} if url.startswith(
            "data:"
        ):
            mime, _, data = url.removeprefix("data:").partition(";base64,")
            return Image(data=base64.b64decode(data), mime=mime)
    raise ValueError(
        f"a content block of type {block.get('type')!r} cannot be shown to the model; give text, "
        "or an image as base64 with its mime type (an image's address is not fetched)"
    )
