"""Which messages count as the ones that were returned."""

from dataclasses import replace

import pytest

from treadle.agent_loop import Message, ToolCall
from treadle.agent_loop.capture.history import (
    ReturnedTurn,
    Sameness,
    Shared,
    compare,
    shared_history,
    with_own_ids,
)

CALL = ToolCall(id="c1", name="add", arguments={"a": 1.0, "b": [2.0, {"c": "x"}]})
RETURNED = Message(role="assistant", content=" Let me add. ", tool_calls=(CALL,), reasoning="Hm.\n")


def with_arguments(**arguments: object) -> Message:
    return replace(RETURNED, tool_calls=(replace(CALL, arguments=arguments),))


def test_1_the_same_message_is_exact() -> None:
    assert compare(RETURNED, replace(RETURNED)) is Sameness.EXACT


@pytest.mark.parametrize(
    "given",
    [
        with_arguments(b=[2.0, {"c": "x"}], a=1.0),
        with_arguments(a=1, b=[2, {"c": "x"}]),
        replace(RETURNED, content="Let me add."),
        replace(RETURNED, content=" Let me add."),
        replace(RETURNED, reasoning=None),
        replace(RETURNED, reasoning=""),
        replace(RETURNED, reasoning="Hm."),
    ],
)
def test_2_harmless_rewrites_are_known(given: Message) -> None:
    assert compare(RETURNED, given) is Sameness.REWRITTEN


@pytest.mark.parametrize(
    "given",
    [
        with_arguments(a=True, b=[2.0, {"c": "x"}]),
        with_arguments(a=1.5, b=[2.0, {"c": "x"}]),
        with_arguments(a="1", b=[2.0, {"c": "x"}]),
        with_arguments(a=1.0),
        replace(RETURNED, content="Let me  add."),
        replace(RETURNED, content=""),
        replace(RETURNED, reasoning="Ha."),
        replace(RETURNED, tool_calls=()),
        replace(RETURNED, tool_calls=(replace(CALL, name="sub"),)),
        Message(role="user", content=RETURNED.content),
    ],
)
def test_3_everything_else_is_an_edit(given: Message) -> None:
    assert compare(RETURNED, given) is Sameness.EDITED


def test_4_a_message_without_reasoning_does_not_match_one_with_it() -> None:
    plain = replace(RETURNED, reasoning=None)
    assert compare(plain, replace(plain, reasoning="thought up")) is Sameness.EDITED


def test_5_the_stop_string_may_be_put_back() -> None:
    cut = Message(role="assistant", content="<code>1")
    whole = Message(role="assistant", content="<code>1</code>")
    assert compare(cut, whole, uncut="<code>1</code>") is Sameness.REWRITTEN
    assert compare(cut, whole) is Sameness.EDITED


def test_6_messages_of_the_agent_itself_must_be_the_same() -> None:
    recorded = [Message(role="user", content="q"), RETURNED, Message(role="tool", content="3")]
    turns = [ReturnedTurn(index=1, start=1, stop=2)]
    stripped = replace(RETURNED, content="Let me add.")
    given = [recorded[0], stripped, Message(role="tool", content="3 ")]
    assert shared_history(recorded, turns, given) == Shared(num_messages=2, num_rewritten=1)
    assert shared_history(recorded, turns, recorded) == Shared(num_messages=3, num_rewritten=0)
    assert shared_history(recorded, (), given) == Shared(num_messages=1, num_rewritten=0)
    assert shared_history(recorded, turns, given[:1]) == Shared(num_messages=1, num_rewritten=0)


def test_7_a_reasoning_without_words_is_none() -> None:
    empty = replace(RETURNED, reasoning="")
    assert compare(empty, replace(RETURNED, reasoning=None)) is Sameness.EXACT
    assert compare(replace(RETURNED, reasoning=None), empty) is Sameness.EXACT


def test_5_other_ids_of_the_calls_are_those_that_the_model_wrote() -> None:
    """Agents give their own ids: `toolu_01ABC` for `call_0`."""
    two = replace(RETURNED, tool_calls=(CALL, replace(CALL, id="c2")))
    given = replace(RETURNED, tool_calls=(replace(CALL, id="toolu_1"), replace(CALL, id="toolu_2")))
    assert compare(two, given) is Sameness.REWRITTEN
    same_id = replace(RETURNED, tool_calls=(replace(CALL, id="x"), replace(CALL, id="x")))
    assert compare(two, same_id) is Sameness.EDITED

    turn = ReturnedTurn(index=1, start=1, stop=2, call_ids=("add:0", "add:1")).sent_back(given)
    user = Message(role="user", content="u")
    answers = [Message(role="tool", content=n, tool_call_id=f"toolu_{n}") for n in "21"]
    own = with_own_ids((user, given, *answers), (turn,))
    assert [call.id for call in own[1].tool_calls] == ["add:0", "add:1"]
    assert [message.tool_call_id for message in own[2:]] == ["add:1", "add:0"]
