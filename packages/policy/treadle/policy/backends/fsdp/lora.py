"""Adapters in a model of transformers: PEFT's layers, filled, switched off and collected.

PEFT's names are those of its modules without the adapter's own: here it is always `default`. It is
imported where there are adapters: it takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from treadle.policy.backends import adapter
from treadle.policy.backends.fsdp.weights import whole
from treadle.policy.backends.vision.shape import NOT_ADAPTED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from treadle.policy.backends.fsdp.net import Net
    from treadle.policy.config.choices import ElementType
    from treadle.policy.config.policy import LoraConfig

_NAME: Final = "default"


def adapt(net: Net, lora: LoraConfig, targets: Iterable[str], *, seed: int) -> None:
    """Puts adapters into a whole model, fills them, and leaves them as all that is trained.

    Raises:
        AdapterError: `lora.path` is missing or does not fit the settings.
    """
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            "policy.lora with policy.backend=fsdp needs PEFT: pip install 'treadle-policy[fsdp]'"
        ) from error
    untyped: Any = peft  # it takes any number for alpha, and says int
    settings = untyped.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(targets),
        exclude_modules=NOT_ADAPTED,
    )
    untyped.inject_adapter_in_model(settings, net.model)
    net.lora_scaling = lora.scaling
    trained = {_peft_name(name): p for name, p in net.model.named_parameters() if p.requires_grad}
    shapes = {name: (p.shape[0], p.shape[1]) for name, p in trained.items()}
    tensors = adapter.start(lora, shapes, seed)
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(tensors[name])


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Computes without adapters within the context: the model that training started from."""
    from peft.tuners.lora import LoraLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.set_scale(_NAME, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(_NAME, 1.0)


@torch.no_grad()
def collect(net: Net, dtype: ElementType) -> dict[str, Tensor]:
    """Returns the adapter's tensors, whole, under PEFT's names; collective."""
    as_type: torch.dtype = getattr(torch, dtype)
    trained = ((name, p) for name, p in net.model.named_parameters() if p.requires_grad)
    return {_peft_name(name): whole(p).to(as_type).cpu().contiguous() for name, p in trained}


def _peft_name(name: str) -> str:
    return f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"
