from typing import Any

import pytest

from treadle.rollout_server.engine import MemoryKind
from treadle.rollout_server.engines.vllm.memory import DeviceMemory

WEIGHTS = frozenset({MemoryKind.WEIGHTS})
KV_CACHE = frozenset({MemoryKind.KV_CACHE})
BOTH = WEIGHTS | KV_CACHE


class OldLlm:
    """Writes down what it is asked for; releases before 0.31 do not release the cache alone."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    async def reset_prefix_cache(self) -> None:
        self.calls.append("forget prefixes")

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake", *sorted(tags)))


class Llm(OldLlm):
    async def release_kv_cache_memory(self) -> None:
        self.calls.append("release kv")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("steps", "calls"),
    [
        ([("-", BOTH), ("+", BOTH)], [("sleep", 1), ("wake", "kv_cache", "weights")]),
        (  # The wake-up in stages.
            [("-", BOTH), ("+", WEIGHTS), ("+", KV_CACHE)],
            [("sleep", 1), ("wake", "weights"), ("wake", "kv_cache")],
        ),
        ([("-", KV_CACHE), ("+", KV_CACHE)], ["release kv", ("wake", "kv_cache")]),
        (
            [("-", KV_CACHE), ("-", WEIGHTS), ("+", BOTH)],
            ["release kv", ("sleep", 1), ("wake", "kv_cache", "weights")],
        ),
        # The cache goes with the weights, and comes with them.
        ([("-", WEIGHTS), ("+", WEIGHTS)], [("sleep", 1), ("wake", "kv_cache", "weights")]),
        ([("-", WEIGHTS), ("-", KV_CACHE)], [("sleep", 1)]),
        ([("-", BOTH), ("-", BOTH), ("+", BOTH), ("+", BOTH)], None),
    ],
)
async def test_kinds_become_what_vllm_can_do(steps: list[Any], calls: list[Any] | None) -> None:
    llm = Llm()
    memory = DeviceMemory(llm, on_cpu=False)
    for sign, kinds in steps:
        await (memory.release(kinds) if sign == "-" else memory.restore(kinds))
    assert llm.calls == (calls or [("sleep", 1), ("wake", "kv_cache", "weights")])


@pytest.mark.asyncio
async def test_on_the_cpu_only_prefixes_go() -> None:
    llm = Llm()
    memory = DeviceMemory(llm, on_cpu=True)
    await memory.release(BOTH)
    with pytest.raises(RuntimeError, match=r"released \(kv_cache, weights\): restore it"):
        memory.check_resident()
    await memory.restore(BOTH)
    memory.check_resident()
    assert llm.calls == ["forget prefixes"]


@pytest.mark.asyncio
async def test_an_older_vllm_releases_the_weights_with_the_cache() -> None:
    llm = OldLlm()
    memory = DeviceMemory(llm, on_cpu=False)
    await memory.release(KV_CACHE)
    await memory.restore(KV_CACHE)
    assert llm.calls == [("sleep", 1), ("wake", "kv_cache", "weights")]
