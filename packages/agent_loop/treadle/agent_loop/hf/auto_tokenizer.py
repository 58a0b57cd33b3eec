"""Loads tokenizers without torch (extra `[hf]`).

`AutoTokenizer` imports torch where it is installed, though no tokenizer needs it: 120 MiB and a
second or two of each process that runs agent loops. It has two causes, both avoided here. A module
that every configuration needs imports torch for functions that models call. And the configuration
of the model, by which `AutoTokenizer` chooses a class, holds the type of the weights as torch's.

Invariants:

1. The tokenizer is the one that `AutoTokenizer.from_pretrained` returns, also where that refuses
   a config.json for something that no tokenizer needs. What it reads of a configuration is promised
   nowhere: only `_COMPARED` versions get an abridged one.
2. One module has a stand-in for torch, until it uses torch, which is imported then. Everything
   else sees what it would see without this module: `sys.modules` has no stand-in.

Any thread may call.
"""

import builtins
import contextlib
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import transformers
from transformers import PreTrainedTokenizerBase

_COMPARED: Final = ("5.23.", "5.24.")
_IMPORTS_TORCH: Final = "transformers.modeling_rope_utils"


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a model directory, without network access.

    Raises:
        Exception: It does not load; the libraries raise errors of any type for a bad file.
    """
    with _torch_when_used():
        from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(directory), config=_abridged_config(directory), local_files_only=True
    )
    return tokenizer


def _abridged_config(directory: Path) -> Any:
    """Returns a configuration with what `AutoTokenizer` reads of it if the tokenizer has a class.

    None if it must read the whole one: the files name no class or one in the model's own code,
    there is no config.json, or its type of model is none of transformers or one that stands for
    two.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    named = _read(directory / "tokenizer_config.json")
    model = _read(directory / "config.json")
    if (
        not transformers.__version__.startswith(_COMPARED)
        or not named.get("tokenizer_class")
        or "auto_map" in named
        or str(model.get("model_type")) not in CONFIG_MAPPING
        or (model["model_type"] == "mistral" and "layer_types" in model)  # also ministral
    ):
        return None
    config: Any = PretrainedConfig()
    config.name_or_path = str(directory)
    for name in ("model_type", "model_name", "tokenizer_class"):
        if name in model:
            setattr(config, name, model[name])
    return config


def _read(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # `AutoTokenizer` says what is wrong
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def _torch_when_used() -> Iterator[None]:
    """Lets configurations be imported without torch, unless it is there already."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds the module that imports torch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the module's specification with `_Loader`; None for every other module."""
        if fullname != _IMPORTS_TORCH or "torch" in sys.modules:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        loader = None if spec is None else spec.loader
        if spec is not None and type(loader) is SourceFileLoader:
            spec.loader = _Loader(loader.name, loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Executes a module in which `import torch` gives `_Torch`."""

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module with an `__import__` that no other module uses."""
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


class _Torch(ModuleType):
    """Stands for torch in one module; gives place to it when it is used.

    Args:
        user: The names of that module.
    """

    def __init__(self, user: dict[str, Any]) -> None:
        super().__init__("torch")
        self._user = user

    def __getattr__(self, name: str) -> Any:
        self._user["torch"] = torch = importlib.import_module("torch")
        return getattr(torch, name)


def _import(
    name: str,
    of_module: dict[str, Any] | None = None,
    of_function: Mapping[str, object] | None = None,
    names: Sequence[str] = (),
    level: int = 0,
) -> ModuleType:
    """As `builtins.__import__`, except for `import torch`."""
    if name == "torch" and of_module is not None and not names:
        return _Torch(of_module)
    return builtins.__import__(name, of_module, of_function, names, level)
