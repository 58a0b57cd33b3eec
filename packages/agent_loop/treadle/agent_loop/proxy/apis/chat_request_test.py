"""Requests and messages: what is read, and what is refused by name."""

import base64
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.agent_loop import AgentTask, Image, Message, ToolCall, ToolSpec
from treadle.agent_loop.proxy.allowances import AgentConstraints, Allowances
from treadle.agent_loop.proxy.apis.chat_request import NEUTRAL, read_request
from treadle.agent_loop.proxy.apis.common import AgentRequest
from treadle.agent_loop.proxy.errors import ApiError
from treadle.agent_loop.proxy.messages import MAX_VALUES, read_messages, written, written_task

USER = {"role": "user", "content": "u"}
PNG = "data:image/png;base64," + base64.b64encode(b"png").decode()


def read(**values: Any) -> AgentRequest:
    return read_request(json.dumps({"messages": [USER], **values}).encode(), Allowances())


def looking_at(url: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [part]}]}


def refusal(**values: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**values)
    assert caught.value.status == 400
    return caught.value


def test_1_everything_that_is_used() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "number"}}}
    function = {"name": "add", "description": "Adds.", "parameters": schema, "strict": False}
    assert read(
        model="any",
        tools=[{"type": "function", "function": function}],
        tool_choice="auto",
        parallel_tool_calls=True,
        max_tokens=5,
        max_completion_tokens=5,
        temperature=0,
        top_p=0.5,
        seed=3,
        stop="x",
        logprobs=True,
        top_logprobs=0,
        stream=True,
        stream_options={"include_usage": True},
        response_format={"type": "text"},
        metadata={"a": "b"},
    ) == AgentRequest(
        messages=(Message(role="user", content="u"),),
        tools=(ToolSpec(name="add", description="Adds.", parameters=schema),),
        max_tokens=5,
        temperature=0.0,
        top_p=0.5,
        seed=3,
        stop=("x",),
        logprobs=True,
        stream=True,
        include_usage=True,
    )


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_2_neutral_values_and_null_are_accepted(name: str) -> None:
    for value in (*NEUTRAL[name], None):
        assert read(**{name: value}) == read()
    assert refusal(**{name: "other"}).param == name


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"n": True}, "n"),
        ({"store": 0}, "store"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "tools[0].function.strict",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": "a"}]}, "messages[1]"),
        ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": "u", "tool_call_id": "c"}]},
            "messages[0].tool_call_id",
        ),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"messages": [{"role": "user", "content": ["u"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type",
        ),
        (looking_at("https://x.org/i.png"), "messages[0].content[0].image_url.url"),
        (looking_at("data:video/mp4;base64,AA=="), "messages[0].content[0].image_url.url"),
        (looking_at("data:image/png;base64,?"), "messages[0].content[0].image_url.url"),
    ],
)
def test_3_the_place_of_what_is_refused_is_named(values: dict[str, Any], param: str) -> None:
    error = refusal(**values)
    assert error.param == param
    assert str(error).startswith(f"{param}: ")


def test_a_number_out_of_bounds_is_told_both_bounds() -> None:
    assert "from 1 to 128, not 129" in str(refusal(n=129))


@pytest.mark.parametrize(
    ("call", "place"),
    [
        ({"id": "c", "function": {"name": "f", "arguments": "{"}}, "[0].function.arguments"),
        ({"id": "c", "function": {"name": "f", "arguments": "[]"}}, "[0].function.arguments"),
        (
            {"id": "c", "function": {"name": "f", "arguments": '{"a": NaN}'}},
            "[0].function.arguments",
        ),
        ({"id": 1, "function": {"name": "f", "arguments": "{}"}}, "[0]"),
        ({"id": "c", "type": "custom", "function": {}}, "[0].type"),
        (
            {"id": "c", "function": {"name": "f", "arguments": '"\\ud800"'}},
            "[0].function.arguments",
        ),
        ("f()", "[0]"),
    ],
)
def test_4_calls_that_cannot_be_rendered_are_refused(call: object, place: str) -> None:
    assistant = {"role": "assistant", "content": None, "tool_calls": [call]}
    error = refusal(messages=[USER, assistant, USER])
    assert error.param == f"messages[1].tool_calls{place}"


def test_5_messages_of_every_role() -> None:
    assert read_messages(
        [
            {"role": "developer", "content": [{"type": "text", "text": "s"}]},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "look: "},
                    {"type": "image_url", "image_url": {"url": PNG, "detail": "auto"}},
                    {"type": "text", "text": " there"},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "refusal": None,
                "annotations": [],
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
                ],
            },
            {"role": "tool", "content": "r", "tool_call_id": "c"},
        ],
        Allowances(),
    ) == (
        Message(role="system", content="s"),
        Message(
            role="user",
            content="look: <image> there",
            images=(Image(data=b"png", mime="image/png"),),
        ),
        Message(
            role="assistant",
            content="",
            reasoning="hm",
            tool_calls=(ToolCall(id="c", name="f", arguments={}),),
        ),
        Message(role="tool", content="r", tool_call_id="c"),
    )


def test_6_a_task_is_written_as_it_would_be_read() -> None:
    messages = (
        Message(role="system", content="s"),
        Message(
            role="user", content="<image>what?", images=(Image(data=b"png", mime="image/png"),)
        ),
        Message(
            role="assistant",
            content="",
            tool_calls=(ToolCall(id="c", name="f", arguments={"a": 1}),),
        ),
        Message(role="tool", content="r", tool_call_id="c"),
    )
    task = AgentTask(
        task_id="t",
        sample_index=0,
        rollout_index=2,
        loop="x",
        messages=messages,
        fields={"extra_info": {"index": 1}},
    )
    data = json.loads(json.dumps(written_task(task)))
    assert read_messages(data["messages"], Allowances()) == messages
    assert (data["task_id"], data["rollout_index"]) == ("t", 2)
    assert data["fields"] == {"extra_info": {"index": 1}}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
calls = st.builds(
    ToolCall,
    id=st.text(min_size=1, max_size=5),
    name=st.text(min_size=1, max_size=5),
    arguments=st.dictionaries(st.text(max_size=5), json_values, max_size=3),
)


@given(
    st.builds(
        Message,
        role=st.just("assistant"),
        content=st.text(max_size=10),
        tool_calls=st.lists(calls, max_size=2).map(tuple),
        reasoning=st.none() | st.text(min_size=1, max_size=5),
    )
)
def test_7_what_is_written_reads_as_it_was(message: Message) -> None:
    data = json.loads(json.dumps(written(message)))
    assert read_messages([data, USER], Allowances())[0] == message


names = st.sampled_from(["messages", "tools", "stop", "stream", "tool_choice", "n", "x", "seed"])


@given(st.dictionaries(names, json_values) | json_values)
def test_8_no_json_is_answered_with_anything_but_an_api_error(data: object) -> None:
    try:
        read_request(json.dumps(data).encode(), Allowances())
    except ApiError as error:
        assert error.status == 400
        assert json.dumps(error.body)


message_like = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "x"]) | json_values},
    optional={
        "content": json_values
        | st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"])})),
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {}, optional={"id": json_values, "function": json_values, "type": json_values}
            )
        )
        | json_values,
        "tool_call_id": json_values,
        "name": json_values,
        "reasoning": json_values,
    },
)


@given(st.lists(message_like, min_size=1, max_size=3))
def test_9_no_message_is_answered_with_anything_but_an_api_error(messages: list[object]) -> None:
    try:
        read_messages(messages, Allowances())
    except ApiError as error:
        assert error.param is not None
        assert error.param.startswith("messages")


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"a": NaN}', b'{"a": 1e999}', b'{"\\udC00": 1}', b"\xff", b"[" * 100_000],
)
def test_10_bodies_that_are_no_json_object_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="body: "):
        read_request(body, Allowances())


def test_11_whole_surrogates_are_text() -> None:
    (message,) = read_request(
        b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}', Allowances()
    ).messages
    assert message.content == "\N{GRINNING FACE}"


def told(allowed: Allowances) -> dict[str, float]:
    return {metric.name: metric.value for metric in allowed.metrics() if metric.value}


def test_constraints_are_counted_where_they_are_not_enforced() -> None:
    allowed = Allowances(AgentConstraints.IGNORE)
    function = {"name": "f", "strict": True}
    body = {
        "messages": [USER],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    }
    request = read_request(json.dumps(body).encode(), allowed)
    assert request == AgentRequest(
        messages=(Message(role="user", content="u"),), tools=(ToolSpec(name="f", description=""),)
    )
    named = {"type": "function", "function": {"name": "f"}}
    for choice in (named, "none"):
        read_request(json.dumps({**body, "tool_choice": choice}).encode(), allowed)
    kinds = ("parallel_tool_calls", "response_format", "strict", "tool_choice")
    assert told(allowed) == {f"proxy/unenforced_{kind}": 3.0 for kind in kinds}
    assert [finding.text for finding in allowed.findings()][2] == (
        "strict was asked for 3 times and not enforced; first as tools[0].function.strict"
    )
    for name, value in (("tool_choice", "any"), ("response_format", {"type": "x"}), ("n", 0)):
        with pytest.raises(ApiError, match=name):
            read_request(json.dumps({**body, name: value}).encode(), allowed)


def test_keys_of_a_history_that_nothing_reads_are_counted() -> None:
    allowed = Allowances()
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}, "extra_content": {"a": 1}}
    messages = [
        {**USER, "name": "me"},
        {"role": "assistant", "provider_specific_fields": {"x": 0}, "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "c"},
    ]
    without = json.loads(json.dumps(messages))
    del without[0]["name"], without[1]["provider_specific_fields"]
    del without[1]["tool_calls"][0]["extra_content"]
    assert read_messages(messages, allowed) == read_messages(without, Allowances())
    assert told(allowed) == {"proxy/ignored_keys": 3.0}
    (finding,) = allowed.findings()
    assert finding.text == "3 keys were ignored; the first was messages[0].name"


def test_what_clients_send_that_no_policy_in_training_reads_is_counted() -> None:
    """Found by reports: mini-swe-agent's `cache_control` was refused."""
    allowed = Allowances()
    cached = {"cache_control": {"type": "ephemeral"}}
    tool = {"type": "function", **cached, "function": {"name": "f", **cached}}
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **cached}]}],
        "tools": [tool],
        **{"reasoning_effort": "low", "verbosity": "low", "prompt_cache_retention": "24h"},
    }
    request = read_request(json.dumps(body).encode(), allowed)
    assert request.messages == (Message(role="user", content="hi"),)
    assert told(allowed) == {"proxy/ignored_keys": 5.0}


def test_tools_are_compared_once_each() -> None:
    def tools(names: list[str]) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": name}} for name in names]

    names = [f"a_tool_with_number_{i}" for i in range(10_000)]
    body = json.dumps({"messages": [USER], "tools": tools(names)}).encode()
    began = time.process_time()
    assert len(read_request(body, Allowances()).tools) == len(names)
    assert time.process_time() - began < 0.5  # Each with each, it took 1.5 s.
    twice = refusal(tools=tools([*names[:3], names[1]]))
    assert "more than one tool with the name 'a_tool_with_number_1'" in str(twice)


def test_a_request_of_too_many_values_is_not_parsed() -> None:
    body = b'{"messages": [' + b"[]," * MAX_VALUES + b"[]]}"
    with pytest.raises(ApiError, match="the request has more than 262144 JSON values") as caught:
        read_request(body, Allowances())
    assert caught.value.status == 413


def test_calls_of_too_many_values_are_not_parsed() -> None:
    """Within a string, values do not count as the request's."""
    half = json.dumps({"a": [[]] * (MAX_VALUES // 2)})
    calls = [{"id": i, "function": {"name": "f", "arguments": half}} for i in ("a", "b")]
    user, assistant = {"role": "user", "content": ","}, {"role": "assistant", "tool_calls": calls}
    body = json.dumps({"messages": [assistant, user]}).encode()
    with pytest.raises(ApiError, match="the arguments of the calls have more than") as caught:
        read_request(body, Allowances())
    assert caught.value.status == 413


def test_a_text_may_look_like_any_number_of_values() -> None:
    text = '"[{,\\' * MAX_VALUES
    assert read(messages=[{"role": "user", "content": text}]).messages[0].content == text
