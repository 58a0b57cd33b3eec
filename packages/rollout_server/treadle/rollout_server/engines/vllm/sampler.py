"""The sampler in vLLM's worker: samples as all our engines do.

Invariant: the token of a row depends only on its logits, its settings, its seed and its
position: not on the rest of the batch, chunked prefill, the prefix cache or preemption
(`engines/common/sampling.py`). The log-prob is that of the distribution that was sampled from.
Only the repetition penalty is still applied by vLLM's sampler, which holds ids that have not
left the device yet.

Replaces the sampler of vLLM's older model runner; the newer one samples inside its kernels, so
`startup.py` disables it. Nothing here waits, not even for the device.

Sampling masks take the form of vLLM's own, which only the newer runner makes: arrays beside the
tokens, here with the bytes of a mask in place of ids.
"""

from typing import Any, Protocol

import numpy as np
import torch
from vllm.v1.outputs import (
    AsyncModelRunnerOutput,
    LogprobsTensors,
    SamplerOutput,
    SamplingMaskLists,
)
from vllm.v1.sample.sampler import Sampler

from treadle.rollout_server.engines.common.sampling import KeptIds, SamplingBatch
from treadle.rollout_server.engines.vllm.sampling import MASK_KEY, sampling_of


class StepReport(Protocol):
    """What the output of a step carries beside its tokens."""

    def add_to(self, output: Any) -> Any:
        """Adds it to a `ModelRunnerOutput`, which is returned; waits for the device."""
        ...


class _LaterOutput(AsyncModelRunnerOutput):  # type: ignore[misc]
    """The output of a step whose copies to the host are under way."""

    def __init__(self, output: AsyncModelRunnerOutput, report: StepReport) -> None:
        self._output = output
        self._report = report

    def get_output(self) -> Any:
        return self._report.add_to(self._output.get_output())


def with_report(output: Any, report: StepReport) -> Any:
    """Returns the output of a step with a report, which waits until the output does."""
    if isinstance(output, AsyncModelRunnerOutput):
        return _LaterOutput(output, report)
    return report.add_to(output)


class _Masks:
    """The sampling masks of one step's rows.

    Args:
        stream: For the copy to the host; None on the CPU.
    """

    def __init__(self, kept: KeptIds, stream: Any) -> None:
        self._kept, self._stream = kept, stream

    def add_to(self, output: Any) -> Any:
        """See `StepReport`. The tokens have arrived, so what was kept has been computed."""
        ids = [sampled[0] if sampled else 0 for sampled in output.sampled_token_ids]
        with torch.cuda.stream(self._stream):  # None changes nothing.
            masks = self._kept.masks(ids)
        output.sampling_masks = SamplingMaskLists(
            np.frombuffer(b"".join(masks), np.uint8), np.cumsum([0, *map(len, masks)])
        )
        return output


def report_masks(runner: Any, sampler: "SeededSampler") -> None:
    """Makes the outputs of a ``GPUModelRunner`` carry the sampling masks that were requested."""
    sample = runner.sample_tokens
    on_cpu = runner.device.type == "cpu"

    def sample_tokens(grammar_output: Any) -> Any:
        output = sample(grammar_output)
        kept, sampler.kept = sampler.kept, None
        if kept is None:
            return output
        stream = None if on_cpu else runner._get_or_create_async_output_copy_stream()
        return with_report(output, _Masks(kept, stream))

    runner.sample_tokens = sample_tokens


class SeededSampler(Sampler):  # type: ignore[misc]
    """Replaces vLLM's sampler; see the module docstring.

    Args:
        model_runner: The ``vllm.v1.worker.gpu_model_runner.GPUModelRunner`` that calls it.

    Attributes:
        kept: Ids that the last step could have drawn; None if no row wants a mask.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.kept: KeptIds | None = None
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
        self.kept = drawn.kept
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
            masked = [MASK_KEY in each.extra_args for each in parameters]
            self._batch, self._names = SamplingBatch(settings, seeds, device, masked), names
        return self._batch
