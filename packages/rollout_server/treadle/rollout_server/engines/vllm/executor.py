"""vLLM's executors, in an engine core that ends with the server; see `engines/parent.py`.

Runs under Pex: vLLM's processes find these classes by name on the path inherited from the
server's.
"""

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from treadle.rollout_server.engines.common.die_with_parent import end_with_parent


class OneWorker(UniProcExecutor):  # type: ignore[misc]
    """The worker lives in the engine core's process."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()


class ManyWorkers(MultiprocExecutor):  # type: ignore[misc]
    """Each worker has a process, which `WorkerExtension.treadle_install` has end likewise."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()
