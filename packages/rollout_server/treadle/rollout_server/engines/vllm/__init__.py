"""The vLLM engine, selected as ``vllm``: vLLM's `AsyncLLM` in separate processes.

`engine.py` implements `Engine`; `startup.py` starts vLLM with the arguments of `arguments.py`;
`sampling.py` and `sequence.py` translate requests and outputs; `memory.py` releases device
memory. `executor.py`, `worker.py` and `sampler.py` run in vLLM's processes.

Only `create` imports vLLM.
"""

import asyncio

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import Engine
from treadle.rollout_server.engines.vllm import startup

__all__ = ["create"]


async def create(config: ServerConfig) -> Engine:
    """Builds the engine of a configuration.

    Raises:
        ValueError: vLLM is not installed, `model.path` is not set, or vLLM does not support the
            configuration.
        OSError: The model files are missing.
    """
    library = await asyncio.to_thread(startup.load_library, config)
    # Imports vLLM, which must be configured first.
    from treadle.rollout_server.engines.vllm.engine import VllmEngine

    return await VllmEngine.load(config, library)
