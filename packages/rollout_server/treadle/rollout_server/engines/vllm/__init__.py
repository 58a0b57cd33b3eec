"""The vLLM engine, chosen as ``vllm``: vLLM's `AsyncLLM` in processes of its own.

`engine.py` is what the server sees; `startup.py` starts vLLM, by `arguments.py`;
`sampling.py` and `sequence.py` translate requests and outputs; `memory.py` gives device memory
away. In vLLM's processes run `executor.py`, `worker.py` and `sampler.py`.

Importing this needs vLLM nowhere but in `create`.
"""

import asyncio

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import Engine
from treadle.rollout_server.engines.vllm import startup

__all__ = ["create"]


async def create(config: ServerConfig) -> Engine:
    """Builds the engine that a configuration asks for.

    Raises:
        ValueError: vLLM is not here, no model is named, or it cannot be had as configured.
        OSError: The model's files are not there.
    """
    library = await asyncio.to_thread(startup.load_library, config)
    # It imports vLLM, which is here, and configured, only now.
    from treadle.rollout_server.engines.vllm.engine import VllmEngine

    return await VllmEngine.load(config, library)
