"""Files of whole steps, written beside the loop, within a budget; and what their rows say."""

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from treadle.agent_loop import (
    Finding,
    FloatArray,
    Image,
    Message,
    Origin,
    RolloutError,
    SampleReward,
    Span,
    Tokens,
    ToolCall,
    Trajectory,
)
from treadle.policy.algorithms.estimators import find_estimator
from treadle.policy.client.types import TokenValues
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.tracing import MemorySink, span, use_sink
from treadle.tracing.trajectories import (
    DIRECTORY,
    SCHEMA,
    Filter,
    TrajectoryFiles,
    find_image,
    image_name,
)
from treadle.tracing.trajectories.schema import SNIPPET_CHARACTERS
from treadle.trainer.report.testing import make_task, make_trajectory
from treadle.trainer.rollout.workers.stored_text import stored_text
from treadle.trainer.rollout.workers.trajectory_codec import pack_trajectory, read_trajectory
from treadle.trainer.training_loop.groups import StepBatch, groups_of, make_batch
from treadle.trainer.training_loop.trajectory_store import TrajectoryStore

_NAN = math.nan


def _decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def _store(
    run_dir: Path, *, max_bytes: int = 10**9, resume_after: int | None = None
) -> TrajectoryStore:
    return TrajectoryStore(run_dir, decode=_decode, max_bytes=max_bytes, resume_after=resume_after)


def _group(task_id: str, rewards: Sequence[float | None]) -> list[Trajectory]:
    """A trajectory per reward; None: one that failed."""
    tasks = [make_task(task_id, rollout_index=index) for index in range(len(rewards))]
    return [
        Trajectory.failed(task, RolloutError("the sandbox is down"))
        if reward is None
        else make_trajectory(task=task, reward=reward)
        for task, reward in zip(tasks, rewards, strict=True)
    ]


def _batch(trajectories: Sequence[Trajectory]) -> StepBatch:
    estimator = find_estimator(AlgorithmConfig(advantage="dr_grpo"))
    return make_batch(groups_of(trajectories), estimator, version=1)


def _names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / DIRECTORY).iterdir())


async def _write(
    store: TrajectoryStore, step: int, trajectories: Sequence[Trajectory]
) -> str | None:
    said = store.hold(step, trajectories, phase="train", limit=1)
    await store.write()
    return said


@pytest.mark.asyncio
async def test_a_row_has_what_the_step_did_with_each_token(tmp_path: Path) -> None:
    first, second, failed = _group("train/0", [1.0, 0.0, None])
    first = replace(first, findings=(Finding(kind="drift", text="turn 1"),))
    prompt = Span(origin=Origin.PROMPT, start=0, stop=14)
    empty = replace(first.samples[0], spans=(prompt,), logprobs=FloatArray((0.0,) * 14))
    second = replace(second, samples=(empty, second.samples[0]))
    trajectories = [first, second, failed]
    batch = _batch(trajectories)
    values_M = np.arange(10, dtype=np.float32)
    async with _store(tmp_path) as store:
        store.hold(3, trajectories, phase="train", limit=1, batch=batch)
        await store.write(TokenValues(logprobs_M=-values_M, entropy_M=values_M))
    files = TrajectoryFiles(tmp_path)
    rows = [files.one(3, "train", "train/0", index) for index in range(3)]
    assert files.count() == 3
    one, two, none = [row for row in rows if row is not None]
    assert list(one) == SCHEMA.names
    assert (one["reward"], one["advantage"], one["drift"]) == (1.0, 0.5, 1)
    assert (one["num_tokens"], one["num_sampled_tokens"]) == (14, 5)
    assert (one["tools"], one["response"]) == (["calculator"], "#### 42")
    (sample,) = one["samples"]
    mask = [*[_NAN] * 4, 1, 1, 1, *[_NAN] * 5, 1, 1]
    np.testing.assert_array_equal(sample["logprobs"], [-0.5 * value for value in mask])
    np.testing.assert_array_equal(sample["advantages"], [0.5 * value for value in mask])
    in_place = [*[_NAN] * 4, 0, 1, 2, *[_NAN] * 5, 3, 4]
    np.testing.assert_array_equal(sample["entropy"], in_place)
    np.testing.assert_array_equal(sample["policy_logprobs"], [-value for value in in_place])
    assert [s["text"] for s in sample["spans"]] == ["0 1 2 3", "4 5 6", "7 8 9 10 11", "12 13"]
    without, with_tokens = two["samples"]
    assert (without["advantages"], without["entropy"]) == (None, None)
    assert np.nanmax(with_tokens["entropy"]) == 9
    assert (none["samples"], none["advantage"]) == ([], None)
    assert none["error"] == "RolloutError: the sandbox is down"


@pytest.mark.asyncio
async def test_what_a_worker_says_of_its_trajectories_is_written_as_it_came(tmp_path: Path) -> None:
    image = Image(data=b"\x89PNG and so on", mime="image/png")
    seen = Message(role="user", content="Half a pair \ud800: \u00e9?", images=(image,))
    other = Image(data=b"another", mime="image/jpeg")
    first, second, failed = _group("train/0", [1.0, 0.0, None])
    second = replace(second, messages=(*second.task.messages, seen))
    shows = Message(role="tool", content="", name="zoom", images=(other,))
    first = replace(first, messages=(*first.messages[:2], seen, shows, *first.messages[2:]))
    second = replace(second, samples=(Tokens.empty(), second.samples[0]))
    first = replace(first, samples=first.samples * 2)
    here = [first, second, failed]

    def sent(trajectory: Trajectory) -> Trajectory:
        text = stored_text(trajectory, _decode, response_characters=SNIPPET_CHARACTERS)
        packed = pack_trajectory(trajectory, trajectory.task, text)
        return read_trajectory(packed, trajectory.task, {})

    arrived = [sent(trajectory) for trajectory in here]
    written = []
    for name, trajectories in (("here", here), ("arrived", arrived)):
        async with _store(tmp_path / name) as store:
            store.hold(3, trajectories, phase="train", limit=1, batch=_batch(trajectories))
            await store.write()
        files = TrajectoryFiles(tmp_path / name)
        rows = [files.one(3, "train", "train/0", index) or {} for index in range(3)]
        written.append(repr([{**row, "traceback": ""} for row in rows]))
        images = (tmp_path / name / DIRECTORY / "images").iterdir()
        assert {path.name for path in images} == {
            image_name(each.data, each.mime) for each in (image, other)
        }
    assert written[0] == written[1]
    sources = [trajectory.source for trajectory in arrived]
    assert [source is not None and source.is_made for source in sources] == [False] * 3


@pytest.mark.asyncio
async def test_an_image_is_kept_once_however_often_it_is_shown(tmp_path: Path) -> None:
    image = Image(data=b"\x89PNG and so on", mime="image/png")
    seen = Message(role="user", content="What is it?", images=(image,))
    plain = make_trajectory(task=make_task(messages=[seen]), calls_tool=False)
    shown = replace(plain, messages=(seen, *plain.messages[1:]))
    async with _store(tmp_path) as store:
        await _write(store, 1, [shown, shown])
        await _write(store, 2, [shown])
    name = image_name(image.data, image.mime)
    assert [p.name for p in (tmp_path / DIRECTORY / "images").iterdir()] == [name]
    assert find_image(tmp_path, name) is not None
    for row in TrajectoryFiles(tmp_path).query(columns=["messages"]):
        assert json.loads(row["messages"])[0]["images"] == [name]


@pytest.mark.asyncio
async def test_what_rows_and_models_write_fits_the_columns(tmp_path: Path) -> None:
    fields = {"data_source": 7, "reward_model": {"ground_truth": {"x": [1, "\ud800"]}}}
    asked = Message(role="user", content="half \ud800 " + "long" * 1000)
    task = replace(make_task(messages=[asked]), fields=fields)
    call = ToolCall(id="0", name="\udfff", arguments={"\ud800": math.inf})
    said = Message(role="assistant", content="", tool_calls=(call, call))
    plain = make_trajectory(task=task, calls_tool=False)
    with (
        use_sink(sink := MemorySink()),
        span("trajectory", task_id="train/0", rollout_index=0, shape=(1, 2)),
        span("turn"),
    ):
        pass
    async with _store(tmp_path) as store:
        store.hold(
            0,
            [replace(plain, messages=(asked, said))],
            phase="val",
            limit=1,
            spans=sink.spans,
        )
        await store.write()
    (row,) = TrajectoryFiles(tmp_path).query(columns=SCHEMA.names)
    assert row["data_source"] == "7"
    assert row["ground_truth"] == '{"x": [1, "\\ud800"]}'
    assert row["prompt"].startswith("half \\ud800 longlong")
    assert row["tools"] == ["\\udfff"]
    assert [each["name"] for each in row["trace"]] == ["trajectory", "turn"]
    assert row["duration_s"] == row["trace"][0]["duration_ns"] / 1e9
    assert row["samples"][0]["policy_logprobs"] is None


@pytest.mark.asyncio
async def test_the_rewards_of_players_are_kept(tmp_path: Path) -> None:
    game = make_trajectory(task=make_task())
    rewards = tuple(SampleReward(player=str(n), value=0.5 - n) for n in range(len(game.samples)))
    async with _store(tmp_path) as store:
        store.hold(0, [replace(game, sample_rewards=rewards)], phase="val", limit=1, spans=())
        await store.write()
    (row,) = TrajectoryFiles(tmp_path).query(columns=["sample_rewards"])
    assert row["sample_rewards"] == [{"player": r.player, "value": r.value} for r in rewards]
    assert row["sample_rewards"]


@pytest.mark.asyncio
async def test_a_step_whose_update_fails_is_written_at_the_end(tmp_path: Path) -> None:
    trajectories = _group("train/0", [1.0, 0.0])
    with pytest.raises(RuntimeError, match="the policy broke"):
        async with _store(tmp_path) as store:
            store.hold(1, trajectories, phase="train", limit=1, batch=_batch(trajectories))
            raise RuntimeError("the policy broke")
    rows = TrajectoryFiles(tmp_path).query()
    assert [row["advantage"] for row in rows] == [0.5, -0.5]


@pytest.mark.asyncio
async def test_a_resume_repeats_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    async with _store(tmp_path) as store:
        for step in (1, 2, 3):
            await _write(store, step, _group("train/0", [1.0]))
    assert len(_names(tmp_path)) == 3
    async with _store(tmp_path, resume_after=2):
        assert _names(tmp_path) == ["step-000001-train.parquet", "step-000002-train.parquet"]
    async with _store(tmp_path):
        assert _names(tmp_path) == []


@pytest.mark.asyncio
async def test_beyond_the_budget_failures_and_chosen_groups_are_kept(tmp_path: Path) -> None:
    step = [
        *_group("train/0", [1.0, 1.0]),
        *_group("train/1", [0.0, None]),
        *_group("train/2", [0.0, 1.0]),
        *_group("train/3", [0.5, None]),
    ]
    async with _store(tmp_path, max_bytes=1) as store:
        assert not store.is_full
        assert await _write(store, 1, step) is None
        assert await _write(store, 2, step) is None  # the first file is in work
        said = await _write(store, 3, step)
        assert said is not None
        assert said.startswith("trajectories/ has reached run.trajectories_max_bytes=1: from here")
        assert said.endswith(", now 3 of 8 trajectories")
    async with _store(tmp_path, max_bytes=1, resume_after=3) as store:
        assert store.is_full
        assert await _write(store, 4, step) is not None
        assert await _write(store, 5, step) is None
    files = TrajectoryFiles(tmp_path)
    kept = files.query(Filter.parse("step=3"), ["task_id", "rollout_index"])
    assert [tuple(row.values()) for row in kept] == [
        ("train/1", 0),
        ("train/1", 1),
        ("train/3", 1),
    ]
    assert files.left_out == 15
    assert files.count(Filter.parse("step=4")) == 3


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_written_ends_the_next_write(tmp_path: Path) -> None:
    async with _store(tmp_path) as store:
        (tmp_path / DIRECTORY).write_text("in the way")
        await _write(store, 1, _group("train/0", [1.0]))
        with pytest.raises(OSError, match="exists"):
            await _write(store, 2, _group("train/0", [1.0]))
        (tmp_path / DIRECTORY).unlink()
    assert _names(tmp_path) == ["step-000002-train.parquet"]
    with pytest.raises(OSError, match="directory"):
        async with _store(tmp_path) as store:
            (tmp_path / DIRECTORY / "step-000001-train.parquet.partial").mkdir()
            await _write(store, 1, _group("train/0", [1.0]))


@pytest.mark.asyncio
async def test_the_error_that_ends_a_run_is_not_hidden_by_the_last_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError, match="the policy broke"):
        async with _store(tmp_path) as store:
            (tmp_path / DIRECTORY).write_text("in the way")
            await _write(store, 1, _group("train/0", [1.0]))
            raise RuntimeError("the policy broke")
    assert "the last trajectories are not written: " in caplog.text


@pytest.mark.asyncio
async def test_a_run_that_is_cancelled_keeps_the_file_in_work(tmp_path: Path) -> None:
    held = asyncio.Event()

    async def run() -> None:
        async with _store(tmp_path) as store:
            await _write(store, 1, _group("train/0", [1.0]))
            held.set()
            await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(run())
    await held.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _names(tmp_path) == ["step-000001-train.parquet"]
