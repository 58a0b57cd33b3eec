"""The sampler in vLLM's worker: draws as every engine of ours does.

Invariant: a row's token depends on its logits, its settings, its seed and how many ids come
before it, and on nothing else: not on what it is batched with, on how its prompt was read, on
the prefix cache or on preemption (`engines/sampling.py`). The log-prob is that of what was
drawn from. Of vLLM's own sampler the repetition penalty is left, which knows ids that have
not left the device yet.

Takes the place of the sampler of vLLM's older model runner; the newer one samples inside its
kernels, and `startup.py` does without it. Nobody waits here, not even for the device.
"""

from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from treadle.rollout_server.engines.common.sampling import SamplingBatch
from treadle.rollout_server.engines.vllm.sampling import drawn_by


class PlacedSampler(Sampler):  # type: ignore[misc]
    """See the module docstring.

    Args:
        model_runner: The ``vllm.v1.worker.gpu_model_runner.GPUModelRunner`` that calls it.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self._runner = model_runner
        self._names: list[str] = []
        self._batch: SamplingBatch | None = None

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> Any:
        """One token per row of ``[B, V]`` logits, which may be overwritten."""
        rows = self._runner.input_batch
        if not rows.num_reqs:  # A warm-up has logits of nobody.
            return super().forward(
                logits, sampling_metadata, predict_bonus_token, logprobs_mode_override
            )
        penalised_BV = self.apply_logits_processors(
            logits.to(torch.float32), sampling_metadata, predict_bonus_token
        )
        positions = rows.num_tokens_no_spec[: rows.num_reqs].tolist()
        drawn = self._batch_of(rows, logits.device).draw(penalised_BV, positions)
        ids_B1 = drawn.ids_B.to(torch.int32).unsqueeze(-1)
        logprobs = None
        if sampling_metadata.max_num_logprobs is not None:
            logprobs = LogprobsTensors(
                logprob_token_ids=ids_B1,
                logprobs=drawn.logprobs_B.unsqueeze(-1),
                selected_token_ranks=torch.zeros_like(drawn.ids_B),  # Nobody asks.
            )
        return SamplerOutput(sampled_token_ids=ids_B1, logprobs_tensors=logprobs)

    def _batch_of(self, rows: Any, device: torch.device) -> SamplingBatch:
        """The settings of the rows, made anew when the rows change."""
        names = list(rows.req_ids)
        if self._batch is None or names != self._names:
            parameters = [self._runner.requests[name].sampling_params for name in names]
            settings = [drawn_by(each.extra_args) for each in parameters]
            seeds = [setting.seed or 0 for setting in settings]
            self._batch, self._names = SamplingBatch(settings, seeds, device), names
        return self._batch
