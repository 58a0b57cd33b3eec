import ast
import itertools
import operator
import random
import re

from hypothesis import given
from hypothesis import strategies as st

from calculator.questions import (
    OPERAND_MAX,
    OPERAND_MIN,
    PAIRS,
    TEMPLATES,
    Question,
    Split,
    dataset_rows,
    guess_answer,
    make_question,
    sample_question,
)

_operands = st.integers(OPERAND_MIN, OPERAND_MAX)
_templates = st.integers(0, len(TEMPLATES) - 1)
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def _value(expression: str) -> int:
    tree = ast.parse(expression, mode="eval").body
    assert isinstance(tree, ast.BinOp)
    assert isinstance(tree.left, ast.Constant)
    assert isinstance(tree.right, ast.Constant)
    value: int = _OPERATORS[type(tree.op)](tree.left.value, tree.right.value)
    return value


def _pair(question: Question) -> tuple[int, ...]:
    return tuple(sorted(int(number) for number in re.findall(r"\d+", question.expression)))


def test_splits_share_no_unordered_pair_and_miss_none() -> None:
    train, held_out = set(PAIRS[Split.TRAIN]), set(PAIRS[Split.VALIDATION])
    assert not train & held_out
    numbers = range(OPERAND_MIN, OPERAND_MAX + 1)
    assert train | held_out == set(itertools.combinations_with_replacement(numbers, 2))
    assert len(held_out) == 485


@given(_templates, _operands, _operands)
def test_the_ground_truth_is_the_value_of_the_expression(template: int, a: int, b: int) -> None:
    question = make_question(template, a, b)
    assert question.answer == str(_value(question.expression))
    assert int(question.answer) >= 0
    assert _pair(question) == tuple(sorted((a, b)))
    assert all(str(operand) in question.text for operand in (a, b))


@given(_templates, _operands, _operands)
def test_a_guess_is_wrong(template: int, a: int, b: int) -> None:
    question = make_question(template, a, b)
    assert guess_answer(question) != question.answer
    assert guess_answer(question) in (str(a), str(b))


@given(st.integers(), st.sampled_from(list(Split)))
def test_a_sampled_question_keeps_to_its_split(seed: int, split: Split) -> None:
    question = sample_question(random.Random(seed), split)
    assert _pair(question) in PAIRS[split]


def test_rows_are_verls_and_take_turns_over_the_templates() -> None:
    rows = list(dataset_rows(Split.VALIDATION, 24, seed=3))
    assert rows == list(dataset_rows(Split.VALIDATION, 24, seed=3))
    assert rows != list(dataset_rows(Split.VALIDATION, 24, seed=4))
    first = rows[0]
    assert list(first) == [
        "data_source",
        "agent_name",
        "prompt",
        "ability",
        "reward_model",
        "extra_info",
    ]
    assert first["agent_name"] == "tool_agent"
    assert first["extra_info"] == {"index": 0, "split": "val"}
    prompts = [row["prompt"] for row in rows]
    assert all(
        isinstance(prompt, list) and [turn["role"] for turn in prompt] == ["system", "user"]
        for prompt in prompts
    )
    assert len({str(prompt) for prompt in prompts}) == len(rows)


def test_half_of_the_wordings_of_an_operation_are_eager() -> None:
    for symbol in "+-*":
        rates = [template.tool_rate for template in TEMPLATES if template.symbol == symbol]
        assert len(rates) == 4
        assert sum(rate > 0.5 for rate in rates) == 2
