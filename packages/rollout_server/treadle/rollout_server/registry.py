"""The registry of engines: name -> import path of the factory.

Invariant: an engine's module is imported only when that engine is chosen, so `--help` and the
fake engine need neither torch nor vllm nor sglang.
"""

import importlib
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import Engine

EngineFactory = Callable[[ServerConfig], Awaitable[Engine]]
"""Builds an engine that is ready to generate. May take long; must not block the loop.

Raises ValueError or OSError when the engine cannot be built as configured.
"""

ENGINES: Mapping[str, str] = MappingProxyType(
    {
        "fake": "treadle.rollout_server.engines.fake:create",
        "torch": "treadle.rollout_server.engines.torch:create",
        "vllm": "treadle.rollout_server.engines.vllm:create",
        "vllm_stock": "treadle.rollout_server.engines.vllm_stock:create",
        "sglang": "treadle.rollout_server.engines.sglang:create",
    }
)
"""Name -> "module:factory"."""


def engine_factory(name: str) -> EngineFactory:
    """Imports the factory of an engine.

    Args:
        name: A key of `ENGINES`, or "module:factory" for an engine of your own.

    Raises:
        ValueError: There is no engine of that name, or the import path has no such factory.
    """
    place = ENGINES.get(name, name)
    module_name, _, attribute = place.partition(":")
    if not attribute:
        raise ValueError(
            f"unknown engine {name!r}: use one of {', '.join(sorted(ENGINES))}, "
            "or 'module:factory' for your own"
        )
    try:
        factory: EngineFactory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"engine {name!r} cannot be loaded from {place}: {error}") from error
    return factory
