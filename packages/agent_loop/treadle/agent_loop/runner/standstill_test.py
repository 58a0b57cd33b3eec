import asyncio
import logging
import runpy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from treadle.agent_loop.runner.standstill import StandstillWatch

_TOOL = """\
async def tool(wait):
    wait(60)
"""


class _Reported(logging.Handler):
    """Sets an event for each message with a word."""

    def __init__(self, **events: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.events = {word: threading.Event() for word in events.values()}

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        for word, event in self.events.items():
            if word in self.texts[-1]:
                event.set()


@pytest.fixture
def reported() -> Iterator[_Reported]:
    handler = _Reported(stands="stands still", went="went on")
    logger = logging.getLogger("treadle.agent_loop.runner.standstill")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_code_that_blocks_the_event_loop_is_named_with_file_and_line(
    tmp_path: Path, reported: _Reported
) -> None:
    file = tmp_path / "my_tool.py"
    file.write_text(_TOOL)
    tool = cast(Callable[..., object], runpy.run_path(str(file))["tool"])

    async def main() -> None:
        watch = StandstillWatch(0.2)  # Else a busy machine is reported before the tool begins.
        watch.start()
        await tool(reported.events["stands still"].wait)  # type: ignore[misc]
        await asyncio.to_thread(reported.events["went on"].wait, 60)
        watch.stop()

    asyncio.run(main())
    stands, went = reported.texts[:2]
    assert stands.startswith(f"everything stands still for 0.2 s in {file}:2, in tool: ")
    assert went.startswith("it went on after ")


def test_a_loop_that_turns_is_not_reported(reported: _Reported) -> None:
    async def main() -> None:
        watch = StandstillWatch(10)
        watch.start()
        watch.stop()

    asyncio.run(main())
    assert not reported.texts
