from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from treadle.conformance.contracts.collective_contract import CollectiveContract
from treadle.conformance.contracts.in_process_contract import InProcessContract
from treadle.rollout_server.engine import ElementType, Engine, NamedTensor
from treadle.rollout_server.engines.torch import ModelSource, TorchEngine
from treadle.rollout_server.engines.torch.testing.text_model import ModelDir, named_tensors


class TestTorchEngine(InProcessContract, CollectiveContract):
    """tests/engines/contract_torch_test.py has the rest of the contract, over gRPC."""

    @pytest.fixture(autouse=True)
    def _models(self, model_dir: ModelDir) -> None:
        self._paths = [model_dir(seed=0), model_dir(seed=1)]

    @asynccontextmanager
    async def engine(self, weights: int = 0) -> AsyncIterator[Engine]:
        source = ModelSource(path=self._paths[weights], dtype=ElementType.FLOAT32, device="cpu")
        engine = await TorchEngine.load(
            source,
            max_num_seqs=16,
            prefix_cache_bytes=1 << 20,
            max_draft_tokens=7,
            num_threads=1,
        )
        yield engine
        await engine.aclose()

    def weights(self, which: int) -> Sequence[NamedTensor]:
        return named_tensors(self._paths[which])
