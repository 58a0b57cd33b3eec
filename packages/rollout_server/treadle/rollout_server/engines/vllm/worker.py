"""The worker extension: our code in each of vLLM's worker processes.

Invariant: after `treadle_end_load` every layer uses the tensors written since
`treadle_begin_load`, in the form that its kernels read: vLLM's layers keep packed copies and
fused parameters, so each layer is rebuilt from its checkpoint tensors as soon as it has all of
them, and the memory of its kernels is overwritten. A load that ends early leaves a mixture,
which another load replaces.

vLLM mixes this class into its worker (``worker_extension_cls``); the server calls the methods
by name (``collective_rpc``), in all workers at the same time, while no step runs. Methods wait
only for the members of a collective group.

vLLM's processes import the class by name, from the path that they inherit from the server, also
under Pex.
"""

import atexit
import gc
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from treadle.rollout_server.engines.common.collective import CollectiveMember
from treadle.rollout_server.engines.common.collective_group import decode_group
from treadle.rollout_server.engines.common.die_with_parent import die_with_parent
from treadle.rollout_server.engines.common.staging import MappedFiles
from treadle.rollout_server.engines.vllm.arguments import SCHEDULER
from treadle.rollout_server.errors import CollectiveBroken

if TYPE_CHECKING:
    from treadle.rollout_server.engines.common.staging import Entry


class WorkerExtension:
    """Mixed into ``vllm.v1.worker.worker_base.WorkerBase``; see the module docstring."""

    # Attributes of the worker.
    vllm_config: Any
    model_config: Any
    parallel_config: Any
    model_runner: Any
    device: torch.device
    rank: int

    # Class attributes, because vLLM does not call the constructor of an extension.
    _treadle_files: "MappedFiles | None" = None
    _treadle_member: CollectiveMember | None = None

    def treadle_install(self) -> None:
        """Installs our sampler, and ends the process with the server, without a last collection."""
        from treadle.rollout_server.engines.vllm.sampler import SeededSampler, report_masks

        atexit.register(gc.freeze)  # As in the server's `main`.
        if self.parallel_config.world_size > 1:  # Otherwise this is the engine core's process.
            die_with_parent()
        sampler = SeededSampler(self.model_runner)
        self.model_runner.sampler = sampler
        report_masks(self.model_runner, sampler)

    def treadle_report_experts(self) -> None:
        """Makes the outputs of the steps carry the experts that the model chose, if it has any."""
        if self.vllm_config.scheduler_config.scheduler_cls == SCHEDULER:
            from treadle.rollout_server.engines.vllm.routed_experts import report_experts

            report_experts(self.model_runner)

    def treadle_load(self, entries: "Sequence[Entry]") -> None:
        """Replaces all weights by tensors in files."""
        with closing(MappedFiles()) as files:
            tensors = [(entry[0], files.tensor(entry)) for entry in entries]
            self.treadle_begin_load()
            self._treadle_write(tensors)
            self.treadle_end_load()

    def treadle_begin_load(self) -> None:
        """Begins a load; from now on the weights are a mixture."""
        from vllm.model_executor.model_loader import reload

        self._treadle_files = MappedFiles()
        reload.initialize_layerwise_reload(self.model_runner.get_model())

    def treadle_write(self, entry: "Entry") -> None:
        """Writes one tensor; its file may change once this returns."""
        assert self._treadle_files is not None, "treadle_begin_load comes first"
        # Cloned, because a fused layer keeps its tensors until it has all of them.
        self._treadle_write([(entry[0], self._treadle_files.tensor(entry).clone())])

    def treadle_end_load(self) -> None:
        """Ends a load; layers without new tensors keep their old weights."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import reload

        if self._treadle_files is None:
            return
        self._treadle_files.close()
        self._treadle_files = None
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            reload.finalize_layerwise_reload(model, self.model_config)
            _pack_heads(model)
            _pack_experts(model)

    def treadle_receive(self, message: str) -> str:
        """Replaces all weights by the broadcasts of a group's senders.

        Returns:
            Why the group ended before the update was complete; "" on success.
        """
        if self._treadle_member is None:
            config = self.parallel_config
            worker = config.data_parallel_index * config.world_size + self.rank
            self._treadle_member = CollectiveMember(worker=worker, device=self.device)
        group, specs = decode_group(message)
        self.treadle_begin_load()
        try:
            with closing(self._treadle_member.receive_buckets(group, specs)) as buckets:
                for bucket in buckets:
                    self._treadle_write((spec.name, tensor.clone()) for spec, tensor in bucket)
        except CollectiveBroken as error:
            return str(error)
        finally:
            self.treadle_end_load()
        return ""

    def _treadle_write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.model_runner.get_model().load_weights(tensors)


def _pack_heads(model: Any) -> None:
    """Packs embeddings for the CPU's kernels again.

    A head that is tied to the embedding is a layer without own tensors, so a load does not
    update its packed copy.
    """
    from vllm.model_executor.layers import (
        utils,
        vocab_parallel_embedding,
    )

    kind = vocab_parallel_embedding.VocabParallelEmbedding
    for module in model.modules():
        if isinstance(module, kind) and hasattr(module, "cpu_linear"):
            utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _pack_experts(model: Any) -> None:
    """Packs experts for the CPU's kernels again, which vLLM does at the first load only."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            experts = module.quant_method.moe_kernel.fused_experts
            if isinstance(experts, CPUUnquantizedExperts):
                experts.process_weights_after_loading(module)
