"""Tests of calls as invoke elements: the parsers minimax and deepseek_v32."""

# ruff: noqa: RUF001 - the bars are the model's

import pytest

from treadle.agent_loop import ToolCall
from treadle.agent_loop.parsers import parser_named

MINIMAX = parser_named("minimax")
DEEPSEEK = parser_named("deepseek_v32")
GOOD = '<invoke name="f">\n<parameter name="a">x</parameter>\n</invoke>'


def block(body: str) -> str:
    return f"<minimax:tool_call>\n{body}\n</minimax:tool_call>"


@pytest.mark.parametrize(
    ("body", "reason", "name"),
    [
        ("<invoke f>\n</invoke>", 'must begin with <invoke name="NAME">', None),
        ('f(a="x")', 'must begin with <invoke name="NAME">', None),
        ('<invoke name="f">\nx</invoke>', 'expected <parameter name="NAME"> or </invoke>', "f"),
        ('<invoke name="f">\n<parameter name="a">x</invoke>', "'a' is not closed by", "f"),
        (GOOD.replace("</invoke>", '<parameter name="a">y</parameter></invoke>'), "twice", "f"),
    ],
)
def test_one_bad_call_spoils_no_other(body: str, reason: str, name: str | None) -> None:
    parsed = MINIMAX.parse(block(f"{GOOD}\n{body}\n{GOOD}"))
    assert [call.arguments for call in parsed.calls] == [{"a": "x"}] * 2
    (bad,) = parsed.malformed
    assert reason in bad.reason
    assert (bad.text.strip(), bad.name) == (body, name)
    assert parsed.content == bad.text.strip()


def test_a_block_may_lack_its_end_but_a_call_may_not() -> None:
    parsed = MINIMAX.parse(block(f'{GOOD}\n<invoke name="g">').removesuffix("</minimax:tool_call>"))
    assert [call.name for call in parsed.calls] == ["f"]
    assert parsed.malformed[0].reason == "the call is not closed by </invoke>"


def test_a_mention_in_prose_is_prose() -> None:
    parsed = MINIMAX.parse("Begin with <minimax:tool_call>, then call.")
    assert parsed.content == "Begin with <minimax:tool_call>, then call."
    assert parsed.malformed == ()
    parsed = MINIMAX.parse(f"Begin with <minimax:tool_call>, as {block(GOOD)}")
    assert (len(parsed.calls), parsed.malformed) == (1, ())


def test_an_element_outside_a_block_is_prose() -> None:
    assert MINIMAX.parse(GOOD).content == GOOD


def dsml(kind: str, text: str) -> str:
    mark = "｜DSML｜"
    return (
        f'<{mark}function_calls>\n<{mark}invoke name="f">\n<{mark}parameter name="a" '
        f'string="{kind}">{text}</{mark}parameter>\n</{mark}invoke>\n</{mark}function_calls>'
    )


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [("true", "3", "3"), ("false", "3", 3), ("false", " [1] ", [1]), ("true", " x", " x")],
)
def test_a_typed_parameter_says_what_it_is(kind: str, text: str, value: object) -> None:
    assert DEEPSEEK.parse(dsml(kind, text)).calls[0].arguments == {"a": value}


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("false", "x", "has string=\"false\", and 'x' is not a number, true, false or null"),
        ("false", "1 2", "and '1 2' is not a number"),
        ("maybe", "x", 'name="NAME" string="true|false"> or'),
    ],
)
def test_a_typed_parameter_that_is_not_what_it_says(kind: str, text: str, reason: str) -> None:
    (bad,) = DEEPSEEK.parse(dsml(kind, text)).malformed
    assert reason in bad.reason


@pytest.mark.parametrize(
    ("name", "arguments"), [('f"', {}), ("", {}), ("f", {"a": "</parameter>"}), ("f", {"": 1})]
)
def test_what_the_format_cannot_say_is_refused(name: str, arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="the format cannot write"):
        MINIMAX.render("", [ToolCall(id="c", name=name, arguments=arguments)])
