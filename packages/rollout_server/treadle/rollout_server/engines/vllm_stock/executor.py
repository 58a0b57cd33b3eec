"""vLLM's executors as they are, in an engine core that ends with the server."""

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from treadle.rollout_server.engines.vllm.executor import EndsWithServer


class StockSingleProcessExecutor(EndsWithServer, UniProcExecutor):  # type: ignore[misc]
    """Runs the worker in the engine core's process."""


class StockMultiProcessExecutor(EndsWithServer, MultiprocExecutor):  # type: ignore[misc]
    """Runs each worker in a process, which `Transfer` ends with the core's."""
