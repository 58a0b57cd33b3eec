"""vLLM's executors, in an engine core that ends with the server; see `die_with_parent.py`.

vLLM's processes import these classes by name, from the path that they inherit from the server,
also under Pex.
"""

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from treadle.rollout_server.engines.common.die_with_parent import die_with_parent


class SingleProcessExecutor(UniProcExecutor):  # type: ignore[misc]
    """Runs the worker in the engine core's process."""

    def _init_executor(self) -> None:
        die_with_parent()
        super()._init_executor()


class MultiProcessExecutor(MultiprocExecutor):  # type: ignore[misc]
    """Runs each worker in a process, which `WorkerExtension.treadle_install` also ends."""

    def _init_executor(self) -> None:
        die_with_parent()
        super()._init_executor()
