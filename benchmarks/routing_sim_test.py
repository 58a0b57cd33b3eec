"""The simulation is the fake engine, computed; and what the replay says, in small."""

import asyncio
import random
from contextlib import aclosing

import pytest
from routing_policies import CumulativeHeap
from routing_replay import COST, OURS, Setting, policies, replay
from routing_sim import Cost, Session, Simulation, Turn
from routing_trace import COMMON_TOKENS, make_trace

from treadle.rollout_server.engine import EngineRequest, ModelInfo, Sampling, Tokens
from treadle.rollout_server.engines.fake.engine import FakeEngine, FakeLatency
from treadle.rollout_server.testing.clock import FakeClock

SMALL = Cost(
    prefill_s_per_token=0.003, decode_s_per_token=0.02, max_running=3, cache_tokens=1 << 20
)
BLOCK = 16  # the fake's cache holds whole blocks, so all lengths are multiples


def small_trace(seed: int) -> list[Session]:
    rng = random.Random(seed)
    return [
        Session(
            index=index,
            task=index // 2,
            turns=tuple(
                Turn(
                    new_tokens=BLOCK * (2 if turn == 0 else rng.randint(1, 4)),
                    sampled_tokens=BLOCK * rng.randint(1, 3),
                    tool_s=rng.uniform(0.01, 2.0),
                )
                for turn in range(rng.randint(1, 6))
            ),
        )
        for index in range(10)
    ]


class OneEngine:
    """A policy without a choice."""

    def pick(self, request: object) -> int:
        return 0

    def done(self, request: object) -> None: ...

    def finish(self, session: object) -> None: ...


async def for_real(trace: list[Session]) -> tuple[list[float], int]:
    """The trace through a `FakeEngine`: when each session ended, and the tokens it had cached."""
    clock = FakeClock()
    engine = FakeEngine(
        model=ModelInfo(architecture="fake", vocab_size=512, context_length=1 << 16),
        clock=clock,
        latency=FakeLatency(
            prefill_s_per_token=SMALL.prefill_s_per_token,
            decode_s_per_token=SMALL.decode_s_per_token,
        ),
        max_running=SMALL.max_running,
    )
    ends = [0.0] * len(trace)
    hits = 0

    async def wait(seconds: float) -> None:
        over = asyncio.Event()
        clock.call_at(clock.time() + seconds, over.set)
        await over.wait()

    async def run(session: Session) -> None:
        nonlocal hits
        context = [7] * BLOCK
        for number, turn in enumerate(session.turns):
            context += [session.task + 8 if number == 0 else number] * turn.new_tokens
            request = EngineRequest(
                request_id=f"{session.index}.{number}",
                prompt=tuple(context),
                sampling=Sampling(
                    max_tokens=turn.sampled_tokens,
                    temperature=1.0,
                    seed=session.index,
                    ignore_eos=True,
                ),
                logprobs=False,
            )
            async with aclosing(engine.generate(request)) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        context += event.token_ids
                    elif number and hasattr(event, "cached_prompt_tokens"):
                        hits += event.cached_prompt_tokens
            if number < len(session.turns) - 1:
                await wait(turn.tool_s)
        ends[session.index] = clock.time()

    tasks = [asyncio.create_task(run(session)) for session in trace]
    while not all(task.done() for task in tasks):
        for _ in range(30):  # everything that this instant leads to
            await asyncio.sleep(0)
        if (when := clock.next_timer) is not None:
            clock.advance(when - clock.time())
    await asyncio.gather(*tasks)
    return sorted(ends), hits


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(3))
async def test_the_simulation_is_the_fake_engine(seed: int) -> None:
    """Places, their order, prefill of what is not cached, decode: to the microsecond."""
    trace = small_trace(seed)
    simulated = Simulation(
        trace,
        OneEngine(),
        cost=SMALL,
        num_engines=1,
        max_in_flight=len(trace),
        common_tokens=BLOCK,
    ).run()
    ends, hits = await for_real(trace)
    assert list(simulated.ends_s) == pytest.approx(ends, abs=1e-6)
    assert simulated.hit_rate == 1.0
    assert hits == simulated.hit_tokens


def test_a_replay_repeats() -> None:
    trace = make_trace(3, num_sessions=60)
    setting = Setting(name="", num_engines=2, max_in_flight=40)
    first, second = (replay(setting, CumulativeHeap(2, 1), trace) for _ in range(2))
    assert first == second
    assert len(first.latencies_s) == 60


def test_the_trace_has_the_published_turns() -> None:
    turns = sorted(len(session.turns) for session in make_trace(0))
    assert len(turns) == 610
    assert [turns[0], turns[304], turns[548], turns[603], turns[-1]] == [5, 29, 56, 85, 99]


def test_a_cache_that_is_too_small_forgets_the_least_recently_used() -> None:
    """Three sessions that take turns: a cache of one holds none of them when it comes back."""
    turns = (Turn(new_tokens=20_000, sampled_tokens=10, tool_s=0.0),) + (
        Turn(new_tokens=10, sampled_tokens=10, tool_s=0.0),
    ) * 5
    trace = [Session(index=i, task=i, turns=turns) for i in range(3)]
    hit_rates = []
    for cache_tokens in (25_000, 70_000):
        cost = Cost(
            prefill_s_per_token=0.001,
            decode_s_per_token=0.02,
            max_running=1,
            cache_tokens=cache_tokens,
        )
        setting = Setting(name="", num_engines=1, max_in_flight=3)
        hit_rates.append(replay(setting, OneEngine(), trace, cost).hit_rate)
    assert hit_rates[0] < 0.3
    assert hit_rates[1] == 1.0


def test_ours_has_the_shortest_sessions_under_pressure() -> None:
    """The replay's moderate pressure on half of the engines and of the trace."""
    trace = make_trace(0, num_sessions=305)
    setting = Setting(name="", num_engines=2, max_in_flight=160)
    assert COST.max_running == 64 and COMMON_TOKENS == 2000
    means = {
        name: replay(setting, make(), trace).mean_latency_s
        for name, make in policies(2, seed=0).items()
    }
    assert min(means, key=means.__getitem__) == OURS
    assert means["verl 2025-08"] / means[OURS] > 1.3
