"""Values that settings or reports share with modules which load more than this."""

from typing import Final, Literal, get_args

__all__ = [
    "CAUSES",
    "BackendName",
    "ElementType",
    "LossAggregation",
    "OptimizerName",
    "RankCause",
    "SharePrefixes",
]

BackendName = Literal["megatron", "fsdp", "fake"]

ElementType = Literal["float32", "bfloat16"]

LossAggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]

OptimizerName = Literal["adamw", "adamw8bit", "muon"]

SharePrefixes = Literal["auto", "always", "never"]

RankCause = Literal[
    "waiting",
    "receive",
    "train",
    "optimizer",
    "logprobs",
    "weights",
    "save",
    "memory",
    "start",
]
"""Parts of a rank's time; `rank_time.py` describes each."""
CAUSES: Final[tuple[RankCause, ...]] = get_args(RankCause)
