import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from treadle.agent_loop import Message, ToolCall
from treadle.trainer.data import DataError, Row, read_rows
from treadle.trainer.data.images import row_messages
from treadle.trainer.problems import SeveralProblems


def make_columns(question: str = "What is 2 + 2?", **changes: object) -> dict[str, object]:
    columns: dict[str, object] = {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": "Solve it."},
            {"role": "user", "content": question},
        ],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0, "split": "train"},
    }
    return {**columns, **changes}


def write_jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, *rows: Any) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def test_jsonl_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    columns = [make_columns("a"), make_columns("b")]
    from_lines = read_rows([write_jsonl(tmp_path / "a.jsonl", *columns)])
    from_table = read_rows([write_parquet(tmp_path / "a.parquet", *columns)])
    assert [row.columns for row in from_lines] == [row.columns for row in from_table] == columns
    assert [row.place for row in from_table] == [
        f"{tmp_path}/a.parquet, row 1",
        f"{tmp_path}/a.parquet, row 2",
    ]


def test_rows_are_counted_through_all_files_and_know_their_line(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", make_columns())
    second = tmp_path / "b.jsonl"
    second.write_text("\n" + json.dumps(make_columns("späť")) + "\n\n", encoding="utf-8")
    rows = read_rows([first, second])
    place = f"{second}, line 2"
    assert rows[1] == Row(index=1, place=place, columns=make_columns("späť"), exact=True)


def test_a_function_gives_rows_that_leave_out_what_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(
        "def rows():\n    yield {'prompt': 'Guess.', 'number': 7}\ndef one():\n    return 1\n"
    )
    (row,) = read_rows([tmp_path / "game.py:rows"])
    assert row.columns == {
        "data_source": "game",
        "prompt": [{"role": "user", "content": "Guess."}],
        "reward_model": {},
        "number": 7,
    }
    with pytest.raises(DataError, match=r"one.*1, which is not an iterable of rows"):
        read_rows([tmp_path / "game.py:one"])
    with pytest.raises(DataError, match=r"makes its rows at start, and data\.streaming"):
        read_rows([tmp_path / "game.py:rows"], in_files=True)


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(make_columns()) + "\nnot json\n")
    assert len(read_rows([path], limit=1)) == 1


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        (
            {k: v for k, v in make_columns().items() if k != "reward_model"} | {"reward_modl": {}},
            r"line 1: the column 'reward_model' is missing \(did you mean 'reward_modl'\?\); "
            "columns present: data_source, agent_name, prompt, extra_info, reward_modl",
        ),
        (make_columns(data_source=None), "'data_source' is null"),
        ({}, "columns present: none"),
        (make_columns(prompt=" "), "prompt must be a list of messages, or a text, got ' '"),
        (make_columns(prompt=[]), "prompt must be a list of messages"),
        (make_columns(prompt=["hi"]), r"prompt\[0\] must be a mapping"),
        (
            make_columns(prompt=[{"role": "user", "text": "hi"}]),
            r"prompt\[0\] is of the role user and has the unknown keys text; known: role, content",
        ),
        (
            make_columns(prompt=[{"role": "human", "content": "hi"}]),
            r"prompt\[0\].role must be system, user, assistant, tool, got 'human'",
        ),
        (
            make_columns(prompt=[{"role": "user", "content": [{"type": "audio"}]}]),
            r"prompt\[0\].content\[0\] must be .* got {'type': 'audio'}",
        ),
        (
            make_columns(prompt=[{"role": "user", "content": [{"type": "text", "text": 1}]}]),
            r"prompt\[0\].content\[0\].text must be a string, got 1",
        ),
        (
            make_columns(prompt=[{"role": "user", "content": 3}]),
            r"prompt\[0\].content must be a string, got 3",
        ),
        (make_columns(extra_info={"a": ["x \ud83d"]}), r"extra_info.a\[0\] contains a lone surro"),
        (make_columns(extra_info={"\ud83d": 1}), "a key of extra_info contains a lone surrogate"),
        (make_columns(reward_model="4"), "reward_model must be a mapping, got '4'"),
        (make_columns(extra_info=[1]), "extra_info must be a mapping"),
        (make_columns(agent_name=3), "agent_name must be a string, got 3"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(
    tmp_path: Path, columns: dict[str, object], why: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", columns)
    with pytest.raises(DataError, match=why) as error:
        read_rows([path])
    assert str(error.value).startswith(str(path))


def test_null_is_missing_and_a_prompt_may_hold_a_whole_conversation(tmp_path: Path) -> None:
    called = {"name": "add", "arguments": {"a": 1}}
    prompt = [
        {"role": "developer", "content": [{"type": "text", "text": "a", "image": None}], "x": None},
        {"role": "user", "content": [{"type": "text", "text": "q"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": called, "id": "c"}]},
        {"role": "tool", "content": [{"type": "text", "text": "5"}], "tool_call_id": "c"},
    ]
    made = (
        Message(role="system", content="a"),
        Message(role="user", content="q"),
        Message(
            role="assistant",
            content="",
            tool_calls=(ToolCall(id="c", name="add", arguments={"a": 1}),),
        ),
        Message(role="tool", content="5", tool_call_id="c"),
    )
    for write, name in ((write_jsonl, "a.jsonl"), (write_parquet, "a.parquet")):
        (row,) = read_rows([write(tmp_path / name, make_columns(prompt=prompt))])
        assert row_messages(row) == made


def test_a_null_argument_is_a_value_where_null_cannot_mean_missing(tmp_path: Path) -> None:
    calls = [{"function": {"name": "add", "arguments": {"a": None, "b": 1}}}]
    columns = make_columns(prompt=[{"role": "assistant", "tool_calls": calls}])
    (row,) = read_rows([write_jsonl(tmp_path / "a.jsonl", columns)])
    assert row_messages(row)[0].tool_calls[0].arguments == {"a": None, "b": 1}
    (row,) = read_rows([write_parquet(tmp_path / "a.parquet", columns)])
    with pytest.raises(ValueError, match=r"arguments.a is null, which may stand for a missing key"):
        row_messages(row)


def test_problems_that_differ_in_a_value_are_one(tmp_path: Path) -> None:
    rows = [make_columns(agent_name=number) for number in range(8)]
    with pytest.raises(DataError, match=r"line 1: .* got 0 \(and 7 more rows\)"):
        read_rows([write_jsonl(tmp_path / "a.jsonl", *rows)])


def test_what_is_not_required_may_be_missing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "hi"}]})
    assert len(read_rows([path], required=["prompt"])) == 1


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl", "{}\n{}", r"a\.jsonl, line 1: the column .* \(and 1 more rows\)"),
        ("a.jsonl", "{", r"a\.jsonl, line 1: not a JSON object"),
        ("a.jsonl", "[1]", "a row must be a JSON object, got list"),
        ("a.jsonl", "", r"a\.jsonl has no rows"),
        ("a.parquet", "PAR1 and nothing else", r"a\.parquet is not a parquet file"),
        ("a.csv", "a,b", r"are \.jsonl, \.parquet or \.arrow files, .*got '\.csv'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, content: str, why: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=why):
        read_rows([tmp_path / name])


def test_all_that_is_wrong_with_files_and_rows_is_said_at_once(tmp_path: Path) -> None:
    good: dict[str, object] = {
        "data_source": "s",
        "prompt": [{"role": "user", "content": "hi"}],
        "reward_model": {"ground_truth": "1"},
    }
    first = write_jsonl(tmp_path / "a.jsonl", {**good, "prompt": "", "agent_name": 1}, good)
    (tmp_path / "b.jsonl").write_text("{", encoding="utf-8")
    last = write_jsonl(tmp_path / "c.jsonl", {**good, "agent_name": 1})
    with pytest.raises(SeveralProblems) as raised:
        read_rows([first, tmp_path / "b.jsonl", tmp_path / "none.jsonl", last])
    damaged, absent, prompt, name = map(str, raised.value.errors)
    assert damaged.startswith(f"{tmp_path / 'b.jsonl'}, line 1: not a JSON object")
    assert absent == f"{tmp_path / 'none.jsonl'} does not exist"
    assert prompt == f"{first}, line 1: prompt must be a list of messages, or a text, got ''"
    assert name == f"{first}, line 1: agent_name must be a string, got 1 (and 1 more rows)"


def test_data_of_an_example_comes_with_the_command_that_makes_it(tmp_path: Path) -> None:
    missing = tmp_path / "example" / "data" / "train.jsonl"
    with pytest.raises(DataError, match=r"train\.jsonl does not exist$"):
        read_rows([missing])
    missing.parent.parent.mkdir()
    script = missing.parent.parent / "preprocess.py"
    script.touch()
    with pytest.raises(DataError) as error:
        read_rows([missing])
    python = f"PYTHONPATH={tmp_path} python"
    assert str(error.value).endswith(f": run `{python} {script} --output {missing.parent}` first")


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_columns())
    path.write_bytes(path.read_bytes() + b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: not a JSON object: 'utf-8' codec"):
        read_rows([path])


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", *[make_columns(str(i)) for i in range(50)])
    whole = path.read_bytes()
    for start in range(4, len(whole) - 8, 97):
        path.write_bytes(whole[:start] + b"\xff" * 16 + whole[start + 16 :])
        try:
            read_rows([path])
        except DataError as error:
            assert str(path) in str(error)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl does not exist"):
        read_rows([tmp_path / "none.jsonl"])


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["prompt", "data_source", "reward_model", "extra_info", "agent_name"]),
        st.none() | st.text() | st.integers() | st.lists(st.none()) | st.just({"role": "user"}),
    )
)
def test_any_row_is_used_or_refused(
    tmp_path_factory: pytest.TempPathFactory, columns: dict[str, object]
) -> None:
    path = write_jsonl(tmp_path_factory.getbasetemp() / "any.jsonl", columns)
    try:
        (row,) = read_rows([path])
    except (DataError, SeveralProblems):
        return
    assert row.columns["prompt"] == [{"role": "user", "content": columns["prompt"]}]
    assert isinstance(row.columns["data_source"], str)
    assert isinstance(row.columns["reward_model"], dict)
