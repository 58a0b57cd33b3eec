"""The reward: 1 if the number after #### is the right one, otherwise 0."""

import re


def score(data_source: str, solution_str: str, ground_truth: str) -> dict[str, float]:
    """Scores one trajectory.

    Args:
        data_source: The row's column of that name.
        solution_str: The text of the model's last message.
        ground_truth: The row's value of `reward_model.ground_truth`.

    Returns:
        The reward as "score"; every other number is a metric, here `reward/answered`.
    """
    found = re.findall(r"#### (-?\d+)", solution_str)
    right = found[-1:] == [ground_truth]
    return {"score": float(right), "answered": float(bool(found))}
