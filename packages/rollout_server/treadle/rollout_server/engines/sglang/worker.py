"""The worker: SGLang's scheduler in its process, with our extensions.

Invariant: sampled tokens, answers to requests and answers to commands leave through one socket
in order, so a receiver of the answer to a command has every token that was sampled before it. A
paused scheduler has no sequence on the device and has sent every token.

Who waits: the scheduler waits for messages, also while it is paused. The server waits for the
answer to a command, which comes once every rank of the tensor-parallel group has executed it.
An error in a command is its answer; any other error ends the process, which records the cause.

`sampling.py` samples. The rows of a batch travel with SGLang's own sampling settings, through
the three hook methods that SGLang provides.
"""

import logging
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers import mm_schedule
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.io_struct import (
    AbortReq,
    PauseGenerationReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromIPCReqOutput,
)
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from transformers import AutoTokenizer

from treadle.rollout_server.engines.common.collective import CollectiveMember
from treadle.rollout_server.engines.common.collective_group import decode_group
from treadle.rollout_server.engines.sglang import weights
from treadle.rollout_server.engines.sglang.sampling import LateMasks, Rows, SampledRow
from treadle.rollout_server.engines.sglang.sequence import EXPERTS_KEY, MASKS_KEY, SETTINGS_KEY
from treadle.rollout_server.engines.sglang.weights import WorkerError
from treadle.rollout_server.errors import CollectiveBroken

_log = logging.getLogger(__name__)


def run(report: Callable[[BaseException], None], *arguments: Any) -> None:
    """Runs the scheduler until the server ends it, or until it fails.

    Args:
        report: Records the cause of a failure for the server.
    """
    _patch_batch_info()

    class Reporting(Worker):
        """A `Worker` that records why it fails."""

        def __init__(self, *args: Any) -> None:
            try:
                super().__init__(*args)
            except Exception as error:
                _exit(report, error)

        def run_event_loop(self) -> None:
            try:
                super().run_event_loop()
            except Exception as error:
                _exit(report, error)

    sglang_scheduler.Scheduler = Reporting
    sglang_scheduler.run_scheduler_process(*arguments)


def replace_expert_kernels() -> None:
    """Makes SGLang choose experts, and keep its reports of them, without kernels and CUDA."""
    TopK.forward_cpu = TopK.forward_native

    def allocate(dims: Any, *, allocator: Any, dtype: Any, device: str, **_: Any) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    ALLOC_MEMORY_FUNCS["cpu"] = allocate  # Otherwise it is registered with CUDA.


def _exit(report: Callable[[BaseException], None], error: Exception) -> NoReturn:
    # SGLang would send the server a signal that kills it.
    _log.exception("the scheduler broke", exc_info=error)
    report(error)
    logging.shutdown()
    os._exit(1)


class Worker(sglang_scheduler.Scheduler):  # type: ignore[misc]
    """SGLang's scheduler with our commands and sampler; see the module docstring."""

    ipc_channels: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._member: CollectiveMember | None = None
        # The server sends all stop ids, including the model's.
        self.model_config.hf_eos_token_id = set()
        self._runner.sampler = SeededSampler()
        if get_global_experts_capturer() is not None:
            self._report_experts()

    @property
    def _runner(self) -> Any:
        return self.tp_worker.model_runner

    def _report_experts(self) -> None:
        """Makes each token bring the experts of the rows before it that have not been reported.

        SGLang reports them only when a sequence ends by itself. Rows of cached ids have theirs too:
        SGLang keeps them beside the KV cache.
        """
        capturer = get_global_experts_capturer()
        assert capturer is not None
        layers = sorted(m.layer_id for m in self._runner.model.modules() if isinstance(m, TopK))
        id_bytes = 1 if self.model_config.hf_text_config.num_experts <= 256 else 2
        collect = SchedulerBatchResultProcessor._maybe_collect_customized_info

        def collect_experts(processor: Any, index: int, req: Any, logits_output: Any) -> None:
            collect(processor, index, req, logits_output)
            if not req.return_routed_experts:
                return
            length = len(req.origin_input_ids) + len(req.output_ids)
            rows = req.routed_experts  # Of a sequence that has just ended.
            if rows is None:
                rows = capturer.get_topk(
                    req.kv.req_pool_idx,
                    length,
                    self.req_to_token_pool,
                    req.routed_experts_start_len,
                )
            req.routed_experts, req.routed_experts_start_len = None, length - 1
            info = req.customized_info = req.customized_info or {}
            ids = rows.numpy()[:, layers].astype(f"<u{id_bytes}")
            info.setdefault(EXPERTS_KEY, []).append(ids.tobytes())

        SchedulerBatchResultProcessor._maybe_collect_customized_info = collect_experts

    def init_ipc_channels(self, port_args: Any) -> None:
        """Sends tokens through the socket of the answers."""
        super().init_ipc_channels(port_args)
        channels = self.ipc_channels
        self.ipc_channels = replace(channels, send_to_detokenizer=channels.send_to_tokenizer)

    def init_grammar_manager(self) -> None:
        """Compiles constraints, which SGLang does only where it also tokenizes prompts.

        The masks are applied before the sampler, whose log-probs are thus those of the constrained
        distribution.
        """
        super().init_grammar_manager()
        arguments = self.server_args
        if arguments.grammar_backend == "none":
            return
        self.grammar_manager.grammar_backend = XGrammarGrammarBackend(
            AutoTokenizer.from_pretrained(
                arguments.model_path, trust_remote_code=arguments.trust_remote_code
            ),
            vocab_size=self.model_config.vocab_size,
            model_eos_token_ids=sorted(self.model_config.hf_eos_token_id or ()),
        )

    def init_request_dispatcher(self) -> None:
        """Receives our commands in a message type of SGLang that is otherwise unused."""
        super().init_request_dispatcher()
        self._request_dispatcher._mapping[UpdateWeightsFromIPCReqInput] = (
            self._handle_treadle_command
        )

    def pause_generation(self, recv_req: PauseGenerationReqInput) -> None:
        """Pauses, and sends tokens that were held back for a longer message."""
        super().pause_generation(recv_req)
        owing = [r for r in self.waiting_queue if len(r.output_ids) > r.send_token_offset]
        intervals = [req.sampling_params.stream_interval for req in owing]
        for req in owing:
            req.sampling_params.stream_interval = 1
        self.output_streamer.stream_output(owing, return_logprob=True)
        for req, interval in zip(owing, intervals, strict=True):
            req.sampling_params.stream_interval = interval
        self._compile_grammars()

    def abort_request(self, recv_req: AbortReq) -> None:
        """Aborts requests, also such whose grammar is not compiled yet."""
        if self._engine_paused:
            self._compile_grammars()
        super().abort_request(recv_req)

    def _compile_grammars(self) -> None:
        """Waits for the grammars of new requests, which SGLang would read only once it resumes."""
        while self.grammar_manager.has_waiting_grammars():
            for req in self.grammar_manager.get_ready_grammar_requests():
                self._add_request_to_queue(req)

    def _record_scheduler_state_for_paused_engine(self) -> None:
        super()._record_scheduler_state_for_paused_engine()
        self.maybe_sleep_on_idle()  # SGLang sleeps only when it is not paused.

    def _handle_treadle_command(
        self, command: UpdateWeightsFromIPCReqInput
    ) -> UpdateWeightsFromIPCReqOutput:
        failure = None
        try:
            for name, message in command.zmq_handles.items():
                _COMMANDS[name](self, message)
        except CollectiveBroken as error:
            failure = WorkerError(cause=str(error), broken_group=True)
        except Exception as error:
            _log.exception("a command failed", exc_info=error)
            failure = WorkerError(cause=f"{type(error).__name__}: {error}")
        errors = [rank for rank in self._gather(failure) if rank is not None]
        return UpdateWeightsFromIPCReqOutput(
            success=not errors, message=weights.encode_errors(errors)
        )

    def _gather(self, failure: WorkerError | None) -> list[WorkerError | None]:
        """Returns the failure of each rank, or None."""
        count = torch.distributed.get_world_size(group=self.tp_cpu_group)
        errors: list[WorkerError | None] = [None] * count
        torch.distributed.all_gather_object(errors, failure, group=self.tp_cpu_group)
        return errors

    def begin_load(self, _: str) -> None:
        """Undoes SGLang's processing of loaded weights, such as packing."""
        self._runner.weight_updater.begin_weight_update()

    def load(self, message: str) -> None:
        """Overwrites weights with a batch of tensors."""
        self._runner.model.load_weights(weights.map_batch(message))

    def receive(self, message: str) -> None:
        """Overwrites weights with the broadcasts of a group's senders."""
        group, specs = decode_group(message)
        if self._member is None:
            parallel = get_parallel()
            number = (parallel.dp_rank or 0) * parallel.tp_size + parallel.tp_rank
            device = next(self._runner.model.parameters()).device
            self._member = CollectiveMember(worker=number, device=device)
        with closing(self._member.receive_buckets(group, specs)) as buckets:
            for bucket in buckets:
                self._runner.model.load_weights([(spec.name, tensor) for spec, tensor in bucket])

    def end_load(self, _: str) -> None:
        """Prepares the new weights for use and flushes the KV cache."""
        self._runner.weight_updater.end_weight_update(run_post_load=False)
        if mm_schedule.embedding_cache is not None:
            mm_schedule.embedding_cache.clear()  # Of images, by the old vision tower.
        self._compile_grammars()
        if not self.flush_cache(empty_cache=False):
            raise RuntimeError("sequences are using the KV cache, so it cannot be flushed")

    def settle(self, _: str) -> None:
        """Does nothing; its answer confirms that everything before it is done."""

    def release_host_cache(self, _: str) -> None:
        """Frees the host memory of the KV cache, which SGLang keeps on the CPU."""
        storages = self._cache_storages()
        self._cache_bytes = [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def restore_host_cache(self, _: str) -> None:
        """Allocates the memory again; its contents are lost."""
        for storage, num_bytes in zip(self._cache_storages(), self._cache_bytes, strict=True):
            storage.resize_(num_bytes)

    def _cache_storages(self) -> list[torch.UntypedStorage]:
        cache = self.token_to_kv_pool_allocator.get_kvcache()
        return [buffer.untyped_storage() for buffer in (*cache.k_buffer, *cache.v_buffer)]


_COMMANDS = {
    "settle": Worker.settle,
    "begin_load": Worker.begin_load,
    "load": Worker.load,
    "receive": Worker.receive,
    "end_load": Worker.end_load,
    "release_host_cache": Worker.release_host_cache,
    "restore_host_cache": Worker.restore_host_cache,
}


class SeededSampler(Sampler):  # type: ignore[misc]
    """Replaces SGLang's sampler; see `sampling.py`."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        positions: Any,
    ) -> torch.Tensor:
        """Samples one token per row."""
        rows: Rows = sampling_info.custom_params
        drawn = rows.draw(logits_output.next_token_logits)
        logits_output.next_token_logprobs = drawn.logprobs_B
        if drawn.kept is not None:
            logits_output.customized_info = {MASKS_KEY: LateMasks(drawn.kept, drawn.ids_B)}
        return drawn.ids_B.to(torch.int32)


def _patch_batch_info() -> None:
    """Makes the sampling settings of a batch carry our rows.

    SGLang calls these hooks after it has changed its own settings. It uses `custom_params` only
    for logit processors, which no request has.
    """

    def made(info: Any, batch: Any, vocab_size: int) -> None:
        device = torch.device(info.device)
        info.custom_params = Rows(
            [
                SampledRow(
                    req.sampling_params.custom_params[SETTINGS_KEY],
                    [*req.origin_input_ids_unpadded, *req.output_ids],
                    vocab_size=vocab_size,
                    device=device,
                )
                for req in batch.reqs
            ]
        )

    def merged(info: Any, other: Any) -> None:
        info.custom_params = info.custom_params.joined(other.custom_params)

    def filtered(info: Any, keep_indices: list[int], _: torch.Tensor) -> None:
        info.custom_params = info.custom_params.kept(keep_indices)

    SamplingBatchInfo.adjusted_from_schedule_batch = made
    SamplingBatchInfo.adjusted_merge_batch = merged
    SamplingBatchInfo.adjusted_filter_batch = filtered
