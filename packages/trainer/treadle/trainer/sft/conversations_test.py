import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.agent_loop import Image, Message, ToolCall, ToolSpec
from treadle.trainer.config.sft import SftDataConfig
from treadle.trainer.data import DataError
from treadle.trainer.problems import SeveralProblems
from treadle.trainer.sft.conversations import read_conversations
from treadle.trainer.sft.demonstration import Demonstration

_USER = {"role": "user", "content": "Q"}
_SAID = {"role": "assistant", "content": "A"}
_SPEC = ToolSpec(name="add", description="Adds.")


def _read(tmp_path: Path, *rows: object, **keys: Any) -> tuple[Demonstration, ...]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = SftDataConfig(train_files=(file,), **keys)
    read = read_conversations([file], data, split="train")
    return tuple(conversation.demonstration for conversation in read.conversations)


def _calling(arguments: object, name: str = "add") -> dict[str, object]:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {
        "messages": [
            _USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "c", "name": "add"},
            {"role": "assistant", "content": "3", "reasoning_content": "I see."},
        ],
        "tools": [_SPEC.as_schema()],
    }


@pytest.mark.parametrize("as_text", [False, True], ids=["values", "JSON text"])
def test_a_row_becomes_messages_and_tools(tmp_path: Path, as_text: bool) -> None:
    row = _calling('{"a": 1, "b": null}')
    given = {key: json.dumps(value) for key, value in row.items()} if as_text else row
    (read,) = _read(tmp_path, given)
    call = ToolCall(id="c", name="add", arguments={"a": 1, "b": None})
    assert read.tools == (_SPEC,)
    assert read.messages == (
        Message(role="user", content="Q"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="3", tool_call_id="c", name="add"),
        Message(role="assistant", content="3", reasoning="I see."),
    )


def test_the_columns_may_have_other_names(tmp_path: Path) -> None:
    (read,) = _read(tmp_path, {"chat": [_USER, _SAID]}, messages_key="chat", tools_key="functions")
    assert [message.content for message in read.messages] == ["Q", "A"]


def test_images_go_to_the_marks_of_messages(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n.")
    image = Image(data=file.read_bytes(), mime="image/png")
    asked = {"role": "user", "content": "<image>Q"}
    rows = [
        {"messages": [_USER, _SAID, asked, _SAID], "images": [{"path": str(file)}]},
        {"messages": [_USER, _SAID]},
    ]
    with_image, without = _read(tmp_path, *rows)
    assert [message.images for message in with_image.messages] == [(), (), (image,), ()]
    assert not any(message.images for message in without.messages)
    with pytest.raises(DataError, match="the prompt has 1 <image> marks for 2 images"):
        _read(tmp_path, {"messages": [asked, _SAID], "images": [{"path": str(file)}] * 2})


def test_parquet_is_read_with_texts_and_with_structs(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "rows.parquet"
    # The structs of the second message have the keys of all messages, with null.
    plain = {"messages": [_USER, _SAID], "tools": None}
    rows = [plain, _calling('{"a": 1}') | {"tools": json.dumps([_SPEC.as_schema()])}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    data = SftDataConfig(train_files=(file,))
    first, second = read_conversations([file], data, split="train").conversations
    assert first.place == f"{file}, row 1"
    assert [message.role for message in first.demonstration.messages] == ["user", "assistant"]
    assert dict(second.demonstration.messages[1].tool_calls[0].arguments) == {"a": 1}
    rows = [_calling(arguments) | {"tools": None} for arguments in ({"a": 1}, {"b": 1})]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    with pytest.raises(
        SeveralProblems, match=r"row 1: .*arguments\.b is null, which may stand for"
    ):
        read_conversations([file], data, split="train")


_WRONG: list[tuple[object, str]] = [
    (
        {"message": [_USER]},
        r"line 1: the column 'messages' is missing \(did you mean 'message'\?\)",
    ),
    ({"messages": "no"}, "line 1: messages is a string that is not JSON: "),
    ({"messages": {}}, "line 1: messages must be a list, or a JSON text of one, got {}"),
    ({"messages": [3]}, r"messages\[0\] must be a mapping with role and content, got 3"),
    (
        {"messages": [{"role": "human"}]},
        r"messages\[0\].role must be .*assistant, tool, got 'human'",
    ),
    (
        {"messages": [_USER | {"loss_mask": 0}]},
        r"messages\[0\] is of the role user .* keys loss_mask; known",
    ),
    ({"messages": [_USER | {"weight": 0}]}, r"messages\[0\].weight is 0: it must be 0 or 1, on"),
    ({"messages": [_USER, _SAID | {"weight": 2}]}, r"messages\[1\].weight is 2: it must be"),
    ({"messages": [_USER, _SAID | {"weight": 0}]}, "every assistant's turn has the weight 0"),
    (
        {"messages": [{"role": "user", "content": 3}]},
        r"messages\[0\].content must be a string, got 3",
    ),
    ({"messages": [{"role": "user"}]}, r"messages\[0\] has no content"),
    ({"messages": [_USER]}, "ends with an assistant's turn; got roles"),
    (
        {"messages": [_USER, _SAID], "tool": []},
        r"no column 'tools' \(did you mean 'tool'\?\): rename",
    ),
    ({"messages": [_USER, _SAID], "tools": [{"type": "x"}]}, r"tools\[0\]"),
    (
        {"messages": [_USER, _SAID], "enable_thinking": True},
        "set agent.template_kwargs.enable_thinking",
    ),
    (_calling("{"), r"messages\[1\].tool_calls\[0\].function.arguments is a string that is not"),
    (_calling("3"), r"function.arguments must be a mapping or a JSON text of one, got '3'"),
    (_calling({}, name="sub"), r"messages\[1\] calls 'sub', and tools has add"),
]


@pytest.mark.parametrize(("row", "message"), _WRONG)
def test_what_is_wrong_is_said_with_file_row_and_cause(
    tmp_path: Path, row: object, message: str
) -> None:
    with pytest.raises(DataError, match=message) as raised:
        _read(tmp_path, row)
    assert str(tmp_path / "rows.jsonl, line 1") in str(raised.value)


def test_one_problem_of_many_rows_is_said_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2: .* \(and 1 more train rows\)"):
        _read(tmp_path, {"messages": [_USER, _SAID]}, *[{"messages": [_USER]}] * 2)


def test_columns_that_are_not_read_are_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [_USER, _SAID], "data_source": "x"}))
    read = read_conversations([file], SftDataConfig(train_files=(file,)), split="train")
    assert read.notes == (
        "columns of the train rows that fine-tuning does not read: data_source (1 rows)",
    )


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "tool_calls", "function", "name", "arguments", "x"]
            ),
            inner | st.sampled_from(["user", "assistant", "tool"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(messages=st.lists(_json, max_size=4), tools=_json)
def test_any_value_is_read_or_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, messages: object, tools: object
) -> None:
    folder = tmp_path_factory.getbasetemp()
    try:
        _read(folder, {"messages": messages, "tools": tools})
    except (DataError, SeveralProblems) as error:
        assert "rows.jsonl" in str(error)
