"""What holds for every parser: it reads what templates write and any junk, in linear time."""

# ruff: noqa: RUF001 - the bars are the model's

from collections.abc import Iterator, Mapping
from typing import SupportsIndex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.agent_loop import SetupError, ToolCall, ToolSpec
from treadle.agent_loop.parsers import (
    PARSER_ALIASES,
    PARSER_NAMES,
    ParsedText,
    parser_for_template,
    parser_named,
)
from treadle.agent_loop.parsers.base import StreamingParser, ToolCallParser
from treadle.agent_loop.parsers.testing import ARGUMENTS, REASONING, SAMPLES, TOOL, Sample

every_parser = pytest.mark.parametrize("name", PARSER_NAMES)
# These write elements, braces or Python; an error must speak of what they write.
NOT_JSON = (
    *("deepseek_v32", "gemma4", "glm", "kimi_k3", "lfm2", "lfm2_5", "minimax", "minimax_m3"),
    *("qwen3_5", "qwen3_coder"),
)
THINKING = tuple(n for n in PARSER_NAMES if parser_named(n).parse("x").reasoning is not None)

FRAMING = ("cohere_command3", "cohere_command4", "gpt_oss", "kimi_k3")  # content is in marks
ITEMS = ("{", "<invoke", "<｜DSML｜", "<|start|>", "]<]minimax[>[<invoke", "get_weather(")
FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<function=f>", "<parameter=a>", "</parameter>"),
    *("</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<minimax:tool_call>", '<invoke name="f">', '<parameter name="a">', "</invoke>"),
    *("</minimax:tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜function_calls>"),
    *('<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>", "</｜DSML｜invoke>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|python_tag|>", ";"),
    *("<|start|>", "assistant", "<|channel|>", "analysis", "commentary", " to=functions.f"),
    *('<|open|>call tool="f" index="1"<|sep|>', "<|close|>call<|sep|>", "<|open|>tools<|sep|>"),
    *('<|open|>argument key="a" type="number"<|sep|>', "<|close|>argument<|sep|>"),
    *("<|open|>response<|sep|>", "<|close|>think<|sep|>", "<|open|>think<|sep|>"),
    *("<tool_calls>", "</tool_calls>", "]<]minimax[>[", "<tool_call>", "<a>", "</a>", "<item>"),
    *("]<]minimax[>[<tool_call>", ']<]minimax[>[<invoke name="f">', "]<]minimax[>[<a>"),
    *("]<]minimax[>[</a>", "]<]minimax[>[</invoke>", "<mm:think>", "</mm:think>"),
    *("<|tool_call>call:f{", "<tool_call|>", '<|"|>', "a:", "<|channel>thought", "<channel|>"),
    *("<|START_ACTION|>", "<|END_ACTION|>", '"tool_name": "f", ', "<|START_TEXT|>"),
    *("<|START_THINKING|>", "<|END_THINKING|>", "<|END_RESPONSE|>", "<|tool_call_start|>"),
    *("<|tool_call_end|>", "f(", "a=", ")", "'", "True"),
    *("<|message|>", "<|end|>", "<|call|>", "```json\n", "```", '"name": "f", '),
    *('"parameters": ', '"arguments": ', "{", "}", "[", "]", '"', "\\", ",", " ", "\n", "f", "1"),
)

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,12}", fullmatch=True)
plain = st.text(st.characters(codec="utf-8", exclude_characters="<>{}[]")).map(str.strip)
texts = st.text(st.characters(codec="utf-8", exclude_characters="<")) | st.sampled_from(
    ["3", "true", "null", '"3"', "{}", "\n", " ", "a\nb\n", "```"]
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(names, values, max_size=4)
junk = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3)).map("".join)


def spec_of(name: str, given_arguments: Mapping[str, object]) -> ToolSpec:
    """A tool whose schema says of each argument what it is."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    properties = {
        key: {"type": "null" if value is None else kinds.get(type(value), "object")}
        for key, value in given_arguments.items()
    }
    return ToolSpec(
        name=name, description="", parameters={"type": "object", "properties": properties}
    )


def calls_of(parsed: ParsedText) -> list[tuple[str, dict[str, object]]]:
    return [(call.name, dict(call.arguments)) for call in parsed.calls]


@every_parser
@settings(deadline=None, max_examples=40)
@given(content=plain, wanted=st.dictionaries(names, arguments, max_size=3), thought=plain)
def test_what_is_rendered_is_parsed(
    name: str, content: str, wanted: dict[str, dict[str, object]], thought: str
) -> None:
    parser = parser_named(name)
    tools = [spec_of(tool, given_arguments) for tool, given_arguments in wanted.items()]
    calls = tuple(
        ToolCall(
            id=f"functions.{tool}:{i}" if name == "kimi" else f"call_{i}", name=tool, arguments=a
        )
        for i, (tool, a) in enumerate(wanted.items())
    )
    thought = thought if name in THINKING else ""
    text = parser.render(content, calls, reasoning=thought)
    parsed = parser.parse(text, tools=tools, prompt_end="assistant\n")
    assert calls_of(parsed) == list(wanted.items())
    assert (parsed.content, parsed.malformed) == (content, ())
    assert (parsed.reasoning or "") == thought
    if name != "mistral" or calls:
        assert [call.id for call in parsed.calls] == [call.id for call in calls]
    assert list(parsed.call_starts) == sorted(set(parsed.call_starts))


@every_parser
@settings(deadline=None, max_examples=40)
@given(text=junk, prompt_end=st.sampled_from(["", "assistant\n", "<think>\n"]))
def test_what_is_settled_stays_whatever_follows(name: str, text: str, prompt_end: str) -> None:
    parser = parser_named(name)
    assert isinstance(parser, StreamingParser)
    parsed = parser.parse(text, prompt_end=prompt_end)
    for size in range(len(text) + 1):
        so_far = parser.settled(text[:size], prompt_end=prompt_end)
        assert (parsed.reasoning or "").startswith(so_far.reasoning)
        begins = so_far.content.lstrip() if parsed.calls else so_far.content
        assert parsed.content.startswith(begins)


_FRAMED = ("kimi_k3", "cohere_command3", "cohere_command4")
"""Their content has marks around it, and comes at the end."""


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.parser}-{sample.models}")
def test_the_text_before_the_calls_is_settled_as_it_comes(sample: Sample) -> None:
    parser = parser_named(sample.parser)
    assert isinstance(parser, StreamingParser)
    before = sample.text[: sample.text.index(sample.first)]
    settled = [
        parser.settled(before[:size], prompt_end=sample.prompt_end)
        for size in range(len(before) + 1)
    ]
    assert settled[-1].reasoning == (sample.reasoning or "")
    if sample.parser not in _FRAMED:
        assert settled[-1].content == sample.content
        assert len({one.content for one in settled}) > len(sample.content) // 2


@every_parser
@settings(deadline=None, max_examples=150)
@given(text=junk, prompt_end=st.sampled_from(["", "assistant\n", "<think>\n"]))
def test_any_text_is_accepted_and_spans_point_into_it(
    name: str, text: str, prompt_end: str
) -> None:
    parsed = parser_named(name).parse(text, tools=[TOOL], prompt_end=prompt_end)
    spans = [(bad.start, bad.stop) for bad in parsed.malformed]
    for bad in parsed.malformed:
        assert text[bad.start : bad.stop] == bad.text
        assert bad.text
        assert bad.reason
        assert bad.text in parsed.content or parsed.calls
    starts = [*parsed.call_starts, *(start for start, _ in spans)]
    assert len(set(starts)) == len(starts) == len(parsed.calls) + len(spans)
    assert all(not any(a < start < b for start in starts) for a, b in spans)
    ids = [*(call.id for call in parsed.calls), *(bad.id for bad in parsed.malformed)]
    assert len(set(ids)) == len(ids)
    assert all(call.name for call in parsed.calls)
    assert (parsed.reasoning is None) == (name not in THINKING)
    if not parsed.calls and name not in FRAMING:
        assert text.endswith(parsed.content)
        assert parsed.reasoning or parsed.content == text or name in THINKING


class Counting(str):
    """A text that counts the characters that are looked at."""

    seen = 0

    def find(self, sub: str, *place: SupportsIndex | None) -> int:
        found = super().find(sub, *place)
        Counting.seen += (len(self) if found < 0 else found) - int(place[0] or 0 if place else 0)
        return found

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        part = super().__getitem__(key)
        Counting.seen += len(part)
        return part

    def count(self, *args: object) -> int:
        start, stop = args[1:] or (0, len(self))
        Counting.seen += int(stop) - int(start)  # type: ignore[call-overload]
        return super().count(*args)  # type: ignore[arg-type]


def stuck_texts(parser: ToolCallParser) -> Iterator[str]:
    """What a model says that is stuck; some of it is closed far away."""
    calls = [sample.text for sample in SAMPLES]
    thinking = getattr(parser, "thinking", None)
    if thinking is not None:  # reasoning that begins within a call, and is not closed
        for sample in SAMPLES:
            yield sample.text.replace(sample.first, sample.first + thinking.open) * 200
    halves = [text[: len(text) // 2] for text in calls] + [
        text[: -len(text) // 4] for text in calls
    ]
    for unit in (*FRAGMENTS, *calls, *halves):
        yield unit * 200
    for mark in ("<tool_call>", "<function=f><parameter=a>", "<tool_call>f<arg_key>a</arg_key>"):
        for end in ("</tool_call>", "</parameter>", "</function>", "</arg_value>"):
            yield mark * 200 + end
            yield f"{mark}{end}" * 200


@every_parser
def test_time_is_linear_for_a_model_that_is_stuck(name: str) -> None:
    parser = parser_named(name)
    for text in stuck_texts(parser):
        Counting.seen = 0
        parser.parse(Counting(text), tools=[TOOL], prompt_end="x")
        assert Counting.seen < 20 * len(text), (text[:80], Counting.seen / len(text))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: f"{s.parser}-{s.models}")
def test_what_templates_write_is_read(sample: Sample) -> None:
    parsed = parser_named(sample.parser).parse(
        sample.text, tools=[TOOL], prompt_end=sample.prompt_end
    )
    assert calls_of(parsed) == [(TOOL.name, arguments) for arguments in sample.calls]
    assert (parsed.content, parsed.malformed) == (sample.content, ())
    assert parsed.reasoning == sample.reasoning
    assert sample.text[parsed.call_starts[0] :].startswith(sample.first)


def test_every_parser_has_a_sample() -> None:
    assert {sample.parser for sample in SAMPLES} == set(PARSER_NAMES)
    assert any(sample.calls == (ARGUMENTS,) for sample in SAMPLES)
    assert {s.parser for s in SAMPLES if s.reasoning == REASONING} == set(THINKING)


def test_names_are_sorted_and_an_unknown_one_is_refused() -> None:
    assert list(PARSER_NAMES) == sorted(PARSER_NAMES)
    with pytest.raises(SetupError, match="no parser 'qwen26'; there are cohere_command3, "):
        parser_named("qwen26")


@pytest.mark.parametrize(("alias", "name"), PARSER_ALIASES.items())
def test_names_of_engines_mean_the_same_formats(alias: str, name: str) -> None:
    assert alias not in PARSER_NAMES
    sample = next(s for s in SAMPLES if s.parser == name)
    parsed = parser_named(alias).parse(sample.text, tools=[TOOL], prompt_end=sample.prompt_end)
    assert calls_of(parsed) == [(TOOL.name, arguments) for arguments in sample.calls]


@pytest.mark.parametrize("name", NOT_JSON)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_model_that_writes_no_json_is_not_told_of_json(name: str, data: st.DataObject) -> None:
    """A turn with a part of it missing, doubled, or replaced by junk."""
    sample = data.draw(st.sampled_from([s for s in SAMPLES if s.parser == name]))
    start = data.draw(st.integers(0, len(sample.text)))
    stop = data.draw(st.integers(start, min(start + 40, len(sample.text))))
    put = data.draw(junk | st.just(sample.text[start:stop] * 2))
    text = sample.text[:start] + put + sample.text[stop:]
    for bad in parser_named(name).parse(text, tools=[TOOL], prompt_end="x").malformed:
        assert "json" not in bad.reason.replace(repr(put), "").lower().replace("```json", "")


@pytest.mark.parametrize("name", [n for n in PARSER_NAMES if n not in THINKING])
def test_reasoning_is_refused_where_none_is_known(name: str) -> None:
    with pytest.raises(ValueError, match="put it in the content"):
        parser_named(name).render("", (), reasoning="so")


TEMPLATES = {
    "cohere_command3": '<|START_ACTION|>[ {"tool_call_id": "0", "tool_name": "{{ name }}"}',
    "cohere_command4": '<|START_ACTION|>[ {"tool_name": "{{ name }}"}<|START_TEXT|>{{ msg }}',
    "deepseek": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'}}",
    "deepseek_v32": "{{'<' + '｜DSML｜' + 'invoke name=\"' + func['name'] + '\">\\n'}}",
    "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' -}}{{- '}<tool_call|>' -}}",
    "glm": "{{ '\\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}",
    "gpt_oss": "<|start|>assistant<|channel|>final<|message|>{{ x }}<|call|>",
    "hermes": '{{- \'<tool_call>\\n{"name": "\' }}{{- name }}{{- \'", "arguments": \' }}',
    "kimi": "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}",
    "kimi_k3": "'<|open|>' + tag {{ open_tag('think') }}{{ open_tag('argument') }}'<|close|>'",
    "lfm2": "List of tools: <|tool_list_start|>[{{ tools }}]<|tool_response_start|>{{ content }}",
    "lfm2_5": '{{- "<think>" + reasoning_content -}}{{- "<|tool_call_start|>[" -}}',
    "llama3_json": "<|start_header_id|>ipython<|end_header_id|>{{ '\"parameters\": ' }}<|eot_id|>",
    "minimax": "{%- set begin = '<minimax:tool_call>' -%}{{- '<invoke name=\"' + name + '\">' }}",
    "minimax_m1": "<beginning_of_sentence>ai name=assistant <tool_calls>{{ '\"arguments\": ' }}",
    "minimax_m3": "{% set ns = ']<]minimax[>[' %}{{ ns + '<invoke name=\"' + name + '\">' }}",
    "mistral": '{{ "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}',
    "qwen3": '{{ reasoning_content }}<tool_call>\n{"name": "\' }}{{- \'", "arguments": \' }}',
    "qwen3_5": "{{ reasoning_content }}'<tool_call>\\n<function=' + name '<parameter=' + key",
    "qwen3_coder": "{{ '<tool_call>\\n<function=' + name + '>' }}{{ '<parameter=' + key + '>' }}",
}


@every_parser
def test_a_template_names_its_parser(name: str) -> None:
    assert parser_for_template(TEMPLATES[name]) == name


@pytest.mark.parametrize(
    "template",
    [
        "{{ message.role }}: {{ message.content }}",
        '{{ "<tool_calls>[" }}{"name": "x", "arguments": {}}<tool_call>',
    ],
)
def test_a_template_of_no_known_format_names_none(template: str) -> None:
    assert parser_for_template(template) is None


@pytest.mark.parametrize(
    "sample",
    # In the other formats a call begins inside a list, a block or a message of its own.
    [s for s in SAMPLES if not s.first.startswith(ITEMS)],
    ids=lambda s: f"{s.parser}-{s.models}",
)
def test_a_mention_or_a_cut_call_spoils_no_later_call(sample: Sample) -> None:
    parser = parser_named(sample.parser)
    start = parser.parse(sample.text, prompt_end=sample.prompt_end).call_starts[0]
    opening = sample.text[start:].split("get_weather")[0]
    for before in (f"Begin with {opening}", opening + "get_weather"):
        text = f"{before} and so on. {sample.text[start:]}"
        parsed = parser.parse(text, tools=[TOOL], prompt_end="x")
        assert calls_of(parsed)[-1:] == [(TOOL.name, sample.calls[-1])]
