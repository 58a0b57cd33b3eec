"""Tests of the hermes parser."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.agent_loop import HermesParser, ToolCall
from treadle.agent_loop.parsers.base import FramingParser
from treadle.agent_loop.parsers.names import parser_named

PARSER = HermesParser()
text = st.text(st.characters(codec="utf-8"))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
tricky = st.sampled_from(["</tool_call>", "<tool_call>", '{"a', "\n", "```", "#### 4"])
names = text.filter(bool)
arguments = st.dictionaries(text | tricky, json_values | tricky, max_size=4)
prose = text.map(str.strip).filter(lambda t: "<tool_call>" not in t)


@settings(deadline=None, max_examples=60)
@given(prose, st.lists(st.tuples(names, arguments), max_size=3))
def test_what_is_rendered_is_parsed(
    content: str, pairs: list[tuple[str, dict[str, object]]]
) -> None:
    calls = tuple(
        ToolCall(id=f"call_{i}", name=name, arguments=arguments)
        for i, (name, arguments) in enumerate(pairs)
    )
    parsed = PARSER.parse(PARSER.render(content, calls))
    assert (parsed.content, parsed.calls, parsed.malformed) == (content, calls, ())
    assert len(parsed.call_starts) == len(calls)


fragments = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "{",
            "}",
            '"name"',
            ":",
            '"arguments"',
            '"x"',
            ",",
            "[",
            " ",
        ]
    )
    | text
)


@settings(deadline=None)
@given(fragments.map("".join))
def test_any_text_is_accepted_and_malformed_spans_point_into_it(junk: str) -> None:
    parsed = PARSER.parse(junk)
    for bad in parsed.malformed:
        assert junk[bad.start : bad.stop] == bad.text
        assert bad.text.startswith("<tool_call>")
        assert bad.reason
    for start in parsed.call_starts:
        assert junk.startswith("<tool_call>", start)
    if not parsed.calls:
        assert parsed.content == junk


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name": "f", "arguments": {"a": 1}', "Expecting ',' delimiter"),
        ('{"arguments": {}}', "the call has no 'name'"),
        ('{"name": "f"}', "the call has no 'arguments'"),
        ('{"name": "f", "arguments": [1]}', "'arguments' must be a JSON object, got an array"),
        ('{"name": "f", "arguments": "{}"}', "'arguments' must be a JSON object, got a string"),
        ('{"name": 3, "arguments": {}}', "'name' must be a string, got a number"),
        ('{"name": "f", "arguments": {}} {}', "extra data after the JSON object"),
        ('["f"]', "the call must be a JSON object, got an array"),
        ("f(1)", "Expecting value"),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN is not JSON"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "Out of range float"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "surrogates not allowed"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "}}", "nested too deeply"),
        # Python reads it, but could not pickle it.
        ('{"name": "f", "arguments": {"a": ' + "[" * 63 + "]" * 63 + "}}", "64 levels are taken"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "digits"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(body: str, reason: str) -> None:
    parsed = PARSER.parse(f"before <tool_call>\n{body}\n</tool_call> after")
    assert parsed.calls == ()
    (bad,) = parsed.malformed
    assert reason in bad.reason
    assert bad.text == f"<tool_call>\n{body}\n</tool_call>"


def test_the_name_of_a_malformed_call_is_found() -> None:
    (bad,) = PARSER.parse('<tool_call>{"name": "calc", "arguments": {</tool_call>').malformed
    assert bad.name == "calc"


def test_a_call_that_is_not_closed_is_malformed() -> None:
    (bad,) = PARSER.parse('<tool_call>\n{"name": "f", "arguments": {}}').malformed
    assert bad.reason == "the call is not closed by </tool_call>"


def test_a_mention_in_prose_is_prose() -> None:
    parsed = PARSER.parse("Use <tool_call> to call.")
    assert (parsed.content, parsed.malformed) == ("Use <tool_call> to call.", ())


def test_good_and_bad_calls_keep_their_order() -> None:
    good = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    bad = "<tool_call>{oops}</tool_call>"
    parsed = PARSER.parse(f"a {bad} b {good} c {good}")
    assert (parsed.malformed[0].id, [c.id for c in parsed.calls]) == (
        "call_0",
        ["call_1", "call_2"],
    )
    assert parsed.malformed[0].start < parsed.call_starts[0] < parsed.call_starts[1]
    assert parsed.content == f"a {bad} b  c"


def test_what_is_nested_and_not_too_deeply_is_read() -> None:
    deep = "[" * 62 + "]" * 62
    call = '<tool_call>{"name": "f", "arguments": {"a": %s}}</tool_call>' % deep  # noqa: UP031
    assert str(HermesParser().parse(call).calls[0].arguments["a"]) == deep


def test_a_frame_is_what_is_written_around_the_arguments() -> None:
    frame = HermesParser().call_frame('a"b')
    assert frame is not None
    arguments = {"x": "é"}
    call = ToolCall(id="1", name='a"b', arguments=arguments)
    written = frame.begin + json.dumps(arguments, ensure_ascii=False) + frame.end
    assert written == HermesParser().render("", [call])
    assert written.startswith(frame.trigger)
    other = parser_named("qwen3_coder")
    assert isinstance(other, FramingParser) and other.call_frame("f") is None
