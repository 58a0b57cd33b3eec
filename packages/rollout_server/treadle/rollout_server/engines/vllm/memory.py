"""Device memory that vLLM has released, by kind.

Invariant: restored weights are unchanged: vLLM copies them to host memory before it releases
them (its sleep level 1; level 2 would lose them). It cannot release weights without the KV
cache, so the KV cache is then released and restored with them; before 0.31 it
cannot release the KV cache alone either. On the CPU there is no other
memory to copy to, so only the prefix cache is cleared.

Called while the engine is paused with nothing in flight. Waits only for vLLM.
"""

from typing import Any

from treadle.rollout_server.engine import MemoryKind

_TAGS = {MemoryKind.WEIGHTS: "weights", MemoryKind.KV_CACHE: "kv_cache"}
_NOTHING: frozenset[MemoryKind] = frozenset()


class DeviceMemory:
    """Releases and restores device memory of vLLM; see the module docstring.

    Args:
        on_cpu: Whether it computes on the CPU.
    """

    def __init__(self, llm: Any, *, on_cpu: bool) -> None:
        self._llm = llm
        self._on_cpu = on_cpu
        self._frees_cache = hasattr(llm, "release_kv_cache_memory")
        self._released = _NOTHING  # What the caller released.
        self._sleeping = _NOTHING  # What vLLM has released for it.

    def check_resident(self) -> None:
        """Raises RuntimeError if any memory is still released."""
        if self._released:
            names = ", ".join(sorted(kind.value for kind in self._released))
            raise RuntimeError(f"memory is released ({names}): restore it before resuming")

    async def release(self, kinds: frozenset[MemoryKind]) -> None:
        """Releases memory; does nothing for kinds that are released already."""
        self._released |= kinds
        missing = kinds - self._sleeping
        if self._on_cpu:
            if MemoryKind.KV_CACHE in kinds:
                await self._llm.reset_prefix_cache()
        elif MemoryKind.WEIGHTS in missing or (missing and not self._frees_cache):
            await self._llm.sleep(level=1)
            self._sleeping = frozenset(MemoryKind)
        elif missing:
            await self._llm.release_kv_cache_memory()
            self._sleeping |= kinds

    async def restore(self, kinds: frozenset[MemoryKind]) -> None:
        """Restores memory, and everything that vLLM released with it once nothing else is."""
        self._released -= kinds
        wanted = kinds & self._sleeping if self._released else self._sleeping
        if wanted:
            await self._llm.wake_up([_TAGS[kind] for kind in wanted])
            self._sleeping -= wanted
