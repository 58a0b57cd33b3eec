"""A reward with a time limit: scored in a process of its own, which is killed when it is too slow.

Only a process can be stopped in the middle of a computation, and rewards compute on what a model
wrote: simplifying its formula, or running into a loop on it, can take for ever.

Invariant: a trajectory gets exactly one answer: the reward's own, its error, or the `timeout_score`
with the metric `reward/timeouts` and a warning. A process that was killed or died is replaced at
the next trajectory. The limit counts from the moment that a process takes the trajectory.

The caller awaits a thread of this object's own pool, one per process; the thread waits for its
process, at most the limit. The processes end with this one.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from treadle.agent_loop import RewardError, RewardFn, Score, Trajectory
from treadle.tracing import Metric, Reduce

_START_S = 120.0
"""For a process to start and to import what the reward needs; not part of the limit."""

_logger = logging.getLogger(__name__)


class BoundedReward:
    """A `RewardFn` around another one.

    Args:
        make: Makes the reward, in the process; picklable.
        name: For errors and warnings.
        timeout_s: Seconds that one trajectory may take.
        timeout_score: What a trajectory that takes longer gets.
        processes: How many score at the same time.

    Raises:
        ValueError: `timeout_s` is not above 0.
    """

    def __init__(
        self,
        make: Callable[[], RewardFn],
        *,
        name: str,
        timeout_s: float,
        timeout_score: float = 0.0,
        processes: int = 2,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}; it must be above 0")
        self._make = make
        self._name = name
        self._timeout_s = timeout_s
        self._timeout_score = timeout_score
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix=f"reward {name}")
        self._own = threading.local()

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Scores a trajectory.

        Raises:
            RewardError: The reward raised, or its process died.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._score, trajectory)

    def _score(self, trajectory: Trajectory) -> Score:
        """In a thread of the pool, which keeps its process from call to call."""
        process: _Process | None = getattr(self._own, "process", None)
        if process is None:
            process = self._own.process = _Process(self._make)
        try:
            answer = process.ask(trajectory, self._timeout_s)
        except (TimeoutError, EOFError, OSError) as error:
            self._own.process = None
            exit_code = process.kill()
            if not isinstance(error, TimeoutError):
                raise RewardError(
                    f"the process of the reward {self._name} died with exit code {exit_code}"
                ) from error
            _logger.warning(
                "task %s: the reward %s did not end within %g s; the trajectory gets %g",
                trajectory.task.task_id,
                self._name,
                self._timeout_s,
                self._timeout_score,
            )
            answer = Score(value=self._timeout_score)
            return _counted(answer, timeouts=1)
        if isinstance(answer, str):
            raise RewardError(f"the reward {self._name}: {answer}")
        return _counted(answer, timeouts=0)


class _Process:
    """One process, which scores one trajectory at a time."""

    def __init__(self, make: Callable[[], RewardFn]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()
        self._ready = False

    def ask(self, trajectory: Trajectory, timeout_s: float) -> Score | str:
        """Returns the score, or the text of the reward's error."""
        if not self._ready:
            self._receive(_START_S)
            self._ready = True
        self._connection.send(trajectory)
        answer = self._receive(timeout_s)
        assert isinstance(answer, Score | str)
        return answer

    def kill(self) -> int | None:
        """Ends the process; returns its exit code."""
        self._process.kill()
        self._process.join()
        exit_code = self._process.exitcode
        self._connection.close()
        self._process.close()
        return exit_code

    def _receive(self, timeout_s: float) -> object:
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return self._connection.recv()


def _serve(connection: Connection, make: Callable[[], RewardFn]) -> None:
    """The process: scores what comes until the other end is gone."""
    reward = make()
    connection.send(None)
    while True:
        try:
            trajectory = connection.recv()
        except EOFError:
            return
        connection.send(_answer(reward, trajectory))


def _answer(reward: RewardFn, trajectory: Trajectory) -> Score | str:
    try:
        result = reward(trajectory)
        if isinstance(result, Awaitable):
            result = asyncio.run(_await(result))
        return Score.of(result)
    except Exception as error:  # a border: whatever the user's function raises is an answer
        return f"{type(error).__name__}: {error}"


async def _await(result: Awaitable[float | Score]) -> float | Score:
    return await result


def _counted(score: Score, *, timeouts: int) -> Score:
    count = Metric("reward/timeouts", timeouts, Reduce.SUM)
    return Score(value=score.value, metrics=(*score.metrics, count))
