"""The end of a process with the one that started it.

Invariant: no process of an engine outlives the server, however that ends and whenever, a server
that is killed in the middle of its start included. By themselves, vLLM leaves an engine core
running, with the model in memory, and a worker for ever in a collective operation whose other
members are gone; SGLang leaves a scheduler that was still importing when the server ended.

A thread waits for the parent; nothing waits for the thread.
"""

import multiprocessing
import os
import threading
from multiprocessing import connection

_ORPHANED = 70


def end_with_parent() -> None:
    """Has this process, started by multiprocessing, end with its parent, at once."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "an engine computes in processes that multiprocessing started"

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(_ORPHANED)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()
