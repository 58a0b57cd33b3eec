"""Environments of other libraries as rows and agent loops (extras named like them).

An environment is named in `data.train_files` and `data.val_files`, as "LIBRARY:NAME" or by a YAML
file with settings. `read_rows` makes its rows, which name the agent loop that runs them; that loop
scores its trajectories. See `docs/environments.md`.

Each library is imported by the module of its name only.
"""

from treadle.tools.environments.rows import LIBRARIES, is_environment, read_rows

__all__ = ["LIBRARIES", "is_environment", "read_rows"]
