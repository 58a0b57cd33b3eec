"""The sampler in vLLM's worker: samples as all our engines do.

Invariant: the token of a row depends only on its logits, its settings, its seed and its
position: not on the rest of the batch, chunked prefill, the prefix cache or preemption
(`engines/common/sampling.py`). The log-prob is that of the distribution that was sampled from.
Only the repetition penalty is still applied by vLLM's sampler, which knows ids that have not
left the device yet.

Replaces the sampler of vLLM's older model runner; the newer one samples inside its kernels, so
`startup.py` disables it. Nothing here waits, not even for the device.
"""

from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from treadle.rollout_server.engines.common.sampling import SamplingBatch
from treadle.rollout_server.engines.vllm.sampling import sampling_of


class SeededSampler(Sampler):  # type: ignore[misc]
    """Replaces vLLM's sampler; see the module docstring.

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
        """Samples one token per row of ``[B, V]`` logits, which may be overwritten."""
        rows = self._runner.input_batch
        if not rows.num_reqs:  # A warm-up has no requests.
            return super().forward(
                logits, sampling_metadata, predict_bonus_token, logprobs_mode_override
            )
        penalised_BV = self.apply_logits_processors(
            logits.to(torch.float32), sampling_metadata, predict_bonus_token
        )
        positions = rows.num_tokens_no_spec[: rows.num_reqs].tolist()
        drawn = self._sampling_batch(rows, logits.device).draw(penalised_BV, positions)
        ids_B1 = drawn.ids_B.to(torch.int32).unsqueeze(-1)
        logprobs = None
        if sampling_metadata.max_num_logprobs is not None:
            logprobs = LogprobsTensors(
                logprob_token_ids=ids_B1,
                logprobs=drawn.logprobs_B.unsqueeze(-1),
                selected_token_ranks=torch.zeros_like(drawn.ids_B),  # Unused.
            )
        return SamplerOutput(sampled_token_ids=ids_B1, logprobs_tensors=logprobs)

    def _sampling_batch(self, rows: Any, device: torch.device) -> SamplingBatch:
        """Returns the settings of the rows, rebuilt when the rows change."""
        names = list(rows.req_ids)
        if self._batch is None or names != self._names:
            parameters = [self._runner.requests[name].sampling_params for name in names]
            settings = [sampling_of(each.extra_args) for each in parameters]
            seeds = [setting.seed or 0 for setting in settings]
            self._batch, self._names = SamplingBatch(settings, seeds, device), names
        return self._batch
