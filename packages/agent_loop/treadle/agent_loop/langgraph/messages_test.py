import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from treadle.agent_loop import Image, Message, ToolCall
from treadle.agent_loop.langgraph import from_langchain, to_langchain

_text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
_names = st.text("abc_", min_size=1, max_size=5)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=5,
)
_calls = st.lists(
    st.builds(ToolCall, id=_names, name=_names, arguments=st.dictionaries(_text, _json)),
    max_size=3,
)
_messages = st.one_of(
    st.builds(Message, role=st.sampled_from(["system", "user"]), content=_text),
    st.builds(
        Message,
        role=st.just("assistant"),
        content=_text,
        tool_calls=_calls.map(tuple),
        reasoning=st.none() | _text,
    ),
    st.builds(
        Message,
        role=st.just("tool"),
        content=_text,
        tool_call_id=st.none() | _names,
        name=st.none() | _names,
    ),
)


@given(_messages)
def test_there_and_back(message: Message) -> None:
    assert from_langchain(to_langchain(message)) == message


def test_the_kinds_and_the_id() -> None:
    kinds = {
        "system": SystemMessage,
        "user": HumanMessage,
        "assistant": AIMessage,
        "tool": ToolMessage,
    }
    for role, kind in kinds.items():
        message = to_langchain(Message(role=role, content="x"), id="7")  # type: ignore[arg-type]
        assert type(message) is kind
        assert message.id == "7"


def test_arguments_are_a_copy() -> None:
    nested = {"list": [1]}
    call = ToolCall(id="c", name="f", arguments=nested)
    message = to_langchain(Message(role="assistant", content="", tool_calls=(call,)))
    assert isinstance(message, AIMessage)
    message.tool_calls[0]["args"]["list"].append(2)
    assert nested == {"list": [1]}


_PNG = Image(data=b"png bytes", mime="image/png")
_JPEG = Image(data=b"jpeg bytes", mime="image/jpeg")


def test_images_stand_at_their_marks() -> None:
    message = Message(role="user", content="a <image> b<image>", images=(_PNG, _JPEG))
    shown = to_langchain(message)
    assert [block["type"] for block in shown.content if isinstance(block, dict)] == [
        "text",
        "image",
        "text",
        "image",
    ]
    assert from_langchain(shown) == message


def test_images_without_marks_come_first() -> None:
    message = Message(role="tool", content="seen", images=(_PNG, _JPEG))
    assert from_langchain(to_langchain(message)) == Message(
        role="tool", content="<image><image>seen", images=(_PNG, _JPEG)
    )


def test_openais_image_blocks_are_read() -> None:
    data = base64.b64encode(b"png bytes").decode()
    url = f"data:image/png;base64,{data}"
    for given_url in ({"url": url}, url):
        message = HumanMessage(["look: ", {"type": "image_url", "image_url": given_url}])
        assert from_langchain(message) == Message(
            role="user", content="look: <image>", images=(_PNG,)
        )


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "audio", "base64": "AAAA", "mime_type": "audio/wav"},
    ],
)
def test_what_cannot_be_shown_is_refused(block: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"type '{block['type']}' cannot be shown to the model"):
        from_langchain(HumanMessage([block]))


def test_video_is_refused() -> None:
    block = {"type": "image", "base64": "AAAA", "mime_type": "video/mp4"}
    with pytest.raises(ValueError, match="video is not supported"):
        from_langchain(HumanMessage([block]))


def test_a_message_without_a_place_in_templates_is_refused() -> None:
    message: BaseMessage = FunctionMessage(content="x", name="f")
    with pytest.raises(TypeError, match="a FunctionMessage cannot be rendered by a chat template"):
        from_langchain(message)
