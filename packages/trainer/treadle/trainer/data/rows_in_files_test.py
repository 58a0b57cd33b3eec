import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from treadle.agent_loop import default_loops
from treadle.agent_loop.testing import ByteRenderer
from treadle.trainer.data import (
    DataError,
    DataOrder,
    PromptRules,
    PromptSet,
    make_prompts,
    read_rows,
)
from treadle.trainer.problems import SeveralProblems


def make_columns(number: int, *, content: str | None = None) -> dict[str, Any]:
    return {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": content or f"question {number}"}],
        "reward_model": {"ground_truth": str(number)},
    }


def write_all(folder: Path, rows: list[dict[str, Any]]) -> list[Path]:
    """Writes the rows as lines with blank ones, batches of two, and row groups of three."""
    lines = folder / "a.jsonl"
    lines.write_text("\n" + "\n\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    table = pyarrow.Table.from_pylist(rows)
    arrow = folder / "b.arrow"
    with ipc.new_stream(arrow, table.schema) as sink:
        sink.write_table(table, max_chunksize=2)
    parquet.write_table(table, folder / "c.parquet", row_group_size=3)
    return [lines, arrow, folder / "c.parquet"]


def test_rows_in_files_are_the_rows_in_memory(tmp_path: Path) -> None:
    files = write_all(tmp_path, [make_columns(number) for number in range(7)])
    inside, here = read_rows(files, in_files=True), read_rows(files)
    assert len(inside) == len(here) == 21
    assert list(inside) == list(here)
    assert [inside[index] for index in reversed(range(21))] == list(reversed(here))
    assert (inside[-1], inside[2:20:5]) == (here[-1], list(here[2:20:5]))
    with pytest.raises(IndexError, match="row 21 of 21"):
        inside[21]


def prepare(files: list[Path], overlong: Any, limit: int, *, in_files: bool) -> PromptSet:
    rules = PromptRules(
        loops=default_loops(),
        default_loop="single_turn_agent",
        max_prompt_tokens=limit,
        overlong=overlong,
    )
    rows = read_rows(files, in_files=in_files)
    return make_prompts(rows, split="train", rules=rules, renderer=ByteRenderer())


@pytest.mark.parametrize("overlong", ["drop", "left"])
def test_prompts_and_tasks_of_every_step_are_the_same(tmp_path: Path, overlong: str) -> None:
    rows = [make_columns(n, content="x" * (5 + 20 * (n % 3))) for n in range(7)]
    files = write_all(tmp_path, rows)
    limit = len(ByteRenderer().render((), tools=()).ids) + 45
    inside = prepare(files, overlong, limit, in_files=True)
    here = prepare(files, overlong, limit, in_files=False)
    assert inside.notes == here.notes != ()
    assert inside.num_dropped == here.num_dropped
    assert list(inside.prompts) == list(here.prompts)
    order = DataOrder(num_rows=len(here.prompts), batch_size=3, seed=1)
    for step in (1, 2, 9, 4):  # a resumed run asks for any of them first
        for index in order.batch(step):
            tasks = [s.prompts[index].tasks(samples=2, seed=1, step=step) for s in (inside, here)]
            assert tasks[0] == tasks[1]


@given(st.lists(st.integers(0, 20), max_size=12))
def test_rows_may_be_read_in_any_order(tmp_path_factory: Any, order: list[int]) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-order"
    if not folder.exists():
        folder.mkdir()
        write_all(folder, [make_columns(number) for number in range(7)])
    rows = read_rows([folder / name for name in ("a.jsonl", "b.arrow", "c.parquet")], in_files=True)
    assert [rows[i].columns["reward_model"] for i in order] == [
        {"ground_truth": str(i % 7)} for i in order
    ]


def test_memory_does_not_grow_with_the_size_of_rows(tmp_path: Path) -> None:
    file = tmp_path / "large.jsonl"
    with file.open("w") as sink:
        for number in range(2000):
            sink.write(json.dumps(make_columns(number, content="x" * 10_000)) + "\n")
    assert file.stat().st_size > 20_000_000
    tracemalloc.start()
    rows = read_rows([file], in_files=True)
    assert rows[1234].columns["reward_model"] == {"ground_truth": "1234"}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_file_that_changes_is_an_error_and_not_another_row(tmp_path: Path) -> None:
    (file, *_) = write_all(tmp_path, [make_columns(0), make_columns(1)])
    rows = read_rows([file], in_files=True)
    os.utime(file, ns=(0, 0))
    with pytest.raises(DataError, match=r"a\.jsonl has changed since it was read at the start"):
        rows[1]
    file.unlink()
    with pytest.raises(DataError, match="has changed"):
        list(rows)


def test_rows_are_checked_at_the_start_as_in_memory(tmp_path: Path) -> None:
    file, empty = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    file.write_text(json.dumps({**make_columns(0), "prompt": None}) + "\n")
    empty.write_text("\n")
    with pytest.raises(SeveralProblems) as caught:
        read_rows([file, empty], in_files=True)
    assert "line 1: the column 'prompt' is null" in str(caught.value)
    assert "b.jsonl has no rows" in str(caught.value)
