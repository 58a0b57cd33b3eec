"""How many decisions the router makes per second of CPU, with 50,000 sessions open.

The policy alone (`StickySession`), with and without a bound on the contexts that share a cache; and
the queue around it (`SessionQueue`, with leases), which clients run in process and the routing
service behind gRPC. Every session has a first turn, then a later one. Then, while all of them are
open, each ends and another takes its place, with a first and a later turn.

Last, caches that hold half of the sessions: all of them ask at once, half of them wait, and each
has a first and a later turn and ends, so that every end gives another its place.

    python benchmarks/routing_rate.py [--sessions 50000] [--servers 64 1024] [--rounds 3]
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from treadle.agent_loop import StickySession
from treadle.agent_loop.clock import LoopClock
from treadle.agent_loop.rpc.router.session_queue import SessionQueue

_CONTEXT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A router, or its policy alone.

    Attributes:
        turn: Chooses a session's replica.
        end: Ends a session.
    """

    turn: Callable[[str], Awaitable[object]]
    end: Callable[[str], object]


def of_policy(policy: StickySession) -> Subject:
    """Returns the policy alone."""

    async def turn(session: str) -> object:
        return policy.pick(session, context_tokens=_CONTEXT)

    return Subject(turn=turn, end=policy.finish)


def of_queue(policy: StickySession) -> Subject:
    """Returns the policy with its queue."""
    queue = SessionQueue(policy, clock=LoopClock(), lease_s=3600.0)

    async def turn(session: str) -> object:
        return await queue.open(session, context_tokens=_CONTEXT, wait_s=0.0)

    return Subject(turn=turn, end=queue.close)


async def rates(subject: Subject, sessions: int) -> Sequence[float]:
    """Returns decisions per second of CPU: first turns, later turns, and as sessions change."""
    names = [f"step-1/row-{number // 8}/{number % 8}" for number in range(sessions)]
    found = []
    for _ in range(2):
        began = time.process_time()
        for name in names:
            assert isinstance(await subject.turn(name), str)
        found.append(sessions / (time.process_time() - began))
    began = time.process_time()
    for number, name in enumerate(names):
        subject.end(name)
        other = f"step-2/row-{number // 8}/{number % 8}"
        await subject.turn(other)
        await subject.turn(other)
    found.append(3 * sessions / (time.process_time() - began))
    return found


async def rate_of_full_caches(addresses: Sequence[str], sessions: int) -> float:
    """Returns decisions per second of CPU where half of the sessions wait for room."""
    fitting = max(1, sessions // (2 * len(addresses)))
    policy = StickySession(addresses, cache_tokens=fitting * _CONTEXT)
    queue = SessionQueue(policy, clock=LoopClock(), lease_s=3600.0)

    async def session(name: str) -> None:
        for _ in range(2):
            assert await queue.open(name, context_tokens=_CONTEXT, wait_s=3600.0) is not None
            await asyncio.sleep(0)
        queue.close(name)

    began = time.process_time()
    await asyncio.gather(*(session(f"step-1/row-{n // 8}/{n % 8}") for n in range(sessions)))
    return 3 * sessions / (time.process_time() - began)


def main() -> None:
    """Prints medians and ranges."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=50_000)
    parser.add_argument("--servers", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(
        f"{arguments.sessions:,} sessions; decisions per second of CPU: first turns, later, mixed"
    )
    for servers in arguments.servers:
        addresses = [f"10.0.0.1:{4000 + number}" for number in range(servers)]
        for bound in (None, 1 << 40):
            for name, make in (("policy", of_policy), ("queue", of_queue)):
                found = [
                    asyncio.run(
                        rates(
                            make(StickySession(addresses, cache_tokens=bound)), arguments.sessions
                        )
                    )
                    for _ in range(arguments.rounds)
                ]
                cells = (
                    f"{statistics.median(each):,.0f} ({min(each):,.0f} to {max(each):,.0f})"
                    for each in zip(*found, strict=True)
                )
                print(
                    f"{servers} servers, {name}{', bounded caches' if bound else ''}: "
                    f"{'; '.join(cells)}; load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
        full = [
            asyncio.run(rate_of_full_caches(addresses, arguments.sessions))
            for _ in range(arguments.rounds)
        ]
        print(
            f"{servers} servers, queue, half of the sessions wait: {statistics.median(full):,.0f} "
            f"({min(full):,.0f} to {max(full):,.0f}); load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
