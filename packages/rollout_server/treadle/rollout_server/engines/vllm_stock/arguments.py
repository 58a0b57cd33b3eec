"""Translates a `ServerConfig` to the engine arguments of an unmodified vLLM.

Invariant: does not import vLLM; nothing is silently dropped.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engines.common.arguments import EXPERTS_ARGUMENT, ManagedArgument
from treadle.rollout_server.engines.images.model_types import takes_images
from treadle.rollout_server.engines.vllm.arguments import managed_arguments
from treadle.rollout_server.model_files import has_experts

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

    Raises:
        ValueError: `engine_args` demand reports of the experts that the model chooses.
    """
    if config.engine_args.get(EXPERTS_ARGUMENT):
        raise ValueError(
            f"engine_args.{EXPERTS_ARGUMENT} is true, but engine 'vllm_stock' does not report "
            f"experts: set engine vllm, or leave {EXPERTS_ARGUMENT} out"
        )
    own = {**_EXTENSIONS, "weight_transfer_config": transfer}
    return managed_arguments(config, context_length=context_length, on_cpu=on_cpu) | {
        name: ManagedArgument(value=value) for name, value in own.items()
    }


def check_model(architecture: str, directory: Path, *, on_cpu: bool) -> None:
    """Checks that the engine can update a model.

    Args:
        architecture: Name of the model's class, for the message.
        directory: Directory of the model, which has ``config.json``.
        on_cpu: Whether this build of vLLM computes on the CPU.

    Raises:
        ValueError: The engine cannot update the model.
    """
    problem = "takes images" if takes_images(directory) else ""
    if on_cpu and has_experts(directory):  # A reload does not reach their packed copies.
        problem = "has experts, which vLLM does not update on a CPU"
    if problem:
        raise ValueError(f"{architecture} {problem}: set --engine vllm, which needs vLLM 0.32")
