"""The columns of the trajectory files, one Parquet file per step and phase.

Invariant: every file of `RUN/trajectories/` that this release writes has exactly these columns, and
its metadata has `SCHEMA_VERSION`. A change that a reader of today's files would notice raises the
version; readers skip files of unsupported versions, and name them. Files of an older version in
`OLD_SCHEMAS` are read; the columns that they lack are null.

`COLUMNS` is the only list of the columns. The Arrow schema and the table of docs/trajectories.md
are derived from it.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import pyarrow as pa

__all__ = [
    "COLUMNS",
    "DIRECTORY",
    "LEFT_OUT_KEY",
    "OLD_SCHEMAS",
    "SCHEMA",
    "SCHEMA_VERSION",
    "SCHEMA_VERSION_KEY",
    "SNIPPET_CHARACTERS",
    "Column",
    "file_name",
    "parse_file_name",
]

SCHEMA_VERSION: Final = 2
"""Version of the files that this release writes."""
SCHEMA_VERSION_KEY: Final = b"treadle.trajectories.version"
"""Key of the version in the metadata of a file."""
LEFT_OUT_KEY: Final = b"treadle.trajectories.left_out"
"""Key, in the metadata of a file, of the number of trajectories of its step that it does not have,
because the budget of the run was spent."""

DIRECTORY: Final = "trajectories"
"""Name of the directory of the files in a run directory."""
SNIPPET_CHARACTERS: Final = 2_000
"""Maximum length of `prompt` and `response`."""


class Column(NamedTuple):
    """One column.

    Attributes:
        name: In the files and in SQL.
        nullable: Whether a value may be missing.
        doc: Its meaning, in one sentence.
    """

    name: str
    type: pa.DataType
    nullable: bool
    doc: str


def _struct(*fields: tuple[str, pa.DataType] | tuple[str, pa.DataType, bool]) -> pa.DataType:
    """Returns a struct of (name, type) or (name, type, nullable); False is the default."""
    return pa.struct([pa.field(name, kind, nullable=bool(rest)) for name, kind, *rest in fields])


def _list(of: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", of, nullable=False))


_FLOATS = _list(pa.float32())

_SPAN = _struct(
    ("origin", pa.string()),
    ("start", pa.int32()),
    ("stop", pa.int32()),
    ("weight_version", pa.int64(), True),
    ("text", pa.string(), True),
)
# Lists per token are as long as `ids`. A float is NaN where it does not apply: where the token was
# not sampled, and of the policy also where the sequence did not go through the model. A list is
# null where the sample was not trained on.
_SAMPLE = _struct(
    ("ids", _list(pa.int32())),
    ("spans", _list(_SPAN)),
    ("logprobs", _FLOATS),
    ("policy_logprobs", _FLOATS, True),
    ("entropy", _FLOATS, True),
    ("advantages", _FLOATS, True),
)
_FINDING = _struct(("kind", pa.string()), ("text", pa.string()))
_SAMPLE_REWARD = _struct(("player", pa.string()), ("value", pa.float64()))
_TRACE_SPAN = _struct(
    ("name", pa.string()),
    ("span_id", pa.string()),
    ("parent_id", pa.string(), True),
    ("start_unix_ns", pa.int64()),
    ("duration_ns", pa.int64()),
    ("attributes", pa.string()),
    ("error", pa.string(), True),
)

COLUMNS: Final = (
    Column("step", pa.int32(), False, "Number of the step; 0 before training."),
    Column("phase", pa.string(), False, "`train`, or `val` for a validation or an evaluation."),
    Column("task_id", pa.string(), False, "Names the row; a group has one task id."),
    Column("rollout_index", pa.int32(), False, "Number of the trajectory within its group."),
    Column("loop", pa.string(), False, "Name of the agent loop."),
    Column("data_source", pa.string(), True, "Column `data_source` of the row."),
    Column("ground_truth", pa.string(), True, "Of the row; JSON if it is not a string."),
    Column("reward", pa.float64(), True, "Null: nothing scored it."),
    Column("answer", pa.string(), True, "The answer as the reward read it."),
    Column("advantage", pa.float64(), True, "Mean over its tokens; null: not trained on."),
    Column("stop", pa.string(), False, "Why it ended, as `finished` or `error`."),
    Column("error", pa.string(), True, "Type and text of the error that it failed with."),
    Column("traceback", pa.string(), True, "Of that error."),
    Column("num_turns", pa.int32(), False, "The prompt, every completion and every answer to one."),
    Column("num_tokens", pa.int32(), False, "Tokens of all its samples."),
    Column("num_sampled_tokens", pa.int32(), False, "Those that the model sampled."),
    Column("duration_s", pa.float64(), True, "From its start to its end, in seconds."),
    Column(
        "prompt", pa.string(), False, "The last user message of the prompt, 2,000 characters of it."
    ),
    Column("response", pa.string(), False, "The last assistant message, 2,000 characters of it."),
    Column("tools", _list(pa.string()), False, "Names of the tools that it called, each once."),
    Column("drift", pa.int32(), False, "Number of findings of kind `drift`."),
    Column("tool_rewards", _list(pa.float64()), False, "One per tool call."),
    Column("turn_scores", _list(pa.float64()), False, "What an interaction gave to turns."),
    Column(
        "sample_rewards",
        _list(_SAMPLE_REWARD),
        True,
        "One per sample where players have their own rewards; else null.",
    ),
    Column(
        "messages",
        pa.string(),
        False,
        "JSON: the messages of the last sample; images by the names of their files in `images/`.",
    ),
    Column(
        "samples",
        _list(_SAMPLE),
        False,
        "Its token sequences, with what is known of each token.",
    ),
    Column("findings", _list(_FINDING), False, "What deserves attention and is no error."),
    Column("metrics", pa.map_(pa.string(), pa.float64()), False, "What loop and tools reported."),
    Column("trace", _list(_TRACE_SPAN), False, "Timed operations; `attributes` is JSON."),
)
"""All columns, in the order of the files."""

SCHEMA: Final = pa.schema([pa.field(c.name, c.type, nullable=c.nullable) for c in COLUMNS])
"""The schema without the metadata of a file."""

OLD_SCHEMAS: Final = {
    1: pa.schema([field for field in SCHEMA if field.name != "sample_rewards"]),
}
"""Version -> schema of older files that are read."""

_FILE_NAME = re.compile(r"step-(\d{6,})-(train|val)\.parquet")


def file_name(step: int, phase: str) -> str:
    """Returns the name of the file of a step and phase."""
    return f"step-{step:06d}-{phase}.parquet"


def parse_file_name(name: str) -> tuple[int, str] | None:
    """Returns step and phase; None if it is no name of a trajectory file."""
    match = _FILE_NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])
