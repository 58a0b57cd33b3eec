"""Ends a process when the process that started it ends.

Invariant: no process of an engine outlives the server, however and whenever the server ends,
even if it is killed during start. Without this, vLLM leaves an engine core running, with the
model in memory, and a worker blocked forever in a collective operation whose other members are
gone; SGLang leaves a scheduler that was still importing when the server ended.

A thread waits for the parent; nothing waits for the thread.
"""

import multiprocessing
import os
import threading
from multiprocessing import connection

_ORPHANED = 70


def die_with_parent() -> None:
    """Makes this process, started by multiprocessing, exit as soon as its parent does."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was not started by multiprocessing"

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(_ORPHANED)

    threading.Thread(target=wait, name="die-with-parent", daemon=True).start()
