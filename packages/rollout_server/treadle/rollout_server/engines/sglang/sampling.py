"""The draw in a worker: which rows a batch has, where each stands, and what it has seen.

Invariant: what a row draws depends on its logits, its settings, its seed and its place, and on
nothing else in the batch; `engines/sampling.py` draws, for this engine as for the others.
SGLang's own sampler is not used because it reports log-probs from before the truncation, ends
its process when a seed meets min-p, takes penalties up to 2 only, and counts the completion
without the prompt for them.

A row knows its place by counting its draws, and what was seen stays on the logits' device, so
that nothing here waits for a GPU and its scheduler can run ahead. Who calls: the sampler of
`worker.py`, once per step.

Shapes: B rows of a batch, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch

from treadle.rollout_server.engine import Sampling
from treadle.rollout_server.engines.common.sampling import Drawn, SamplingBatch, penalised

_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def to_wire(sampling: Sampling, seed: int) -> dict[str, Any]:
    """What a worker needs to know of a request's settings, as it travels with the request.

    Args:
        sampling: The request's.
        seed: 64 bits; drawn for it if it has none.
    """
    return {name: getattr(sampling, name) for name in _SETTINGS} | {"seed": seed}


class Row:
    """One sequence in a batch.

    Args:
        settings: Of `to_wire`.
        history: Ids so far, prompt first.
        vocab_size: Every id is below it.
        device: Of the logits.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        history: Sequence[int],
        *,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        chosen = {name: settings[name] for name in _SETTINGS}
        self.sampling = Sampling(max_tokens=1, **chosen)
        self.seed: int = settings["seed"]
        self.position = len(history)
        self.seen_V: torch.Tensor | None = None
        if self.sampling.repetition_penalty != 1.0:
            self.seen_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.seen_V[torch.tensor(sorted(set(history)), device=device)] = True

    def penalise(self, logits_V: torch.Tensor) -> None:
        """Makes the ids seen less likely, in place."""
        assert self.seen_V is not None
        penalised_V = penalised(logits_V, self.sampling.repetition_penalty)
        logits_V.copy_(torch.where(self.seen_V[: len(logits_V)], penalised_V, logits_V))


class Rows:
    """The rows of a batch; made anew when the batch changes."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        self._penalised = [(i, row) for i, row in enumerate(rows) if row.seen_V is not None]
        self._batch: SamplingBatch | None = None

    def kept(self, indices: Sequence[int]) -> "Rows":
        """These rows of it, in this order."""
        return Rows([self.rows[index] for index in indices])

    def joined(self, others: "Rows") -> "Rows":
        """The rows of both."""
        return Rows([*self.rows, *others.rows])

    def draw(self, logits_BV: torch.Tensor) -> Drawn:
        """Draws one token per row, which then counts as seen; waits for no device.

        Args:
            logits_BV: Overwritten if float32. Where a row's are not finite, its log-prob is
                not either.
        """
        logits_BV = logits_BV.float()
        if self._batch is None:
            settings = [row.sampling for row in self.rows]
            seeds = [row.seed for row in self.rows]
            self._batch = SamplingBatch(settings, seeds, logits_BV.device)
        for index, row in self._penalised:
            row.penalise(logits_BV[index])
        peak_B = logits_BV.amax(-1)
        drawn = self._batch.draw(logits_BV, [row.position for row in self.rows])
        for row in self.rows:
            row.position += 1
        for index, row in self._penalised:
            assert row.seen_V is not None
            row.seen_V.index_fill_(0, drawn.ids_B[index : index + 1], True)
        # Greedy rows have 0 whatever their logits are.
        return Drawn(drawn.ids_B, drawn.logprobs_B + (peak_B - peak_B))
