# ruff: noqa: D102  (the methods are those of `process.Schedulers`)
"""Test harness of the SGLang engine: fake schedulers that a test drives step by step."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from treadle.rollout_server.engine import EngineRequest
from treadle.rollout_server.engines.images.inputs import ImageInput


class Answers:
    """The answers to one request; a late reader gets only the latest one, as with SGLang."""

    def __init__(self) -> None:
        self._latest: dict[str, Any] = {}
        self._there = asyncio.Event()

    def put(self, answer: dict[str, Any]) -> None:
        self._latest = answer
        self._there.set()

    async def read(self) -> AsyncGenerator[dict[str, Any], None]:
        ended = False
        while not ended:
            await self._there.wait()
            self._there.clear()
            ended = self._latest["meta_info"]["finish_reason"] is not None
            yield self._latest


class Schedulers:
    """A fake of `process.Schedulers` that yields one token per call of `step`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.refused: set[str] = set()
        self.streams: dict[str, Answers] = {}
        self.tokens: dict[str, list[int]] = {}
        self.failed: Callable[[Exception], None] | None = None

    def watch(self, failed: Callable[[Exception], None]) -> None:
        self.failed = failed

    def step(self) -> None:
        for rid in self.streams:
            self.tokens[rid].append(len(self.tokens[rid]))
            self._answer(rid, None)

    def end(self, rid: str, reason: dict[str, Any]) -> None:
        self._answer(rid, reason)
        del self.streams[rid]

    def end_all(self, reason: dict[str, Any]) -> None:
        for rid in list(self.streams):
            self.end(rid, reason)

    async def generate(
        self,
        rid: str,
        request: EngineRequest,
        sampling: dict[str, Any],
        images: Sequence[ImageInput],
    ) -> AsyncGenerator[dict[str, Any], None]:
        self.streams[rid] = Answers()
        self.tokens[rid] = []
        return self.streams[rid].read()

    def received(self, rid: str) -> int | None:
        return len(self.tokens[rid]) if rid in self.streams else None

    async def abort(self, rid: str) -> None:
        self.log.append("abort")
        if rid in self.streams:
            self.end(rid, {"type": "abort"})

    def abort_all(self) -> None:
        self.log.append("abort_all")
        self.abort_locally()

    def abort_locally(self) -> None:
        self.end_all({"type": "abort"})

    async def pause_generation(self) -> None:
        self.log.append("pause_generation")

    def continue_generation(self) -> None:
        self.log.append("continue_generation")

    async def command(self, name: str, message: str = "") -> None:
        self.log.append(name)
        if name in self.refused:
            raise RuntimeError(f"cannot {name}")

    async def release_memory(self, tags: list[str]) -> None:
        self.log.append(f"release {tags}")

    async def restore_memory(self, tags: list[str]) -> None:
        self.log.append(f"restore {tags}")

    async def aclose(self) -> None:
        self.log.append("aclose")

    def _answer(self, rid: str, reason: dict[str, Any] | None) -> None:
        ids = self.tokens[rid]
        meta = {
            "completion_tokens": len(ids),
            "cached_tokens": 1,
            "finish_reason": reason,
            "output_token_logprobs": [(-0.5, id, None) for id in ids],
        }
        self.streams[rid].put({"output_ids": ids, "meta_info": meta})
