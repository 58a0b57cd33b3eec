"""Reports of the experts that the model chose, in vLLM's processes.

vLLM captures the experts of each row, keeps them beside its prefix cache and sends them with the
tokens (its auxiliary outputs), but only with its newer model runner, which samples inside its
kernels (see `sampler.py`). This connects vLLM's own parts to the older runner. vLLM's argument for
them is refused with that runner, so the scheduler is named instead.

Invariant: a request for experts gets those of its rows with the tokens that they predict, in the
layers that have experts; other requests get empty reports. The experts captured for a block of ids
stay as long as vLLM may find the block, so rows of cached ids are reported too.

On a GPU the copies to the host overlap the next step, as the copies of the tokens do.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.aux_output_connector.connector import (
    AuxOutputSchedulerConnector,
    AuxRequestOutput,
)
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from treadle.rollout_server.engines.vllm.sampler import with_report
from treadle.rollout_server.engines.vllm.sampling import EXPERTS_KEY


@dataclass(frozen=True, slots=True)
class _Batch:
    """What vLLM's connector reads of a step's batch; the names are those of the newer runner."""

    req_ids: list[str]
    query_start_loc_np: NDArray[np.int32]
    num_computed_tokens_np: NDArray[np.int32]


class _Report:
    """The experts of one step's rows.

    Args:
        sampled: For each request of the batch, whether the step samples a token for it.
        asking: Ids of the requests for experts.
        layers: The layers that have experts.
        stream: For the copy to the host; None on the CPU.
    """

    def __init__(
        self,
        pending: Any,
        sampled: NDArray[np.bool_],
        asking: frozenset[str],
        layers: list[int],
        stream: Any,
    ) -> None:
        self._pending, self._asking, self._layers = pending, asking, layers
        self._copied = None
        none_rejected = np.zeros(len(sampled), dtype=np.int32)
        if stream is None:
            pending.enqueue_cpu_copy(sampled, none_rejected)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            pending.enqueue_cpu_copy(sampled, none_rejected)
            self._copied = stream.record_event()

    def add_to(self, output: Any) -> Any:
        """Adds them to a `ModelRunnerOutput`, which is returned; waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        output.aux_output_connector_output = {
            name: self._shown(name, part) for name, part in self._pending.process_output().items()
        }
        return output

    def _shown(self, name: str, part: AuxRequestOutput) -> AuxRequestOutput:
        if name in self._asking:
            return AuxRequestOutput(part.token_start, part.rows[:, self._layers])
        return AuxRequestOutput(part.token_start + len(part.rows), part.rows[:0])


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """Returns vLLM's scheduler for a configuration, which forwards the experts."""
    kind = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = kind(vllm_config=vllm_config, **kwargs)
    scheduler.aux_output_connector = AuxOutputSchedulerConnector()
    return scheduler


def report_experts(runner: Any) -> None:
    """Makes the outputs of a ``GPUModelRunner`` carry experts; call before it captures graphs."""
    connector = get_aux_output_connector(
        runner.get_model(), runner.vllm_config, runner.kv_cache_config
    )
    layers = sorted(m.layer_id for m in runner.get_model().modules() if isinstance(m, MoERunner))
    execute, sample = runner.execute_model, runner.sample_tokens

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute(scheduler_output, *args, **kwargs)

    def sample_tokens(grammar_output: Any) -> Any:
        output = sample(grammar_output)
        rows = runner.input_batch
        names, count = list(rows.req_ids), rows.num_reqs
        # Copied: the next step overwrites them, maybe before this one is read.
        batch = _Batch(
            names,
            runner.query_start_loc.np[: count + 1].copy(),
            rows.num_computed_tokens_cpu[:count].copy(),
        )
        pending = connector.prepare_output(batch)
        if pending is None:  # Another worker of the tensor-parallel group reports.
            return output
        on_cpu = runner.device.type == "cpu"
        stream = None if on_cpu else runner._get_or_create_async_output_copy_stream()
        parameters = [(name, runner.requests[name].sampling_params) for name in names]
        report = _Report(
            pending,
            ~runner.discard_request_mask.np[:count],
            frozenset(name for name, each in parameters if EXPERTS_KEY in each.extra_args),
            layers,
            stream,
        )
        return with_report(output, report)

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
