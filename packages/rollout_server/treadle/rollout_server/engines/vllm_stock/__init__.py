"""The engine ``vllm_stock``: an unmodified vLLM of any release from 0.28 on, by its public API.

`engine.py` implements `Engine` over `AsyncLLM`; `versions.py` decides which releases are taken.
`draws.py` (a logits processor), `transfer.py` (a weight transfer engine) and `executor.py` run in
vLLM's processes, which import them by name. Arguments, start and sequences are those of
`engines/vllm`.

Only `create` imports vLLM.
"""

import asyncio

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import Engine
from treadle.rollout_server.engines.vllm import startup
from treadle.rollout_server.engines.vllm_stock.versions import NAME, check_version

__all__ = ["create"]


async def create(config: ServerConfig) -> Engine:
    """Builds the engine of a configuration.

    Raises:
        ValueError: vLLM is not installed or too old, `model.path` is not set, or this engine does
            not support the configuration.
        OSError: The model files are missing.
    """
    library = await asyncio.to_thread(startup.load_library, config, NAME, check_version)
    # Imports vLLM, which must be configured first.
    from treadle.rollout_server.engines.vllm_stock.engine import StockVllmEngine

    return await StockVllmEngine.load(config, library)
