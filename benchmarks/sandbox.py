"""What isolation costs: programs through tool and server, against plain `python -I -c`.

Both sides run the same programs with as many at one time, in turns, so that a noisy machine hits
both. `plain` starts the server's interpreter without any isolation: no sandbox that starts an
interpreter per program can be faster. `burst` is many callers at once through the whole path (tool,
HTTP, server, bubblewrap): the time of a call is then mostly waiting for a slot. `warm` is one
caller who pauses, with numpy and sympy imported before and not.

    python benchmarks/sandbox.py [--calls 1000] [--rounds 3] [--warm_calls 20] [--out results.json]
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from treadle.agent_loop import AgentTask, Message
from treadle.tools.code_interpreter import CodeInterpreterTool
from treadle.tools.sandbox import LocalSandbox, Program
from treadle.tools.sandbox.testing import server_process

LIBRARIES = (
    "import numpy, sympy\n"
    "x = sympy.Symbol('x')\n"
    "print(sympy.factor(x**2 - 1), numpy.arange(3).sum())"
)
EXPECTED = "(x - 1)*(x + 1) 3\n"
PLACES = 2 * len(os.sched_getaffinity(0))
PYTHON = os.path.realpath(sys.executable)
TASK = AgentTask(
    task_id="benchmark",
    sample_index=0,
    rollout_index=0,
    loop="tool_agent",
    messages=(Message(role="user", content="-"),),
)

_Run = Callable[[int], Awaitable[str]]


async def plain(number: int) -> str:
    """The same program, in an interpreter that nothing isolates."""
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, "-I", "-S", "-c", f"print({number} ** 2)"),
        stdout=asyncio.subprocess.PIPE,
    )
    return (await process.communicate())[0].decode()


async def burst(run: _Run, calls: int, *, at_once: int) -> dict[str, float]:
    """`calls` programs, `at_once` of them started together."""
    gate = asyncio.Semaphore(at_once)
    seconds: list[float] = []
    failures = 0

    async def one(number: int) -> None:
        nonlocal failures
        began = time.perf_counter()
        async with gate:
            failures += await run(number) != f"{number**2}\n"
        seconds.append(time.perf_counter() - began)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(calls):
            group.create_task(one(number))
    return _times(seconds) | {
        "calls_per_s": calls / (time.perf_counter() - began),
        "lost": float(calls - len(seconds)),
        "failures": float(failures),
    }


async def one_caller(*, warm: int, calls: int) -> dict[str, float]:
    """A program with libraries, again and again; never faster than interpreters get warm."""
    async with LocalSandbox(places=1, warm=warm) as sandbox:
        seconds = []
        for _ in range(calls):
            if warm:
                await sandbox.until_warm()
            began = time.perf_counter()
            execution = await sandbox.run(Program(code=LIBRARIES, timeout_s=60))
            seconds.append(time.perf_counter() - began)
            if (execution.stdout, execution.warm) != (EXPECTED, bool(warm)):
                raise RuntimeError(f"not as it should be: {execution}")
    return _times(seconds)


async def run(calls: int, rounds: int, warm_calls: int) -> dict[str, Any]:
    """All sides in turn, `rounds` times."""
    sides: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        limit = ("--queue", str(calls), "--warm", "0", "--packages", "")
        async with server_process(*limit) as (url, _):
            config = {"sandbox_fusion_url": url, "num_workers": calls, "rate_limit": calls}
            session = await CodeInterpreterTool(config=config).open(TASK)

            async def through_tool(number: int) -> str:
                return (await session.call({"code": f"print({number} ** 2)"})).content  # noqa: B023

            await through_tool(0)
            result = await burst(through_tool, calls, at_once=calls)
            sides.setdefault("sandbox", []).append(result)
            await session.aclose()
        result = await burst(plain, calls, at_once=PLACES)
        sides.setdefault("plain", []).append(result)
        for name, warm in (("cold", 0), ("warm", 1)):
            sides.setdefault(name, []).append(await one_caller(warm=warm, calls=warm_calls))
    return {"places": PLACES, "rounds": sides}


def _times(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {
        "p50_ms": statistics.median(ordered) * 1000,
        "p99_ms": ordered[min(last, round(last * 0.99))] * 1000,
    }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm_calls", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = asyncio.run(run(arguments.calls, arguments.rounds, arguments.warm_calls))
    for side, rounds in result["rounds"].items():
        for name in rounds[0]:
            values = [one[name] for one in rounds]
            shown = f"{statistics.median(values):10.1f}  ({min(values):.1f} to {max(values):.1f})"
            print(f"{side:10} {name:12} {shown}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
