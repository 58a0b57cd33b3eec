import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc, parquet

from treadle.trainer.data import DataError, read_rows
from treadle.trainer.data.files import find_files


def _table(*values: int) -> pyarrow.Table:
    return pyarrow.Table.from_pylist(
        [{"value": value, "nested": {"a": [value]}} for value in values]
    )


def _write(path: Path, *values: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix:
        case ".parquet":
            parquet.write_table(_table(*values), path)
        case ".arrow":
            with ipc.new_stream(path, _table().schema if not values else _table(1).schema) as sink:
                for value in values:
                    sink.write_table(_table(value))
        case _:
            path.write_text("".join(json.dumps({"value": value}) + "\n" for value in values))
    return path


def _values(*paths: Path) -> Sequence[Any]:
    return [row.columns["value"] for row in read_rows(paths, required=("value",))]


def test_both_arrow_formats_are_read_in_order(tmp_path: Path) -> None:
    stream = _write(tmp_path / "stream.arrow", 1, 2, 3)
    file = tmp_path / "file.arrow"
    with ipc.new_file(file, _table(1).schema) as sink:
        for value in (4, 5):
            sink.write_table(_table(value))
    rows = read_rows([stream, file], required=("value",))
    assert [row.columns["value"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[0].columns["nested"] == {"a": [1]}
    assert rows[4].place == f"{file}, row 2"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(DataError, match=r"file\.arrow is not an Arrow file that can be read"):
        read_rows([file], required=("value",))


def test_a_directory_is_its_files_by_name(tmp_path: Path) -> None:
    _write(tmp_path / "data" / "train-00001-of-00002.parquet", 2)
    _write(tmp_path / "data" / "train-00000-of-00002.parquet", 1)
    _write(tmp_path / ".cache" / "test.parquet", 9)
    (tmp_path / "README.md").write_text("a data set")
    assert _values(tmp_path) == [1, 2]
    assert _values(tmp_path / "data" / "*-00001-*.parquet") == [2]


def test_a_saved_data_set_is_read_in_its_own_order(tmp_path: Path) -> None:
    # What `save_to_disk` of the library `datasets` leaves, with a cache file of `map` beside it.
    for split, parts in (
        ("train", ("data-00000-of-00002", "data-00001-of-00002")),
        ("test", ("x",)),
    ):
        for number, name in enumerate(parts):
            _write(tmp_path / split / f"{name}.arrow", number)
        _write(tmp_path / split / "cache-1f.arrow", 9)
        listed = [{"filename": f"{name}.arrow"} for name in reversed(parts)]
        (tmp_path / split / "state.json").write_text(json.dumps({"_data_files": listed}))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert _values(tmp_path / "train") == [1, 0]
    with pytest.raises(DataError, match=r"holds the splits test, train: name one, as .*/test"):
        find_files(tmp_path)
    (tmp_path / "train" / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"state\.json does not list the files"):
        find_files(tmp_path / "train")


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("train-0.parquet", "test-0.parquet"), r"several splits \(test, train\): test-0.parquet"),
        (("train/0.parquet", "validation/0.parquet"), r"several splits \(train, validation\)"),
        (("a.jsonl", "a.parquet"), r"several formats \(\.jsonl, \.parquet\): a.jsonl, a.parquet"),
        ((), r"holds no \.jsonl, \.parquet, \.arrow file"),
    ],
)
def test_what_a_directory_stands_for_is_no_guess(
    tmp_path: Path, names: Sequence[str], why: str
) -> None:
    for name in names:
        _write(tmp_path / name, 1)
    with pytest.raises(DataError, match=why):
        find_files(tmp_path)


def test_a_name_that_no_file_fits_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no such file"):
        find_files(tmp_path / "train-*.parquet")
