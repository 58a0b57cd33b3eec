"""Detects a blocked event loop: code on it that does not return.

A thread schedules a callback on the loop at intervals. If it does not run within the limit, the
thread logs the place in the code: usually an async function in the user's file that does not await
or that calls something that blocks. Python cannot end such code, so nothing is ended.
"""

import asyncio
import logging
import sys
import threading
import time

from treadle.agent_loop.user_code import running_place

_log = logging.getLogger(__name__)


class StandstillWatch:
    """Watches one event loop.

    Args:
        limit_s: Seconds without a callback after which the loop is reported; above 0.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._ended = threading.Event()

    def start(self) -> None:
        """Begins to watch the event loop that runs."""
        arguments = (asyncio.get_running_loop(), threading.get_ident())
        threading.Thread(
            target=self._watch, args=arguments, name="standstill watch", daemon=True
        ).start()

    def stop(self) -> None:
        """Ends the watch."""
        self._ended.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        while not self._ended.wait(self._limit_s / 2):
            asked, sign = time.monotonic(), threading.Event()
            try:
                loop.call_soon_threadsafe(sign.set)
            except RuntimeError:  # the loop has closed
                return
            if sign.wait(self._limit_s):
                continue
            frame = sys._current_frames().get(thread)
            where = "" if frame is None else f" in {running_place(frame)}"
            _log.warning(
                "everything stands still for %g s%s: code on the event loop must await, or be a "
                "plain function, which runs on a thread",
                self._limit_s,
                where,
            )
            sign.wait()
            _log.warning("it went on after %.3g s", time.monotonic() - asked)
