"""Trajectories as rows for fine-tuning: what is kept, what is left out, and the tools shown."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from treadle.agent_loop import SetupError
from treadle.trainer.demo import DEMO, MODELS
from treadle.trainer.prepare.conversations import RunConversations

_CALL = {"id": "c", "name": "calculator", "arguments": {"expression": "1+2"}}
_GOOD: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [_CALL]},
    {"role": "tool", "content": "3", "name": "calculator", "tool_call_id": "c"},
    {"role": "assistant", "content": "3"},
]


@pytest.fixture
def conversations(tmp_path: Path) -> RunConversations:
    folder = DEMO.parent
    selections: list[dict[str, list[str]]] = [{}, {"tool_selection": []}]
    rows = [
        {"prompt": [{"role": "user", "content": "1 + 2?"}], "extra_info": selection}
        for selection in selections
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = {
        "data": {"train_files": ["rows.jsonl"], "val_files": ["rows.jsonl"]},
        "model": {"path": str(MODELS["demo:calculator"])},
        "agent": {"default_loop": "tool_agent", "tool_catalogue": str(folder / "tools.yaml")},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return RunConversations(tmp_path)


def _trajectory(**changed: object) -> Mapping[str, Any]:
    return {
        "task_id": "train/0",
        "stop": "finished",
        "findings": [],
        **changed,
        "messages": json.dumps(changed.get("messages", _GOOD)),
    }


def test_a_conversation_has_the_columns_of_fine_tuning(conversations: RunConversations) -> None:
    (row,) = conversations.of([_trajectory()])
    assert row["messages"] == [
        _GOOD[0],
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "calculator", "arguments": {"expression": "1+2"}},
                }
            ],
        },
        *_GOOD[2:],
    ]
    assert [tool["function"]["name"] for tool in row["tools"]] == ["calculator"]  # type: ignore[attr-defined]


def test_the_tools_are_those_that_the_row_selects(conversations: RunConversations) -> None:
    (row,) = conversations.of([_trajectory(task_id="val/1")])
    assert "tools" not in row


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"stop": "error"}, "it failed"),
        ({"stop": "response_length"}, "a limit of length ended it"),
        ({"messages": _GOOD[:3]}, "it does not end with the model's turn"),
        ({"findings": [{"kind": "malformed_call", "text": ""}]}, "it has a malformed call"),
    ],
)
def test_what_cannot_be_imitated_is_counted(
    conversations: RunConversations, changed: Mapping[str, object], reason: str
) -> None:
    assert list(conversations.of([_trajectory(**changed)])) == []
    assert conversations.left_out == {reason: 1}


def test_conversations_of_a_row_differ_and_are_not_more_than_wanted(
    conversations: RunConversations,
) -> None:
    others = [[_GOOD[0], {"role": "assistant", "content": text}] for text in "abc"]
    given = [_trajectory(messages=messages) for messages in (others[0], *others)]
    assert len(list(conversations.of(given, per_row=2))) == 2
    assert conversations.left_out == {
        "the same conversation again": 1,
        "more of a row than --per-row": 1,
    }


def test_images_are_named_where_they_are_shown(
    conversations: RunConversations, tmp_path: Path
) -> None:
    shown = {"role": "user", "content": "what?", "images": ["a.png"]}
    (row,) = conversations.of([_trajectory(messages=[shown, _GOOD[3]])])
    assert row["images"] == [{"path": str(tmp_path / "images" / "a.png")}]
    assert row["messages"] == [{"role": "user", "content": "<image>what?"}, _GOOD[3]]


def test_a_row_that_is_gone_is_an_error(conversations: RunConversations) -> None:
    with pytest.raises(SetupError, match=r"train/7 is a trajectory of .*data\.train_files"):
        list(conversations.of([_trajectory(task_id="train/7")]))
