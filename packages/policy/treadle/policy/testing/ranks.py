"""Rank groups: a test's function run in several processes at once.

`run_ranks` waits for all of them. If one fails or the time is up, it ends the others and raises an
error with what the failing rank wrote.

The ranks are forked from a server process (`multiprocessing`'s forkserver) that has imported torch
and Megatron-core and computed nothing: importing them costs 10 s of processor time, which a test
run pays once instead of once per rank.

The function is named, not passed, so that it is found however the test was imported.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

# What every rank imports: the policy, and what that imports when it is built and first trained.
_PRELOADED: Final = (
    "treadle.policy.backends.megatron.backend",
    "treadle.policy.backends.fsdp.backend",
    "transformers.models.auto.configuration_auto",
    "torch._dynamo",
)

# Eight ranks on two busy cores take minutes; without a limit a hang would show nothing.
_TIMEOUT_S: Final = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """The argument of one process.

    Attributes:
        rank: Counted from 0, without gaps.
        folder: Empty folder that all ranks share, for the rendezvous files of their worlds.
    """

    rank: int
    num_ranks: int
    folder: Path
    argument: Any


def run_ranks(function: str, num_ranks: int, argument: Any) -> list[Any]:
    """Calls `function(RankTask)` in `num_ranks` processes.

    Args:
        function: "module:name", importable with this process's `sys.path`.
        argument: Pickled and given to each.

    Returns:
        The return values, by rank.

    Raises:
        AssertionError: A rank failed or did not end in time.
    """
    context = _context()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shared").mkdir()
        processes = []
        for rank in range(num_ranks):
            task = RankTask(
                rank=rank, num_ranks=num_ranks, folder=folder / "shared", argument=argument
            )
            (folder / f"{rank}.task").write_bytes(pickle.dumps(task))
            processes.append(
                context.Process(target=_run_rank, args=(function, str(folder / str(rank))))
            )
        try:
            for process in processes:
                process.start()
            _wait(processes, folder)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [pickle.loads((folder / f"{r}.result").read_bytes()) for r in range(num_ranks)]


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED])
    # CPython 3.11 does not give the server our sys.path; it reads the environment.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _run_rank(function: str, stem: str) -> None:
    """The body of one process."""
    import torch

    log = os.open(f"{stem}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)  # ranks share the machine's cores
    module, _, name = function.partition(":")
    task = pickle.loads(Path(f"{stem}.task").read_bytes())
    try:
        result = getattr(importlib.import_module(module), name)(task)
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
    Path(f"{stem}.result").write_bytes(pickle.dumps(result))


def _wait(processes: Sequence[ForkServerProcess], folder: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    for rank, process in enumerate(processes):
        process.join(max(0.1, deadline - time.monotonic()))
        if process.exitcode != 0:
            logs = "\n".join(
                f"--- rank {r} (exit {p.exitcode})\n{(folder / f'{r}.log').read_text()[-3000:]}"
                for r, p in enumerate(processes)
            )
            raise AssertionError(
                f"rank {rank} ended with {process.exitcode} of {_TIMEOUT_S} s:\n{logs}"
            )
