"""The training loop works with any engine: no code of it names one.

import-linter checks what it imports (contract `schedules`). This reads what it says: an engine may
also be known by its name in the configuration, or by a capability under its name.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import treadle.trainer.training_loop
from treadle.trainer.config.rollout import RolloutConfig

ENGINES: tuple[str, ...] = get_args(RolloutConfig.model_fields["name"].annotation)
KEY = "rollout.name"
"""The setting that says which engine it is."""
FOLDER = Path(treadle.trainer.training_loop.__path__[0])
MODULES = sorted(
    path.relative_to(FOLDER).as_posix()
    for path in FOLDER.rglob("*.py")
    if not path.name.endswith("_test.py")
)
LIBRARIES = {"train_batch.py": {"torch"}}
"""The part that ranks run computes with PyTorch, which an engine is called after."""


def said(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and text of names and strings, without comments and docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield node.lineno, text
            case ast.Attribute(value=ast.Attribute(attr=owner), attr=name):
                yield node.lineno, f"{owner}.{name}"
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.keyword(arg=str(name)):
                yield node.value.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.Import(names=aliases):
                yield from ((node.lineno, alias.name) for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases):
                yield node.lineno, module or ""
                yield from ((node.lineno, alias.name) for alias in aliases)


def engines_in(source: str) -> set[tuple[int, str]]:
    """Returns line and word of each mention of an engine in the code of a module."""
    return {
        (line, word)
        for line, text in said(ast.parse(source))
        for word in (*ENGINES, "engine", KEY)
        if word in text.lower()
    }


@pytest.mark.parametrize("module", MODULES)
def test_the_training_loop_names_no_engine(module: str) -> None:
    found = engines_in((FOLDER / module).read_text(encoding="utf-8"))
    allowed = LIBRARIES.get(module, set())
    assert {(line, word) for line, word in found if word not in allowed} == set()


def test_the_four_schedules_are_among_what_is_read() -> None:
    assert {"schedules/run.py", "schedules/rules.py", "schedules/sync.py"} < set(MODULES)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import vllm", {"vllm"}),
        ("from treadle.rollout_server.engines import fake", {"engine", "fake"}),
        ("if config.rollout.name == 'sglang': pass", {KEY, "sglang"}),
        ("class SGLangRule: pass", {"sglang"}),
        ("def f(engine): pass", {"engine"}),
        ("log(f'{server}: vLLM waits')", {"vllm"}),
        ("rule(torch=True)", {"torch"}),
        ('"""What an engine such as vLLM does."""\nx = 1  # as vLLM\n"""Of an engine."""', set()),
    ],
)
def test_it_finds_what_code_says(code: str, words: set[str]) -> None:
    assert {word for _, word in engines_in(code)} == words
