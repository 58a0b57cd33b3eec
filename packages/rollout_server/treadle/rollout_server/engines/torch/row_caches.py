"""The caches of models that keep more of a sequence than keys and values, and their weights' names.

Gated delta nets, Mamba layers and compressed attention have a state that cannot be cut to a prefix.
Each row has the cache that transformers makes for the model, and runs by itself; rows share no
prefix.
"""

import math
import re
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from treadle.rollout_server.engines.torch.attention import RowSpan

_CHECKED = (6, 3, 1, 1)
"""Numbers of ids that are read one after another, to compare with all at once."""
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Of logits, relative to the largest."""


class RowCaches:
    """The cache of each row: those in use are the first ones, as in `KvCache`."""

    shares_prefixes = False

    def __init__(self) -> None:
        self._rows: dict[int, Any] = {}

    def reserve(self, rows: int, length: int) -> None:
        """Does nothing: a cache grows by itself."""

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Gives the cache of a row to another; a row that was not read yet has none."""
        self._rows[target] = self._rows.pop(source, None)

    def release(self) -> None:
        """Frees the memory."""
        self._rows.clear()

    def forward(
        self, model: Any, ids: Sequence[int], spans: Sequence[RowSpan], wanted: Sequence[int]
    ) -> torch.Tensor:
        """Runs a step, row by row.

        Args:
            ids: ``[T]``, those of all rows.
            wanted: ``[B]``, indices into `ids` whose logits are needed.

        Returns:
            Logits at the wanted indices, ``[B, vocab]``, float32.
        """
        found: dict[int, torch.Tensor] = {}
        first = 0
        for row, span in enumerate(spans):
            last = first + span.num_tokens
            output = model(
                input_ids=torch.tensor([ids[first:last]], device=model.device),
                past_key_values=self._rows.get(row) if span.start else None,
                use_cache=True,
            )
            self._rows[row] = output.past_key_values
            found |= {i: output.logits[0, i - first] for i in wanted if first <= i < last}
            first = last
        return torch.stack([found[i] for i in wanted]).float()


def check(model: Any, model_type: str) -> None:
    """Compares ids that are read at once with the same ids in parts.

    Raises:
        ValueError: They differ, or the model does not take a cache.
    """
    ids = torch.arange(1, 1 + sum(_CHECKED)).tolist()
    stops = [sum(_CHECKED[: i + 1]) for i in range(len(_CHECKED))]
    wanted = [stop - 1 for stop in stops]
    try:
        whole = RowCaches().forward(model, ids, [RowSpan(0, len(ids))], wanted)
        caches = RowCaches()
        parts = []
        for count, stop in zip(_CHECKED, stops, strict=True):
            span = RowSpan(stop - count, stop)
            parts.append(caches.forward(model, ids[span.start : stop], [span], [count - 1]))
        difference = float((torch.cat(parts) - whole).abs().max() / whole.abs().max())
        why = f"its logits depend on how many ids are read at once ({difference:.1g})"
    except (AttributeError, TypeError) as error:
        difference, why = 1.0, f"it does not run with a cache of transformers ({error})"
    if not difference <= _TOLERANCE[model.dtype]:
        raise ValueError(
            f"model type {model_type!r} is not supported by the torch engine: {why}; use the vllm "
            "or sglang engine"
        )


def limit_time_steps(model: Any) -> None:
    """Has Mamba layers keep their limits of time steps where they read one id.

    transformers keeps them only where a layer reads several at once. Here they are kept before a
    layer turns its output into time steps, by softplus(output + bias), so that both ways agree.
    """
    for layer in model.modules():
        limits = getattr(layer, "time_step_limit", None)
        if limits is not None and tuple(limits) != (0.0, math.inf):
            layer.in_proj.register_forward_hook(partial(_limited, layer))


def _limited(layer: Any, _: object, __: object, projected: torch.Tensor) -> torch.Tensor:
    bias = layer.dt_bias
    low, high = (x + torch.log(-torch.expm1(-x)) for x in bias.new_tensor(layer.time_step_limit))
    others, steps = projected.split([projected.shape[-1] - len(bias), len(bias)], -1)
    # Of infinity, the logarithm is of 1, and of zero it is minus infinity.
    return torch.cat([others, torch.clamp(steps, low - bias, high - bias)], -1)


def stored_views(model: Any) -> dict[str, torch.Tensor]:
    """Returns each tensor of a checkpoint as a contiguous part of what the model computes with.

    transformers computes the experts of a layer in one tensor, of which a checkpoint has parts.
    They are found by the numbers of their elements, of one layer after another.

    Raises:
        ValueError: A tensor of the checkpoint is not a contiguous part.
    """
    stored = model.state_dict(keep_vars=True)
    tensors = dict(model.named_parameters())
    tensors |= {n: b for n, b in model.named_buffers() if n in stored and b.is_floating_point()}

    def layer(name: str) -> str:
        number = re.search(r"\.\d+\.", name)
        return "" if number is None else name[: number.end()]

    views: dict[str, torch.Tensor] = {}
    for _, names in groupby(sorted(tensors, key=layer), layer):
        group = list(names)
        sizes = [tensors[name].numel() for name in group]
        starts = dict(zip(group, accumulate(sizes, initial=0), strict=False))
        numbers = {
            name: torch.arange(starts[name], starts[name] + size).view(tensors[name].shape)
            for name, size in zip(group, sizes, strict=True)
        }
        for name, where in revert_weight_conversion(model, numbers).items():
            flat, shape = where.reshape(-1), where.shape
            first = int(flat[0])
            owner = next(n for n in reversed(group) if starts[n] <= first)
            if not torch.equal(flat, torch.arange(first, first + len(flat))):
                raise ValueError(
                    f"the torch engine cannot replace {name}, which transformers computes in "
                    "another order than it is stored: use the vllm or sglang engine"
                )
            begin = first - starts[owner]
            views[name] = tensors[owner].data.view(-1)[begin : begin + len(flat)].view(shape)
    return views
