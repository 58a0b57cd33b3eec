import json
import math
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.agent_loop import Message, Tokens, ToolError, Trajectory
from treadle.tracing import MemorySink, Metric, span, use_sink
from treadle.trainer.report import TrajectoryLog
from treadle.trainer.report.testing import make_task, make_trajectory
from treadle.trainer.report.trajectories import choose


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_says_everything_about_a_trajectory(tmp_path: Path) -> None:
    path = tmp_path / "run" / "trajectories.jsonl"
    trajectory = make_trajectory(metrics=[Metric("tool/calls", 1.0)])
    with TrajectoryLog(path, decode=lambda ids: f"<{ids[0]}..{ids[-1]}>") as log:
        assert log.append(3, [trajectory], phase="train", limit=5) == 1
    assert lines(path) == [
        {
            "step": 3,
            "phase": "train",
            "task_id": "train/0",
            "rollout_index": 0,
            "loop": "tool_agent",
            "data_source": "treadle/calculator",
            "ground_truth": "42",
            "reward": 1.0,
            "answer": None,
            "advantage": None,
            "tool_rewards": [],
            "turn_scores": [],
            "stop": "finished",
            "error": None,
            "traceback": None,
            "num_turns": 4,
            "messages": [
                {"role": "user", "content": "What is 6 * 7?"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"id": "0", "name": "calculator", "arguments": {"expression": "6*7"}}
                    ],
                },
                {"role": "tool", "content": "42", "name": "calculator", "tool_call_id": "0"},
                {"role": "assistant", "content": "#### 42"},
            ],
            "sample_rewards": [],
            "samples": [
                {
                    "ids": list(range(14)),
                    "logprobs": [0.0] * 4 + [-0.5] * 3 + [0.0] * 5 + [-0.5] * 2,
                    "spans": [
                        {"origin": origin, "start": a, "stop": b, "weight_version": w, "text": text}
                        for origin, a, b, w, text in [
                            ("prompt", 0, 4, None, "<0..3>"),
                            ("sampled", 4, 7, 1, "<4..6>"),
                            ("observed", 7, 12, None, "<7..11>"),
                            ("sampled", 12, 14, 1, "<12..13>"),
                        ]
                    ],
                }
            ],
            "findings": [],
            "metrics": {"tool/calls": 1.0},
            "trace": [],
        }
    ]


def test_a_failed_trajectory_says_why(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TrajectoryLog(path) as log:
        failed = Trajectory.failed(make_task(), ToolError("sandbox down"))
        log.append(1, [failed], phase="val", limit=1)
    (line,) = lines(path)
    assert (line["error"], line["stop"]) == ("ToolError: sandbox down", "error")
    assert line["samples"] == []


def test_without_a_decoder_spans_have_no_text(tmp_path: Path) -> None:
    with TrajectoryLog(tmp_path / "t.jsonl") as log:
        log.append(1, [make_trajectory()], phase="train", limit=1)
    (sample,) = lines(tmp_path / "t.jsonl")[0]["samples"]
    assert {s["text"] for s in sample["spans"]} == {None}


def test_a_log_probability_that_is_not_known_is_null(tmp_path: Path) -> None:
    trajectory = make_trajectory()
    (tokens,) = trajectory.samples
    unknown = Tokens(ids=tokens.ids, logprobs=[math.nan] * len(tokens.ids), spans=tokens.spans)
    with TrajectoryLog(tmp_path / "t.jsonl") as log:
        log.append(1, [replace(trajectory, samples=(unknown,))], phase="val", limit=1)
    assert "NaN" not in (tmp_path / "t.jsonl").read_text()
    (sample,) = lines(tmp_path / "t.jsonl")[0]["samples"]
    assert sample["logprobs"] == [None] * len(tokens.ids)


def test_each_line_gets_the_trace_of_its_own_trajectory(tmp_path: Path) -> None:
    with TrajectoryLog(tmp_path / "t.jsonl") as log, use_sink(elsewhere := MemorySink()):
        with log.recording() as recorded, span("step"):
            for rollout_index in (0, 1):
                with (
                    span("trajectory", task_id="train/0", rollout_index=rollout_index),
                    span(
                        "turn", nested={"ids": [rollout_index]}, output={"content": "in messages"}
                    ),
                ):
                    pass
        trajectory = make_trajectory(task=make_task(rollout_index=1))
        log.append(1, [trajectory], phase="train", limit=1, spans=recorded.spans)
    trace = lines(tmp_path / "t.jsonl")[0]["trace"]
    assert [s["name"] for s in trace] == ["trajectory", "turn"]
    assert trace[1]["attributes"] == {"nested": {"ids": [1]}}
    assert trace[1]["parent_id"] == trace[0]["span_id"]
    assert "output" in elsewhere.spans[0].attributes
    assert [s.span_id for s in elsewhere.spans] == [s.span_id for s in recorded.spans]


def test_a_row_may_hold_what_json_does_not(tmp_path: Path) -> None:
    task = make_task(messages=[Message(role="user", content="half \ud83d")])
    fields = {**task.fields, "reward_model": {"ground_truth": date(2026, 11, 21)}}
    trajectory = make_trajectory(task=replace(task, fields=fields))
    with TrajectoryLog(tmp_path / "t.jsonl") as log:
        log.append(1, [trajectory], phase="train", limit=1)
    (line,) = lines(tmp_path / "t.jsonl")
    assert (line["ground_truth"], line["messages"][0]["content"]) == ("2026-11-21", "half \ud83d")


def test_a_resumed_run_removes_what_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TrajectoryLog(path) as log:
        for step in (1, 2, 3):
            log.append(step, [make_trajectory()] * 2, phase="train", limit=2)
    with path.open("ab") as file:
        file.write(b'{"step": 3, "torn')
    with TrajectoryLog(path, resume_after=2) as log:
        log.append(3, [make_trajectory()], phase="train", limit=1)
    assert [line["step"] for line in lines(path)] == [1, 1, 2, 2, 3]


@settings(deadline=None)
@given(
    st.lists(st.none() | st.floats(0, 1), max_size=20), st.sampled_from([1, 4]), st.integers(0, 25)
)
def test_the_choice_is_of_whole_groups_and_shows_the_whole_range(
    rewards: list[float | None], size: int, limit: int
) -> None:
    trajectories = [
        Trajectory.failed(task, ToolError("down"))
        if reward is None
        else make_trajectory(task=task, reward=reward)
        for row, reward in enumerate(rewards)
        for task in (make_task(f"train/{row}", rollout_index=i) for i in range(size))
    ]
    chosen = choose(trajectories, limit)
    assert len(chosen) == min(-(-limit // size) * size, len(trajectories))
    assert len({id(trajectory) for trajectory in chosen}) == len(chosen)
    assert [t.task.rollout_index for t in chosen] == [*range(size)] * (len(chosen) // size)
    if len(chosen) >= 2 * size:
        best = max((r for r in rewards if r is not None), default=None)
        assert any(t.reward == best for t in chosen)
    if chosen and None in rewards:
        assert any(t.error for t in chosen)


def test_a_single_group_is_one_to_learn_from(tmp_path: Path) -> None:
    rewards = {"train/0": (1.0, 1.0), "train/1": (1.0, 0.0), "train/2": (0.0, 0.0)}
    trajectories = [
        make_trajectory(task=make_task(row, rollout_index=i), reward=reward)
        for row, group in rewards.items()
        for i, reward in enumerate(group)
    ]
    advantages = [0.0, 0.0, 0.7, -0.7, 0.0, 0.0]
    with TrajectoryLog(tmp_path / "t.jsonl") as log:
        written = log.append(1, trajectories, phase="train", limit=1, advantages=advantages)
    assert written == 2
    assert [(line["task_id"], line["advantage"]) for line in lines(tmp_path / "t.jsonl")] == [
        ("train/1", 0.7),
        ("train/1", -0.7),
    ]


def test_a_limit_of_none_at_all_writes_nothing(tmp_path: Path) -> None:
    with TrajectoryLog(tmp_path / "t.jsonl") as log:
        assert log.append(1, [make_trajectory()], phase="train", limit=0) == 0
    assert (tmp_path / "t.jsonl").read_text() == ""


def test_a_disk_that_is_full_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        TrajectoryLog(tmp_path)
