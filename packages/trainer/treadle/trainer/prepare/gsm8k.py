"""GSM8K: rows for the tool agent and for a single turn, as verl's scripts make them.

Those of `data_preprocess/gsm8k_tool_agent_loop.py` have the question with an instruction, the
tool's ground truth in `extra_info.tools_kwargs`, and `agent_name`, without which the tool would
never be called. Those of `data_preprocess/gsm8k.py` have the question alone. All functions are
pure.
"""

from collections.abc import Mapping

__all__ = ["INSTRUCTION", "SYSTEM", "make_row", "make_single_turn_row", "solution_of"]

SYSTEM = (
    "You are a math expert. You are given a question and you need to solve it step by step. "
    "Reasoning step by step before any tool call. "
    "You should use the `calc_gsm8k_reward` tool after step by step solving the question, "
    "before generate final answer at least once and refine your answer if necessary. "
    "Put your final answer in the format of `#### <answer>`."
)
INSTRUCTION = "Let's think step by step and output the final answer after `####`."
_SINGLE_TURN = 'Let\'s think step by step and output the final answer after "####".'
_MARK = "#### "


def solution_of(answer: str) -> str | None:
    """Returns the number after the last `#### ` without thousands separators, or None."""
    _, mark, solution = answer.rpartition(_MARK)
    return solution.strip().replace(",", "") if mark else None


def make_row(columns: Mapping[str, object], *, split: str, index: int) -> dict[str, object]:
    """Returns one training row of the columns `question` and `answer`.

    Raises:
        ValueError: The answer does not end in `#### number`.
    """
    question, answer, solution = _read(columns)
    asked = f"{question} {INSTRUCTION}"
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": asked},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": solution},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": answer,
            "question": question,
            "need_tools_kwargs": True,
            "tools_kwargs": {
                "calc_gsm8k_reward": {"create_kwargs": {"ground_truth": solution}},
            },
            "interaction_kwargs": {"query": asked, "ground_truth": solution},
        },
    }


def make_single_turn_row(
    columns: Mapping[str, object], *, split: str, index: int
) -> dict[str, object]:
    """Returns one training row for a single turn, without a tool.

    Raises:
        ValueError: The answer does not end in `#### number`.
    """
    question, answer, solution = _read(columns)
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {_SINGLE_TURN}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": solution},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def _read(columns: Mapping[str, object]) -> tuple[str, str, str]:
    """Returns question, answer and the number that the answer ends in."""
    question, answer = str(columns["question"]), str(columns["answer"])
    solution = solution_of(answer)
    if solution is None:
        raise ValueError(f"the answer has no {_MARK!r}")
    return question, answer, solution
