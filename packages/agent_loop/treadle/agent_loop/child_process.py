"""The child's side of a program that another process starts and owns.

Every such program is started with `--parent_pid N` and, if it serves others, with
`--ready_file F`. It ends when that process is gone, and writes its address to that file.
"""

import json
import os
import select
import threading
from pathlib import Path

__all__ = ["watch_parent", "write_ready"]


def watch_parent(parent_pid: int) -> None:
    """Ends this process at once when the process `parent_pid` is gone.

    It does not clean up, since the reader of any result is gone too.
    """

    def wait() -> None:
        try:
            handle = os.pidfd_open(parent_pid)
        except ProcessLookupError:
            os._exit(1)
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        poller.poll()
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def write_ready(path: Path, address: str) -> None:
    """Announces that this process can be reached at `address`; the file appears complete."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps({"address": address, "pid": os.getpid()}), encoding="utf-8")
    partial.replace(path)
