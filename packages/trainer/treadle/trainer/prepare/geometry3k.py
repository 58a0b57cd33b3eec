"""Geometry3K: questions about a drawing, as verl's `data_preprocess/geo3k.py` makes them. Pure."""

from collections.abc import Mapping

__all__ = ["INSTRUCTION", "make_row"]

INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the "
    "final answer. The reasoning process MUST BE enclosed within <think> </think> tags. The final "
    r"answer MUST BE put in \boxed{}."
)


def make_row(columns: Mapping[str, object], *, split: str, index: int) -> dict[str, object]:
    """Returns one row of the columns `problem`, `answer` and `images`, with its images."""
    problem, answer = str(columns["problem"]), str(columns["answer"])
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"{problem} {INSTRUCTION}"}],
        "images": columns["images"],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": problem},
    }
