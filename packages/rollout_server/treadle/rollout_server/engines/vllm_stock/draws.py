"""The draw of every token, as a logits processor: a public extension of vLLM's sampler.

Invariant: the token of a row is the draw of `engines/common/sampling.py`, a function of its logits,
settings, seed and position. vLLM applies the repetition penalty and leaves the rest to this
processor (temperature 1, no truncation), which leaves one id per row: the one drawn, with its
log-probability in place of its logit. vLLM's own draw can then only be that id, and with
``logprobs_mode="processed_logits"`` the number that it reports is the log-probability.

vLLM imports the class by its name.
"""

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from treadle.rollout_server.engines.common.sampling import SamplingBatch
from treadle.rollout_server.engines.vllm.sampling import sampling_of

_Row = tuple[Any, int, list[int]]
"""Settings of a request, the length of its prompt, and its output, to which vLLM appends."""


class SeededDraws(LogitsProcessor):  # type: ignore[misc]
    """Draws one token per row; see the module docstring."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, _Row] = {}
        self._batch: SamplingBatch | None = None

    def is_argmax_invariant(self) -> bool:
        """True: such processors run last, after the penalty. No request is greedy to vLLM."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the rows of vLLM's batch."""
        if batch_update is None:
            return
        rows = self._rows
        for index in batch_update.removed:
            rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            rows[index] = (sampling_of(params.extra_args), len(prompt or ()), output)
        for first, second, direction in batch_update.moved:
            moved, replaced = rows.pop(first, None), rows.pop(second, None)
            if moved is not None:
                rows[second] = moved
            if replaced is not None and direction is MoveDirectionality.SWAP:
                rows[first] = replaced
        self._batch = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Replaces ``[B, V]`` logits, float32, by the log-probability of one id per row."""
        rows = [self._rows[index] for index in range(logits.shape[0])]
        if self._batch is None:
            settings = [sampling for sampling, _, _ in rows]
            seeds = [sampling.seed or 0 for sampling in settings]
            self._batch = SamplingBatch(settings, seeds, self._device)
        positions = [length + len(output) for _, length, output in rows]
        drawn = self._batch.draw(logits, positions)
        logprobs_B1 = drawn.logprobs_B.unsqueeze(1)
        logits.fill_(-torch.inf).scatter_(1, drawn.ids_B.unsqueeze(1), logprobs_B1)
        # vLLM may draw any id of a row without numbers; each one then reports it.
        return logits.masked_fill_(logprobs_B1.isnan(), torch.nan)
