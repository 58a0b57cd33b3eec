"""The environment variables that the trainer reads and sets: all of them are here."""

import os

from treadle.trainer.policy_commands import AUTHKEY_VARIABLE

__all__ = ["cpu_count", "read_authkey", "thread_variables"]


def read_authkey() -> bytes:
    """The key of the connections between driver and ranks; the driver puts it there.

    Raises:
        RuntimeError: the process was not started by a driver.
    """
    key = os.environ.get(AUTHKEY_VARIABLE)
    if not key:
        raise RuntimeError(f"{AUTHKEY_VARIABLE} is not set: the trainer starts policy ranks")
    return bytes.fromhex(key)


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def thread_variables(threads: int) -> dict[str, str]:
    """What keeps the numerical libraries of a child to so many threads.

    Idle workers sleep instead of spinning: trainer and servers take turns on the same cores.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
