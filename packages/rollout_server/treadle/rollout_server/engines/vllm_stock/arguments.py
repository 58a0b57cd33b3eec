"""Translates a `ServerConfig` to the engine arguments of an unmodified vLLM.

Invariant: pure, and does not import vLLM.
"""

from collections.abc import Mapping
from types import MappingProxyType

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engines.common.arguments import ManagedArgument
from treadle.rollout_server.engines.vllm.arguments import managed_arguments

BACKEND = "treadle"
"""The name of our weight transfer engine in vLLM's registry."""
_PACKAGE = "treadle.rollout_server.engines.vllm_stock"
_EXTENSIONS: Mapping[str, object] = MappingProxyType(
    {
        "logits_processors": [f"{_PACKAGE}.draws:SeededDraws"],
        "logprobs_mode": "processed_logits",  # See draws.py.
        "worker_extension_cls": f"{_PACKAGE}.transfer.Registered",
        "skip_tokenizer_init": True,  # It does not constrain the sampling.
    }
)


def stock_arguments(
    config: ServerConfig, *, context_length: int, on_cpu: bool, transfer: object
) -> dict[str, ManagedArgument]:
    """Returns the arguments of `AsyncEngineArgs` that the server sets.

    Args:
        context_length: Maximum number of tokens of prompt plus completion.
        on_cpu: Whether this build of vLLM computes on the CPU.
        transfer: vLLM's ``WeightTransferConfig`` of our backend.
    """
    own = {**_EXTENSIONS, "weight_transfer_config": transfer}
    return managed_arguments(config, context_length=context_length, on_cpu=on_cpu) | {
        name: ManagedArgument(value=value) for name, value in own.items()
    }
