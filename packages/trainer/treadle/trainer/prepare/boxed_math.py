"""DAPO-Math-17k and AIME: rows for the tool agent, as verl's `recipe/retool/retool.py` makes them.

Its `CustomRLHFDataset` does this while it loads; here it is done once. All functions are pure.
"""

from collections.abc import Mapping, Sequence

__all__ = ["FORMAT", "aime_row", "dapo_row"]

FORMAT = "\nThe answer format must be: \\boxed{'The final answer goes here.'}"
# As Maxwell-Jia/AIME_2024, yentinglin/aime_2025, and files of other sources name them.
_AIME = (
    ("Problem", "Answer"),
    ("problem", "answer"),
    ("question", "answer"),
    ("input", "output"),
)


def dapo_row(columns: Mapping[str, object], *, split: str, index: int) -> dict[str, object]:
    """Returns one row of DAPO-Math-17k: its columns, the form of the answer, and the tool agent.

    Raises:
        ValueError: `prompt` is not a list of messages.
    """
    prompt = columns["prompt"]
    if not isinstance(prompt, Sequence) or not prompt or not isinstance(prompt[0], Mapping):
        raise ValueError(f"prompt must be a list of messages, got {prompt!r:.80}")
    first = {**prompt[0], "content": f"{prompt[0].get('content')}{FORMAT}"}
    return {**columns, "prompt": [first, *prompt[1:]], "agent_name": "tool_agent"}


def aime_row(columns: Mapping[str, object], *, split: str, index: int) -> dict[str, object]:
    """Returns one row of an AIME year; `split` names the year, as "aime_2024".

    Raises:
        ValueError: There is no column with the problem, or none with its answer.
    """
    for problem, answer in _AIME:
        if columns.get(problem) is not None and columns.get(answer) is not None:
            return {
                "data_source": split,
                "agent_name": "tool_agent",
                "prompt": [{"role": "user", "content": f"{columns[problem]}{FORMAT}"}],
                "ability": "MATH",
                "reward_model": {"style": "rule", "ground_truth": str(columns[answer])},
                "extra_info": {"split": split, "index": index},
            }
    known = "; ".join(" and ".join(pair) for pair in _AIME)
    raise ValueError(f"the columns are {', '.join(columns)}; a problem has {known}")
