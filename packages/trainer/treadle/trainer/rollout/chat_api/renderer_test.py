"""Messages as ids, and back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.agent_loop import Image, MalformedCall, Message, ToolCall, ToolSpec
from treadle.trainer.rollout.chat_api.renderer import ApiRenderer, Reply

_TOOL = ToolSpec(name="add", description="adds")
_USER = Message(role="user", content="2 + 2?")


@given(st.text(), st.text(), st.lists(st.text(), max_size=3))
def test_a_request_has_exactly_the_messages_and_replies_of_a_conversation(
    question: str, content: str, results: list[str]
) -> None:
    renderer = ApiRenderer()
    ids = list(renderer.render([Message(role="user", content=question)], tools=[_TOOL]).ids)
    reply = Reply(content=content, calls=(("add", "{}"),) * len(results), num_tokens=7)
    sampled = renderer.add(reply)
    assert len(sampled) == 7
    requests = renderer.parse(sampled).requests
    ids += sampled
    answers = [
        Message(role="tool", content=result, tool_call_id=request.id)
        for request, result in zip(requests, results, strict=True)
    ]
    ids += renderer.extend(ids, answers, tools=[_TOOL]).ids
    messages, tools = renderer.request(ids, ())
    assert tools == [_TOOL.as_schema()]
    asked, said, *answered = messages
    assert asked == {"role": "user", "content": question}
    assert said["content"] == content
    called = [call["id"] for call in said.get("tool_calls", ())]
    assert [(each["tool_call_id"], each["content"]) for each in answered] == list(
        zip(called, results, strict=True)
    )


@given(st.text())
def test_text_is_read_from_its_ids(text: str) -> None:
    renderer = ApiRenderer()
    assert renderer.decode(renderer.encode(text)) == text


def test_a_conversation_that_is_rendered_again_has_the_same_ids() -> None:
    renderer = ApiRenderer()
    ids = renderer.render([_USER], tools=()).ids
    sampled = renderer.add(
        Reply(content="so", reasoning="hm", calls=(("add", '{"a": 2}'),), num_tokens=9)
    )
    parsed = renderer.parse(sampled)
    assert parsed.message.reasoning == "hm"
    assert parsed.message.tool_calls == (ToolCall(id="call_0_0", name="add", arguments={"a": 2}),)
    assert renderer.render([_USER, parsed.message], tools=()).ids == (*ids, *sampled)


@pytest.mark.parametrize("arguments", ["{", "[1]", '"a"', "[" * 100_000])
def test_arguments_that_are_no_object_are_a_malformed_call_that_can_be_answered(
    arguments: str,
) -> None:
    renderer = ApiRenderer()
    sampled = renderer.add(Reply(content="so", calls=(("add", "{}"), ("add", arguments))))
    good, bad = renderer.parse(sampled).requests
    assert isinstance(good, ToolCall)
    assert isinstance(bad, MalformedCall)
    assert renderer.decode(sampled)[bad.start : bad.stop] == f"\nadd({arguments})"
    messages, _ = renderer.request(sampled, ())
    sent = messages[0]["tool_calls"]
    assert [call["id"] for call in sent] == [good.id, bad.id]
    assert sent[1]["function"]["arguments"] == arguments


def test_an_assistant_message_of_a_row_and_an_image_are_sent() -> None:
    renderer = ApiRenderer()
    calls = (ToolCall(id="c", name="add", arguments={"a": 1}),)
    image = Image(data=b"png", mime="image/png")
    rendered = renderer.render(
        [
            Message(role="assistant", content="", tool_calls=calls),
            Message(role="user", content="see <image> there", images=(image,)),
        ],
        tools=(),
    )
    (said, seen), _ = renderer.request(rendered.ids, rendered.images)
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert [part["type"] for part in seen["content"]] == ["text", "image_url", "text"]
    assert seen["content"][1]["image_url"]["url"] == "data:image/png;base64,cG5n"


def test_a_message_is_not_sent_with_the_malformed_calls_of_another_conversations_reply() -> None:
    renderer = ApiRenderer()
    sampled = renderer.add(Reply(content="42", calls=(("add", "{bad"),)))
    shown = renderer.render([_USER, Message(role="assistant", content="42")], tools=()).ids
    messages, _ = renderer.request(shown, ())
    assert messages[1] == {"role": "assistant", "content": "42"}
    # Its own conversation does not drift by that.
    said = renderer.parse(sampled).message
    again = renderer.render_again([said], tools=(), ids=sampled, written=())
    assert again.ids == sampled
