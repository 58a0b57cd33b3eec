"""vLLM's executors, in an engine core that ends with the server; see `die_with_parent.py`.

vLLM's processes import these classes by name, from the path that they inherit from the server,
also under Pex.
"""

from pathlib import Path
from typing import Any

from vllm import envs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from treadle.rollout_server.engines.common.die_with_parent import die_with_parent
from treadle.rollout_server.engines.common.runtime_dir import files_in


class EndsWithServer(Executor):  # type: ignore[misc]
    """Ends the process of the engine core with the server, and keeps its files together."""

    def _init_executor(self) -> None:
        die_with_parent()
        # The file where ranks meet is among them.
        with files_in(Path(envs.VLLM_RPC_BASE_PATH)):
            super()._init_executor()


class _Executor(EndsWithServer):
    """What both have."""

    def _init_executor(self) -> None:
        # The setting for it is refused with the older model runner; see `sampler.py`.
        Scheduler.return_sampling_mask = property(lambda _: True, lambda *_: None)
        super()._init_executor()

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        super().initialize_from_config(kv_cache_configs)
        # Here there is a cache of known size, and no graph has been captured.
        self.collective_rpc("treadle_report_experts")


class SingleProcessExecutor(_Executor, UniProcExecutor):  # type: ignore[misc]
    """Runs the worker in the engine core's process."""


class MultiProcessExecutor(_Executor, MultiprocExecutor):  # type: ignore[misc]
    """Runs each worker in a process, which `WorkerExtension.treadle_install` also ends."""
