"""The reward: 1 if the model's last message is exactly the right answer, otherwise 0."""

__all__ = ["score"]


def score(data_source: str, solution_str: str, ground_truth: str) -> dict[str, float]:
    """Scores an answer.

    Args:
        data_source: The column of the row.
        solution_str: The model's last message.
        ground_truth: `reward_model.ground_truth` of the row.

    Returns:
        The reward as "score".
    """
    return {"score": float(solution_str.strip().lower() == ground_truth)}
