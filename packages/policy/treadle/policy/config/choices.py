"""Values of settings that the policy and its losses use as well, which load more than this."""

from typing import Literal

__all__ = ["BackendName", "ElementType", "LossAggregation", "SharePrefixes"]

BackendName = Literal["megatron", "fsdp", "fake"]

ElementType = Literal["float32", "bfloat16"]

LossAggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]

SharePrefixes = Literal["auto", "always", "never"]
