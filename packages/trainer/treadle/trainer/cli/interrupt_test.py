import signal
import subprocess
import sys

import pytest

from treadle.trainer.cli import interrupt

COMMAND = f"""
import asyncio, atexit, sys
from {interrupt.__name__} import Interrupted, until_signal

def slow_exit():
    sys.stdout.write("exiting\\n")
    sys.stdout.flush()
    sys.stdin.read()

async def work():
    sys.stdout.write("working\\n")
    sys.stdout.flush()
    await asyncio.Event().wait()

atexit.register(slow_exit)
try:
    asyncio.run(until_signal(work()))
except Interrupted as ended:
    sys.exit(128 + ended.number)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_during_the_exit_change_nothing(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    process.send_signal(number)
    assert process.stdout.readline() == "exiting\n"
    for _ in range(20):
        process.send_signal(number)
    _, said = process.communicate("")
    assert (process.returncode, said) == (128 + number, "")
