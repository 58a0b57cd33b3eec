"""Signals: they cancel the work of a command, which then cleans up.

Invariant: after the first signal, the command decides how the process ends, however many follow. A
signal that comes when the event loop is closed is ignored: a KeyboardInterrupt would interrupt the
interpreter's exit with a traceback.
"""

import asyncio
import signal
from collections.abc import Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

__all__ = ["Interrupted", "interrupted_text", "until_signal"]

T = TypeVar("T")


def interrupted_text(run_dir: Path) -> str:
    """Returns the last line of a run that a signal ended."""
    from treadle.trainer.checkpoint.run_directory import CHECKPOINTS, Checkpoints

    steps = Checkpoints(run_dir / CHECKPOINTS, keep=1).steps()
    saved = f"step {steps[-1]} is saved" if steps else "no checkpoint was saved"
    return f"interrupted; {saved}; to resume: run.dir={run_dir}"


class Interrupted(Exception):
    """A signal ended the work."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


async def until_signal(work: Coroutine[Any, Any, T]) -> T:
    """Awaits the work; SIGINT and SIGTERM cancel it, so that it can clean up.

    Raises:
        Interrupted: A signal came.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        task.cancel()

    def handle(number: int, frame: FrameType | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(end, number)

    # Not the loop's own handlers, which it takes away when it closes.
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise Interrupted(received[0]) from None
        raise
    finally:
        if not received:
            for number, handler in before.items():
                signal.signal(number, handler)
