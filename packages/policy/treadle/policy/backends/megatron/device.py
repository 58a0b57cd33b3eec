"""The device: stock Megatron-core with CUDA, a facade over it without.

Megatron-core supports only CUDA: it reads the current device from `torch.cuda`, creates
tensors with `device="cuda"`, asserts on `Tensor.type()` and moves tensors with `Tensor.cuda()`.
`install` makes all of that mean the CPU, so that one code path trains on both.

Invariant: with CUDA available nothing is touched. Without it, only modules below `megatron.core`
see a different `torch` (their module-global name is rebound to a proxy); the real `torch` changes
in two methods, `Tensor.cuda` and `Tensor.type`, which no CPU program has another use for.

The facade depends on the exact source of Megatron-core, hence the pinned versions;
`device_test.py` checks that the places it was written for are where they were.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch

from treadle.policy.backends.megatron import VERSION, VERSIONS
from treadle.policy.backends.ranks import CPU
from treadle.policy.backends.ranks import device as device

_FACTORIES: Final = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)

_proxy: types.ModuleType | None = None


def install() -> bool:
    """Prepares this process for `import megatron.core`; safe to call again.

    Returns:
        True if the facade is active, False if CUDA is available and nothing was changed.

    Raises:
        ImportError: Megatron-core is missing or of another version.
        RuntimeError: megatron.core was imported before this call.
    """
    global _proxy
    _check_version()
    if _proxy is not None:
        return True
    _quiet_optional_dependencies()
    if torch.cuda.is_available():
        return False
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before treadle.policy.backends.megatron.device.install(); "
            "import treadle.policy.backends.megatron first"
        )
    _proxy = _proxy_of_torch()
    sys.meta_path.insert(0, _Finder())
    _patch_tensor()
    return True


def _check_version() -> None:
    fix = f"install megatron-core=={VERSION}"
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"megatron-core is not installed; {fix}") from None
    if found not in VERSIONS:
        raise ImportError(
            f"megatron-core {found} is installed, but this package is written against "
            f"{' and '.join(VERSIONS)} exactly; {fix}"
        )


def _quiet_optional_dependencies() -> None:
    """Megatron warns about every accelerator library it does not find; none is needed.

    Logits of routers have the type of the model, as in transformers and the engines.
    """
    for pattern in (
        ".*(Apex|Transformer Engine|transformer_engine).*",
        ".*no_grad_sync.*",
        ".*without fp32 routing.*",
    ):
        warnings.filterwarnings("ignore", message=pattern)


class _Ordered:
    """A CUDA stream or event on a CPU: everything is already in order, so all methods return."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def record_event(self, event: object = None) -> object:
        return event or _Ordered()

    def query(self) -> bool:
        return True

    def _nothing(self, *_: object, **__: object) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = _nothing


def _cuda_namespace() -> types.ModuleType:
    """`torch.cuda` as Megatron is to see it."""

    def nothing(*_: object, **__: object) -> None: ...

    def zero(*_: object, **__: object) -> int:
        return 0

    def ordered(*_: object, **__: object) -> _Ordered:
        return _Ordered()

    functions: dict[str, Callable[..., Any]] = {
        "current_device": lambda: CPU,
        "current_stream": ordered,
        "default_stream": ordered,
        "device_count": lambda: 1,
        "empty_cache": nothing,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "is_available": lambda: False,
        "is_current_stream_capturing": lambda: False,
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "max_memory_allocated": zero,
        "memory_allocated": zero,
        "memory_reserved": zero,
        "set_device": nothing,
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "set_stream": nothing,
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": nothing,
    }

    module = types.ModuleType("torch.cuda")
    module.__dict__.update(functions, Stream=_Ordered, Event=_Ordered)
    module.__dict__["__getattr__"] = functools.partial(getattr, torch.cuda)
    return module


def _proxy_of_torch() -> types.ModuleType:
    """Returns a copy of module `torch` with other CUDA namespace, factories and compiler."""

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def call(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        return call

    def compile_nothing(function: Any = None, **_: object) -> Any:
        return function if function is not None else lambda wrapped: wrapped

    proxy = types.ModuleType("torch")
    proxy.__dict__.update(torch.__dict__)
    proxy.__dict__.update({name: on_cpu(getattr(torch, name)) for name in _FACTORIES})
    proxy.__dict__.update(cuda=_cuda_namespace(), compile=compile_nothing)
    proxy.__dict__["__getattr__"] = functools.partial(getattr, torch)
    return proxy


def _adapt(module: types.ModuleType) -> None:
    """Called once for each megatron.core module, right after its body ran."""
    if module.__dict__.get("torch") is torch:
        module.__dict__["torch"] = _proxy
    if module.__name__ == "megatron.core.jit":
        module.__dict__["disable_jit_fuser"]()  # before others bind jit_fuser by name
    if module.__name__ == "megatron.core.tensor_parallel.random":
        # The originals queue a callback on CUDA's lazy initialisation, which never comes.
        def get_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> Any:
            return torch.get_rng_state()

        def set_state(state: Any, device: object = None, graph_safe: bool = False) -> None:
            torch.set_rng_state(state)

        module.__dict__.update(_get_cuda_rng_state=get_state, _set_cuda_rng_state=set_state)
    if module.__name__ == "megatron.core.transformer.moe.moe_utils":
        # The original makes an array of a CUDA tensor only, and all-to-all takes no tensor.
        def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
            return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

        module.__dict__["maybe_move_tensor_to_cpu"] = on_host


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._inner.exec_module(module)
        _adapt(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # get_source, get_filename: for tracebacks and inspect


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Any, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron.core"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _patch_tensor() -> None:
    true_type = torch.Tensor.type

    def cuda(self: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return self

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return true_type(self, dtype, *args, **kwargs)
        name = true_type(self)
        if "megatron/core/optimizer" not in sys._getframe(1).f_code.co_filename:
            return name
        return name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.cuda = cuda  # type: ignore[method-assign, assignment]
    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]
