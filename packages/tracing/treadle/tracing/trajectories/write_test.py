"""Files are whole, have the schema, and leave with the steps that a resume repeats."""

import random
from array import array
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from treadle.tracing.trajectories import (
    DIRECTORY,
    SCHEMA,
    SpanColumns,
    is_as_written,
    remove_files_after,
    total_bytes,
    write_file,
)
from treadle.tracing.trajectories.schema import LEFT_OUT_KEY, SCHEMA_VERSION_KEY
from treadle.tracing.trajectories.testing import make_row, make_rows, write_run
from treadle.tracing.trajectories.write import _schema, _written


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_gives_back_its_rows_and_says_what_it_lacks(tmp_path: Path) -> None:
    rows = list(make_rows(3, "train", rows=30, samples=4))
    size = write_file(tmp_path, step=3, phase="train", rows=rows, left_out=5)
    (name,) = _names(tmp_path)
    assert name == "step-000003-train.parquet"
    assert size == total_bytes(tmp_path) == (tmp_path / name).stat().st_size
    table = pq.read_table(tmp_path / name)
    assert table.schema.equals(SCHEMA)
    assert table.schema.metadata == {SCHEMA_VERSION_KEY: b"2", LEFT_OUT_KEY: b"5"}
    assert table.column("task_id").to_pylist() == [row["task_id"] for row in rows]
    assert table.column("reward").to_pylist() == [row["reward"] for row in rows]
    sample, written = table.column("samples")[1].as_py()[0], rows[1]["samples"][0]
    assert sample["ids"] == written["ids"]
    assert sample["spans"] == written["spans"]


def test_spans_may_come_as_numbers_and_one_text(tmp_path: Path) -> None:
    row = make_row(3, "train", 0, 1)
    (sample,) = row["samples"]
    names = ["prompt", "sampled", "observed"]
    found = [{**span, "text": f"\u00e9 {span['start']}"} for span in sample["spans"]]
    assert {span["weight_version"] for span in found} >= {None, 2}

    def numbers(values: Iterable[int]) -> memoryview:
        return memoryview(array("I", values))

    encoded = [span["text"].encode() for span in found]
    versions = [span["weight_version"] for span in found]
    as_numbers = SpanColumns(
        origins=numbers(names.index(span["origin"]) for span in found),
        starts=numbers(span["start"] for span in found),
        stops=numbers(span["stop"] for span in found),
        versions=numbers(0 if version is None else version + 1 for version in versions),
        text=b"".join(encoded),
        begins=numbers(accumulate(map(len, encoded), initial=0)),
    )
    none = numbers(())
    without = SpanColumns(
        origins=none, starts=none, stops=none, versions=none, text=b"", begins=numbers([0])
    )
    rows = [
        row | {"samples": [sample | {"spans": s}]} for s in (as_numbers, without, found, as_numbers)
    ]
    write_file(tmp_path, step=1, phase="train", rows=[*rows, {**row, "messages": b"[\xc3\xa9]"}])
    table = pq.read_table(tmp_path / "step-000001-train.parquet")
    read = [samples[0]["spans"] for samples in table.column("samples").to_pylist()]
    assert read == [found, [], found, found, sample["spans"]]
    assert table.column("messages").to_pylist()[-1] == "[\u00e9]"


def test_a_change_of_any_byte_of_a_file_is_found(tmp_path: Path) -> None:
    rows = list(make_rows(3, "train", rows=300, samples=2))
    write_file(tmp_path, step=3, phase="train", rows=rows, left_out=7)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    assert is_as_written(path)
    draw, size, footer = random.Random(0), len(content), int.from_bytes(content[-8:-4], "little")
    places = [draw.randrange(size) for _ in range(40)]
    places += [size - 8 - draw.randrange(footer) for _ in range(40)]
    for place in places:
        bit = 1 << draw.randrange(8)
        altered = content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
        path.write_bytes(altered)
        of_another_arrow = pa.__version__.encode() not in altered
        assert of_another_arrow or not is_as_written(path), (place, bit)


def test_a_file_without_checksums_of_an_earlier_release_is_as_written(tmp_path: Path) -> None:
    write_file(tmp_path, step=3, phase="train", rows=make_rows(3, "train", rows=3, samples=1))
    (path,) = tmp_path.iterdir()
    table = pq.read_table(path)
    path.write_bytes(_written(_schema(b"0"), [table], checksums=False))
    assert is_as_written(path)


def test_a_row_group_is_bounded_by_rows_and_by_tokens(tmp_path: Path) -> None:
    row = make_row(1, "train", 1, 1)
    long = row | {"num_tokens": 600_000}
    write_file(tmp_path, step=1, phase="train", rows=[*[row] * 300, long, long, row])
    metadata = pq.read_metadata(tmp_path / "step-000001-train.parquet")
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert sizes == [256, 46, 1]


def test_a_row_that_does_not_fit_leaves_no_file(tmp_path: Path) -> None:
    row = make_row(1, "train", 1, 1)
    with pytest.raises(ValueError, match=r"unknown columns \['colour'\] and lacks \['stop'\]"):
        write_file(
            tmp_path,
            step=1,
            phase="train",
            rows=[{k: v for k, v in row.items() if k != "stop"} | {"colour": 1}],
        )
    with pytest.raises(ValueError, match="surrogates not allowed"):
        write_file(tmp_path, step=1, phase="train", rows=[{**row, "prompt": "\ud800"}])
    assert _names(tmp_path) == []


def test_a_file_that_cannot_be_written_leaves_the_one_before_it(tmp_path: Path) -> None:
    write_file(tmp_path, step=1, phase="train", rows=[make_row(1, "train", 1, 1)])
    before = (tmp_path / "step-000001-train.parquet").read_bytes()
    (tmp_path / "step-000001-train.parquet.partial").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_file(tmp_path, step=1, phase="train", rows=[make_row(1, "train", 2, 1)])
    assert (tmp_path / "step-000001-train.parquet").read_bytes() == before


def test_a_resume_removes_later_files_and_partial_ones(tmp_path: Path) -> None:
    directory = write_run(tmp_path, steps=3) / DIRECTORY
    (directory / "step-000001-train.parquet.partial").write_text("half")
    (directory / "mine.txt").write_text("kept")
    remove_files_after(directory, 1)
    kept = ["mine.txt", "step-000001-train.parquet", "step-000001-val.parquet"]
    assert _names(directory) == kept
    remove_files_after(directory, None)
    assert _names(directory) == ["mine.txt"]
    remove_files_after(tmp_path / "missing", None)
