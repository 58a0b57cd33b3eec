"""Writes the trajectories of one step and phase as one Parquet file.

Invariant: a file is there whole or not at all. It is written under another name and renamed when it
is complete; nothing is forced to the disk, so a machine that loses power may lose the last files or
damage them, and a reader leaves those out. One process writes a directory at a time.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from treadle.tracing.trajectories.schema import (
    LEFT_OUT_KEY,
    SCHEMA,
    SCHEMA_VERSION,
    SCHEMA_VERSION_KEY,
    file_name,
    parse_file_name,
)

__all__ = ["SpanColumns", "is_as_written", "remove_files_after", "total_bytes", "write_file"]

_PARTIAL: Final = ".partial"
_ROWS_PER_GROUP: Final = 256
_TOKENS_PER_GROUP: Final = 1 << 20
"""Bounds of a row group. A query looks at each one, and reading one trajectory decompresses the one
that has it."""
_TOKEN_FLOATS: Final = tuple(
    f"samples.list.element.{name}.list.element"
    for name in ("logprobs", "policy_logprobs", "entropy", "advantages")
)
"""Their bytes are ordered by significance, which makes 15 bytes of a token of 21. It excludes
dictionaries, whose part zstd does as well."""


_ARROW: Final = re.compile(r"parquet-cpp-arrow version \d+\.\d+\.\d+")


def write_file(
    directory: Path,
    *,
    step: int,
    phase: str,
    rows: Iterable[Mapping[str, object]],
    left_out: int = 0,
) -> int:
    """Writes the file of a step and phase; replaces the one that is there.

    Args:
        directory: Made if it is missing.
        rows: By the names of `SCHEMA`; lists of numbers may be arrays, strings UTF-8, and `spans`
            `SpanColumns`. Other keys are an error.
        left_out: Number of trajectories of the step that are not among the rows.

    Returns:
        The size of the file in bytes.

    Raises:
        OSError: The disk is full or gone. No partial file stays.
        ValueError: A row does not fit the schema.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / file_name(step, phase)
    partial = path.with_name(path.name + _PARTIAL)
    try:
        with _writer(partial, _schema(b"%d" % left_out), checksums=True) as file:
            # A row group at a time, so that few rows are in memory, and other threads get a turn.
            for group in _groups(rows):
                file.write_table(_table(group))
        size = partial.stat().st_size
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:  # pyarrow names no file
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise
    return size


def _writer(sink: Path | BinaryIO, schema: pa.Schema, *, checksums: bool) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        use_dictionary=False,
        column_encoding=dict.fromkeys(_TOKEN_FLOATS, "BYTE_STREAM_SPLIT"),
        write_page_checksum=checksums,
    )


def is_as_written(path: Path) -> bool:
    """Returns whether a file has the bytes that its rows give when they are written again.

    So a change of any byte is found. In a file of another version of Arrow or of the schema, only
    the checksums of its pages are compared; releases up to 0.1 wrote none.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            written_by, found = file.metadata.created_by, file.schema_arrow.metadata or {}
            groups = [file.read_row_group(number) for number in range(file.num_row_groups)]
            same_columns = file.schema_arrow.equals(SCHEMA)
    except (OSError, ValueError, pa.ArrowException):
        return False
    if not _ARROW.fullmatch(written_by):
        return False
    if written_by != f"parquet-cpp-arrow version {pa.__version__}":
        return True
    if not same_columns:
        return found.get(SCHEMA_VERSION_KEY) != b"%d" % SCHEMA_VERSION
    content, schema = path.read_bytes(), _schema(found.get(LEFT_OUT_KEY, b"0"))
    return any(_written(schema, groups, checksums=each) == content for each in (True, False))


def _schema(left_out: bytes) -> pa.Schema:
    metadata = {SCHEMA_VERSION_KEY: b"%d" % SCHEMA_VERSION, LEFT_OUT_KEY: left_out}
    return SCHEMA.with_metadata(metadata)


def _written(schema: pa.Schema, groups: Sequence[pa.Table], *, checksums: bool) -> bytes:
    sink = io.BytesIO()
    with _writer(sink, schema, checksums=checksums) as file:
        for group in groups:
            file.write_table(group)
    return sink.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanColumns:
    """N spans of a sample as a row may have them: without an object for each.

    Attributes:
        origins: [N], uint32: 0 is `prompt`, 1 `sampled`, 2 `observed`.
        starts: Array of shape [N], uint32.
        stops: Array of shape [N], uint32.
        versions: [N], uint32: weight versions plus one, or 0 for none.
        text: The spans as one text in UTF-8.
        begins: [N + 1], uint32: where each begins in it, and the end.
    """

    origins: memoryview
    starts: memoryview
    stops: memoryview
    versions: memoryview
    text: bytes
    begins: memoryview


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Returns rows as a table.

    Spans become Arrow's for all rows at once: for each row alone, it would cost more than the
    objects do.
    """
    spans = [sample["spans"] for row in rows for sample in row["samples"]]
    if not any(isinstance(each, SpanColumns) for each in spans):
        return pa.Table.from_pylist(rows, schema=SCHEMA)
    without = [
        {**row, "samples": [{**sample, "spans": ()} for sample in row["samples"]]} for row in rows
    ]
    table = pa.Table.from_pylist(without, schema=SCHEMA)
    samples = table.column("samples").combine_chunks()
    kind = SCHEMA.field("samples").type
    children = [
        _spans(spans) if field.name == "spans" else samples.values.field(field.name)
        for field in kind.value_type
    ]
    structs = pa.StructArray.from_arrays(children, fields=list(kind.value_type))
    column = pa.ListArray.from_arrays(samples.offsets, structs, type=kind)
    return table.set_column(SCHEMA.get_field_index("samples"), SCHEMA.field("samples"), column)


def _spans(given: Sequence[Any]) -> pa.Array:
    """Returns the spans of each sample: lists, or `SpanColumns`."""
    parts: list[pa.Array] = []
    for as_columns, group in itertools.groupby(given, lambda each: isinstance(each, SpanColumns)):
        if as_columns:
            parts.append(_joined(list(group)))
        else:
            parts.append(pa.array([span for each in group for span in each], _SPANS.value_type))
    sizes = (len(each.origins) if isinstance(each, SpanColumns) else len(each) for each in given)
    offsets = pa.array(itertools.accumulate(sizes, initial=0), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.concat_arrays(parts), type=_SPANS)


def _joined(samples: Sequence[SpanColumns]) -> pa.Array:
    """Returns the spans of all samples, one after another."""

    def numbers(kind: pa.DataType, columns: Iterable[memoryview]) -> pa.Array:
        memory = b"".join(columns)
        return pa.Array.from_buffers(kind, len(memory) // 4, [None, pa.py_buffer(memory)])

    versions = numbers(pa.uint32(), (each.versions for each in samples)).cast(pa.int64())
    known = pc.subtract(versions, 1)
    texts = [
        pa.StringArray.from_buffers(
            len(each.origins), pa.py_buffer(each.begins), pa.py_buffer(each.text)
        )
        for each in samples
    ]
    columns = [
        pa.array(_ORIGINS, pa.string()).take(numbers(pa.uint32(), (s.origins for s in samples))),
        numbers(pa.int32(), (each.starts for each in samples)),
        numbers(pa.int32(), (each.stops for each in samples)),
        pc.if_else(pc.less(known, 0), pa.scalar(None, pa.int64()), known),
        pa.concat_arrays(texts),
    ]
    return pa.StructArray.from_arrays(columns, fields=list(_SPANS.value_type))


def _groups(rows: Iterable[Mapping[str, object]]) -> Iterator[list[Mapping[str, object]]]:
    """Yields the rows of each row group; one that passes the bound of tokens ends its group."""
    group: list[Mapping[str, object]] = []
    tokens = 0
    for row in rows:
        group.append(_checked(row))
        count = row["num_tokens"]
        tokens += count if isinstance(count, int) else 0
        if len(group) == _ROWS_PER_GROUP or tokens >= _TOKENS_PER_GROUP:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _checked(row: Mapping[str, object]) -> Mapping[str, object]:
    if row.keys() != _NAMES:
        unknown, missing = sorted(row.keys() - _NAMES), sorted(_NAMES - row.keys())
        raise ValueError(f"a row has unknown columns {unknown} and lacks {missing}")
    return row


_NAMES: Final = frozenset(SCHEMA.names)
_ORIGINS: Final = ("prompt", "sampled", "observed")
_SPANS: Final = SCHEMA.field("samples").type.value_type.field("spans").type


def remove_files_after(directory: Path, step: int | None) -> None:
    """Removes files of later steps, and what an interrupted write left.

    Args:
        step: The last step that stays; None: no file stays.

    Raises:
        OSError: A file cannot be removed.
    """
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        found = parse_file_name(path.name.removesuffix(_PARTIAL))
        later = found is not None and (step is None or found[0] > step)
        if later or path.name.endswith(_PARTIAL):
            path.unlink()


def total_bytes(directory: Path) -> int:
    """Returns the size of all trajectory files of a directory, which may be missing."""
    if not directory.is_dir():
        return 0
    return sum(p.stat().st_size for p in directory.iterdir() if parse_file_name(p.name))
