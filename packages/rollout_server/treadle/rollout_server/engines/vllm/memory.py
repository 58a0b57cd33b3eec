"""Device memory: what vLLM has given away, kind by kind.

Invariant: the weights come back as they were: vLLM copies them to host memory before it gives
theirs away (its sleep level 1; level 2 would lose them). It cannot do so without the KV cache,
which then goes and comes with the weights. On the CPU there is no other memory to go to, so
that only the prefix cache is forgotten.

Called while the engine is paused with nothing in flight. Nobody waits here but for vLLM.
"""

from typing import Any

from treadle.rollout_server.engine import MemoryKind

_TAGS = {MemoryKind.WEIGHTS: "weights", MemoryKind.KV_CACHE: "kv_cache"}
_NOTHING: frozenset[MemoryKind] = frozenset()


class Memory:
    """See the module docstring.

    Args:
        llm: A ``vllm.v1.engine.async_llm.AsyncLLM``.
        on_cpu: Whether it computes on the CPU.
    """

    def __init__(self, llm: Any, *, on_cpu: bool) -> None:
        self._llm = llm
        self._on_cpu = on_cpu
        self._released = _NOTHING  # What the caller gave away.
        self._asleep = _NOTHING  # What vLLM has given away for it.

    def check_resident(self) -> None:
        """Raises RuntimeError unless everything is back."""
        if self._released:
            names = ", ".join(sorted(kind.value for kind in self._released))
            raise RuntimeError(f"memory is released ({names}): restore it before resuming")

    async def release(self, kinds: frozenset[MemoryKind]) -> None:
        """Gives memory away; nothing for kinds that are gone."""
        self._released |= kinds
        if self._on_cpu:
            if MemoryKind.KV_CACHE in kinds:
                await self._llm.reset_prefix_cache()
        elif MemoryKind.WEIGHTS in kinds - self._asleep:
            await self._llm.sleep(level=1)
            self._asleep = frozenset(MemoryKind)
        elif kinds - self._asleep:
            await self._llm.release_kv_cache_memory()
            self._asleep |= kinds

    async def restore(self, kinds: frozenset[MemoryKind]) -> None:
        """Takes memory back, and what went along with it once nothing else is released."""
        self._released -= kinds
        wanted = kinds & self._asleep if self._released else self._asleep
        if wanted:
            await self._llm.wake_up([_TAGS[kind] for kind in wanted])
            self._asleep -= wanted
