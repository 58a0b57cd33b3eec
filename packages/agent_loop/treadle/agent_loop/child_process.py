"""The child's side of a program that another process starts and owns.

Every such program is started with `--parent_pid N` and, if it serves others, with
`--ready_file F`. It ends when that process is gone, and writes its address to that file.
"""

import json
import os
import select
import threading
from pathlib import Path
from typing import Final

__all__ = ["CERTIFICATE", "KEY", "ROOTS", "SERVER_NAME", "watch_parent", "write_ready"]

SERVER_NAME: Final = "run.treadle.internal"
"""The name in the certificate of every process of a run."""
CERTIFICATE: Final = "certificate.pem"
"""In the directory of a run's certificates: that of every process."""
KEY: Final = "key.pem"
"""The certificate's private key."""
ROOTS: Final = "roots.pem"
"""The certificate of the run's authority."""


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
