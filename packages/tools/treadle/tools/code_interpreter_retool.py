"""ReTool's `code_interpreter`: the code may come in a fence, and its last expression is printed.

Invariant: the program is changed in one case only: its last statement is an expression that is no
call of `print`. Then its value is kept as `_` and printed unless it is None, as an interactive
interpreter would; every line stays where it is, so that a traceback fits. verl's tool wraps the
last *line* instead, which breaks on assignments, comments, indented lines and calls over several
lines. Code that does not parse goes to the sandbox as it is, whose interpreter says what is wrong
with it. Nothing is evaluated here.

    x = 2          ->    x = 2
    x + 1                _ = x + 1
                         if _ is not None:
                             print(_)
"""

from __future__ import annotations

import ast
import re
import warnings

from treadle.tools.code_interpreter import CodeInterpreterTool

_FENCE = re.compile(r"```python(.*?)```", re.DOTALL)
_BEFORE = b"_ = "
_AFTER = b"\nif _ is not None:\n    print(_)\n"


class RetoolCodeInterpreterTool(CodeInterpreterTool):
    """`CustomSandboxFusionTool` of verl's ReTool recipe."""

    def source(self, code: str) -> str:
        """The first ```` ```python ```` block, or all of it, with its last expression printed."""
        return print_last_expression(first_python_block(code))


def first_python_block(text: str) -> str:
    """The inside of the first ```` ```python ```` block, stripped; the text if it has none."""
    found = _FENCE.search(text)
    return found.group(1).strip() if found else text


def print_last_expression(code: str) -> str:
    """The code, with its last statement's value printed if it is an expression.

    Code that cannot be parsed is returned as it is; nothing is raised.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the sandbox's interpreter says them to the model
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    if not tree.body or not isinstance(last := tree.body[-1], ast.Expr) or _prints(last.value):
        return code
    lines = code.encode().splitlines(keepends=True)  # columns count bytes
    line = lines[last.lineno - 1]
    lines[last.lineno - 1] = line[: last.col_offset] + _BEFORE + line[last.col_offset :]
    return (b"".join(lines) + _AFTER).decode()


def _prints(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id == "print"
    )
