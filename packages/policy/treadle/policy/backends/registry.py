"""The backends by name. Only a backend that is built is imported, and torch with it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from treadle.policy.backends.description import refusals
from treadle.policy.client.hf_files import DEQUANTISED

if TYPE_CHECKING:
    from treadle.policy.backend import PolicyBackend, Rendezvous
    from treadle.policy.backends.description import BackendDescription
    from treadle.policy.config.choices import BackendName
    from treadle.policy.config.policy import PolicyConfig

__all__ = ["build", "choose", "describe"]


def describe(name: BackendName) -> BackendDescription:
    """Returns what a backend says about models; imports no torch."""
    match name:
        case "megatron":
            from treadle.policy.backends.megatron.description import MegatronDescription

            return MegatronDescription()
        case "fsdp":
            from treadle.policy.backends.fsdp.description import FsdpDescription

            return FsdpDescription()
        case "fake":
            from treadle.policy.testing.fake.description import FakeDescription

            return FakeDescription()
    assert_never(name)


def choose(
    model_type: str, *, megatron_is_there: bool, quantised: str | None = None
) -> tuple[BackendName, str]:
    """Returns the backend for a model where none is set, and why: Megatron-core where it can.

    Args:
        quantised: The `quant_method` of the model's weights; None of whole ones.
    """
    if model_type in describe("fsdp").model_types:
        if model_type not in describe("megatron").model_types:
            return "fsdp", f"Megatron-core does not compute model type {model_type!r}"
        if not megatron_is_there:
            return "fsdp", "megatron-core is not installed"
        if quantised in DEQUANTISED:
            return "fsdp", f"weights in {quantised} are not read for Megatron-core"
    return "megatron", f"the first choice for {model_type!r}"


def build(
    config: PolicyConfig,
    model_path: Path,
    place: Rendezvous,
    *,
    keep_reference: bool,
    reference_path: Path | None,
) -> PolicyBackend:
    """Joins the other ranks and loads the model, in a rank; collective.

    Args:
        reference_path: Its Hugging Face folder, another model with the same tokenizer. None: the
            weights as they are now.

    Raises:
        UnsupportedModelError: The backend cannot compute the model, or its split into parts.
        ValueError: The backend cannot carry out a setting, or a weight is infinite or NaN.
        FileNotFoundError: The folder is not a model folder.
    """
    described = describe(config.backend)
    refused = [*refusals(described, config, other_reference=reference_path is not None)]
    if refused:
        raise ValueError("\n".join(refused))
    backend: Callable[..., PolicyBackend]
    match config.backend:
        case "megatron":
            # Megatron imports it where it is installed, and it then makes temporary directories
            # which a killed process leaves behind.
            with _hidden("wandb"):
                from treadle.policy.backends.megatron.backend import MegatronPolicy as backend
        case "fsdp":
            from treadle.policy.backends.fsdp.backend import FsdpPolicy as backend
        case "fake":
            from treadle.policy.testing.fake.backend import FakePolicy as backend
        case unknown:
            assert_never(unknown)
    return backend(
        config, model_path, place, keep_reference=keep_reference, reference_path=reference_path
    )


@contextlib.contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Lets a module look like one that is not installed, unless it is imported already."""
    if module in sys.modules:
        yield
        return
    modules: dict[str, Any] = sys.modules
    modules[module] = None  # Python: there is none of this name
    try:
        yield
    finally:
        del modules[module]
