"""The critic's model: the policy's decoder, with a value head in place of the output layer.

Shape suffixes: T tokens, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treadle.policy.backends.megatron import device
from treadle.policy.backends.megatron.model import PolicyModel

device.install()

from megatron.core.tensor_parallel import (  # noqa: E402
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule  # noqa: E402


class CriticModel(PolicyModel):
    """One pipeline stage of the critic; the last one has the value head.

    Build it of an architecture that is not tied: the output layer is left out.
    """

    value_weight: torch.nn.Parameter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what `PolicyModel` takes."""
        super().__init__(*args, **kwargs)
        if self.post_process:
            del self.output_layer

    def add_head(self) -> None:
        """Adds the value head: after the weights are loaded, which have none.

        It begins at 0, and so do all values: the first advantages are those without a critic.
        """
        if self.post_process:
            self.value_weight = torch.nn.Parameter(
                torch.zeros(
                    self.config.hidden_size,
                    dtype=self.config.params_dtype,
                    device=device.device(),
                )
            )
            set_defaults_if_not_set_tensor_model_parallel_attributes(self.value_weight)

    def values(self, hidden_TH: Tensor) -> Tensor:
        """Returns the [T] values, float32; last stage only.

        Every rank of a tensor-parallel group computes all of them, so that gradients need no sum.
        """
        return hidden_TH.float() @ self.value_weight.float()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Megatron's, without what `GPTModel` does to the output layer that is not there."""
        state: dict[str, Any] = MegatronModule.sharded_state_dict(self, *args, **kwargs)
        return state
