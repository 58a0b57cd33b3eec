"""Replayed routing end to end, with the torch engine in this process."""

from pathlib import Path

import pytest

from treadle.rollout_server.engine import ElementType
from treadle.rollout_server.engines.torch import ModelSource, TorchEngine
from treadle.rollout_server.testing import serve_in_process

from .replaying import check_replay, write_sparse_model


@pytest.mark.asyncio
async def test_the_policy_computes_with_the_experts_of_the_engine(tmp_path: Path) -> None:
    engine = await TorchEngine.load(
        ModelSource(path=write_sparse_model(tmp_path), dtype=ElementType.FLOAT32, device="cpu"),
        max_num_seqs=4,
        prefix_cache_bytes=1 << 20,
        num_threads=1,
    )
    try:
        async with serve_in_process(engine) as server:
            await check_replay(tmp_path, server.address)
    finally:
        await engine.aclose()
