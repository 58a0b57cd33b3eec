import contextlib
import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from treadle.tools.code_interpreter import (
    RetoolCodeInterpreterTool,
    first_python_block,
    print_last_expression,
)


def run(code: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "main.py", "exec"), {})
    return output.getvalue()


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("1 + 1", "2\n"),
        ("x = 2\nx", "2\n"),
        ("'text'", "text\n"),
        ("1, 2", "(1, 2)\n"),
        ("*[1], 2", "(1, 2)\n"),
        ("(y := 3)", "3\n"),
        ("x = 2; x * 2;", "4\n"),
        ("sum(\n  # each\n  [1,\n   2])  # the sum", "3\n"),
        ("x = 'é'; x + 'ü'", "éü\n"),
        ("[i for i in range(3)]", "[0, 1, 2]\n"),
        ("(i\n for i in range(3)).__class__.__name__", "generator\n"),
        ("lambda: 3", None),
        ("None", ""),
        ("[].append(1)", ""),
        ("x = 1\nx\n\n# done\n", "1\n"),
        ("x = 1\r\nx\r\n", "1\n"),
        ("0", "0\n"),
        ("''", "\n"),
        ("printed = 3\nprinted", "3\n"),
    ],
)
def test_the_last_expression_is_printed(code: str, printed: str | None) -> None:
    shown = run(print_last_expression(code))
    assert shown == printed if printed is not None else shown


@pytest.mark.parametrize(
    "code",
    [
        "",
        "# nothing\n",
        "x = 5",
        "x += 1",
        "print(1)",
        "print(\n  1,\n)",
        "for i in range(3):\n    i",
        "if True:\n    1",
        "def f():\n    return 1",
        "import math",
        "x = = 1",
        "  indented",
        "print 'old'",
        "'\x00'",
        "\udc80",
        "(" * 500,
        "-" * 100_000 + "1",
    ],
)
def test_everything_else_stays_as_it_is(code: str) -> None:
    assert print_last_expression(code) == code


def test_the_lines_of_a_traceback_fit() -> None:
    changed = print_last_expression("x = 0\n1 / x  # oh\n").splitlines()
    assert changed[:2] == ["x = 0", "_ = 1 / x  # oh"]


@given(st.text(alphabet="ax1+=()[]{},:;#'\"\\ \n\r\té_"))
@example("a\\\n")
@example("x\x0c\ny")
def test_no_text_is_too_odd_and_what_parses_still_does(code: str) -> None:
    changed = print_last_expression(code)
    try:
        compile(code, "main.py", "exec")
    except (SyntaxError, ValueError):
        return
    compile(changed, "main.py", "exec")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("1 + 1", "1 + 1"),
        ("```python\n1 + 1\n```", "1 + 1"),
        ("I compute:\n```python\nx = 1\n```\nand\n```python\n2\n```", "x = 1"),
        ("```\n1\n```", "```\n1\n```"),
        ("```python\n1", "```python\n1"),
    ],
)
def test_the_first_python_block_is_the_program(text: str, code: str) -> None:
    assert first_python_block(text) == code


def test_the_tool_does_both() -> None:
    tool = RetoolCodeInterpreterTool(config={"sandbox_fusion_url": "http://localhost:1/run_code"})
    assert run(tool.source("```python\nx = 40\nx + 2\n```")) == "42\n"
