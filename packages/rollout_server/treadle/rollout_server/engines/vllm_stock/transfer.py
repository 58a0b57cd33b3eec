"""Weights for an unmodified vLLM, as a weight transfer engine: a public extension of its workers.

Invariant: after `finish_weight_update` every layer uses the tensors of the update in the form that
its kernels read. Layers without new tensors keep their old weights, so an update that ends early
leaves a mixture, which another one replaces.

vLLM's workers import this module by the name of `Registered` (``worker_extension_cls``), before
they look for the engine of ``weight_transfer_config``. They call its methods one at a time, while
no step runs.
"""

from collections.abc import Iterable
from contextlib import closing
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import reload

from treadle.rollout_server.engines.common.collective import CollectiveMember
from treadle.rollout_server.engines.common.collective_group import decode_group
from treadle.rollout_server.engines.common.die_with_parent import die_with_parent
from treadle.rollout_server.engines.common.staging import MappedFiles
from treadle.rollout_server.engines.vllm_stock.arguments import BACKEND
from treadle.rollout_server.errors import CollectiveBroken


class Transfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads tensors from files of this host or from a group; see the module docstring."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        if vllm_config.parallel_config.world_size > 1:  # Otherwise this is the core's process.
            die_with_parent()
        self._member: CollectiveMember | None = None
        self.cause = ""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Does nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Begins an update; from now on the weights are a mixture."""
        reload.initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads the tensors of ``entries`` in files, which may change then, or of a ``group``."""
        if "group" in update_info:
            self._receive(update_info["group"])
            return
        with closing(MappedFiles()) as files, torch.no_grad():
            self.receive_weights(
                # Cloned, because a fused layer keeps its tensors until it has all of them.
                (entry[0], files.tensor(entry).clone())
                for entry in update_info["entries"]
            )

    def receive_weights(self, update_info: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads named tensors, in the form of the checkpoint."""
        self.model.load_weights(update_info)

    def finish_weight_update(self) -> None:
        """Ends an update."""
        with torch.no_grad():
            reload.finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                self._pack_heads()

    def shutdown(self) -> None:
        """Does nothing: nothing is held between two updates."""

    def _receive(self, message: str) -> None:
        """Loads the broadcasts of a group's senders, or keeps why the group ended early."""
        parallel = self.parallel_config
        if self._member is None:
            worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
            self._member = CollectiveMember(worker=worker, device=self.device)
        self.cause = ""
        try:
            buckets = self._member.receive_buckets(*decode_group(message))
            with closing(buckets), torch.no_grad():
                for bucket in buckets:
                    self.receive_weights((spec.name, tensor.clone()) for spec, tensor in bucket)
        except CollectiveBroken as error:
            self.cause = str(error)

    def _pack_heads(self) -> None:
        """Packs tied heads again: a reload passes over layers without tensors of their own."""
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)


WeightTransferEngineFactory.register_engine(BACKEND, Transfer)


class Registered:
    """Mixed into vLLM's workers, which import this module for it."""

    weight_transfer_engine: Transfer  # The worker's.

    def treadle_cause(self) -> str:
        """Returns why the last group ended before its update was complete; "" on success."""
        return self.weight_transfer_engine.cause
