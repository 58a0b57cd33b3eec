"""All trajectories of a run, as Parquet files, and queries over them.

`schema` has the columns, `write` writes and removes files, `images` keeps what messages show,
`filter` parses conditions, and `read` queries the files with DuckDB. Needs the extra
`trajectories`.
"""

from treadle.tracing.trajectories.filter import FILTER_COLUMNS, Filter, FilterError
from treadle.tracing.trajectories.images import (
    IMAGE_TYPES,
    find_image,
    image_bytes,
    image_name,
    write_image,
)
from treadle.tracing.trajectories.read import SqlError, TrajectoryFiles, UnknownColumnError
from treadle.tracing.trajectories.schema import (
    COLUMNS,
    DIRECTORY,
    SCHEMA,
    SCHEMA_VERSION,
    Column,
    file_name,
)
from treadle.tracing.trajectories.write import (
    SpanColumns,
    is_as_written,
    remove_files_after,
    total_bytes,
    write_file,
)

__all__ = [
    "COLUMNS",
    "DIRECTORY",
    "FILTER_COLUMNS",
    "IMAGE_TYPES",
    "SCHEMA",
    "SCHEMA_VERSION",
    "Column",
    "Filter",
    "FilterError",
    "SpanColumns",
    "SqlError",
    "TrajectoryFiles",
    "UnknownColumnError",
    "file_name",
    "find_image",
    "image_bytes",
    "image_name",
    "is_as_written",
    "remove_files_after",
    "total_bytes",
    "write_file",
    "write_image",
]
