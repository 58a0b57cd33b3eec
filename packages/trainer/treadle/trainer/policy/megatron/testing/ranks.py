"""Rank groups: a test's function run in several processes at once.

`run_ranks` waits for all of them; if one fails or the time is up, the others are ended, and the
error carries what the failing rank wrote. Starting a process costs a few seconds of imports, so a
group is best given many cases: a function may bring worlds up and down one after another, also
several small worlds side by side (each meeting through its own file).

The function is named, not passed, so that it is found whatever way the test was imported.
"""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# Eight of them on two busy cores take minutes; a wait without end would say nothing.
_TIMEOUT_S: Final = 900.0
_BOOT: Final = (
    "import sys; sys.path[:] = sys.argv[1].split('\\n'); "
    "from treadle.trainer.policy.megatron.testing.ranks import run_rank; run_rank(*sys.argv[2:])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """What one process is told."""

    rank: int
    num_ranks: int
    folder: Path
    """Empty, shared by the ranks: for the files in which worlds meet."""
    argument: Any


def run_ranks(function: str, num_ranks: int, argument: Any) -> list[Any]:
    """Call `function(RankTask)` in `num_ranks` processes.

    Args:
        function: "module:name", importable with this process's `sys.path`.
        num_ranks: Processes.
        argument: Pickled and given to each.

    Returns:
        What each returned, by rank.

    Raises:
        AssertionError: a rank failed or did not end in time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shared").mkdir()
        processes = []
        for rank in range(num_ranks):
            task = RankTask(
                rank=rank, num_ranks=num_ranks, folder=folder / "shared", argument=argument
            )
            (folder / f"{rank}.task").write_bytes(pickle.dumps(task))
            command = [sys.executable, "-c", _BOOT, "\n".join(sys.path), function]
            with (folder / f"{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen([*command, str(folder / str(rank))], stdout=log, stderr=log)
                )
        try:
            _wait(processes, folder)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [pickle.loads((folder / f"{r}.result").read_bytes()) for r in range(num_ranks)]


def run_rank(function: str, stem: str) -> None:
    """The body of one process."""
    import torch

    torch.set_num_threads(1)  # ranks share the machine's cores
    module, _, name = function.partition(":")
    task = pickle.loads(Path(f"{stem}.task").read_bytes())
    result = getattr(importlib.import_module(module), name)(task)
    Path(f"{stem}.result").write_bytes(pickle.dumps(result))


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    for rank, process in enumerate(processes):
        try:
            code = process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            logs = "\n".join(
                f"--- rank {r} (exit {p.poll()})\n{(folder / f'{r}.log').read_text()[-3000:]}"
                for r, p in enumerate(processes)
            )
            raise AssertionError(f"rank {rank} ended with {code} of {_TIMEOUT_S} s:\n{logs}")
