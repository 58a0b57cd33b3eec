"""The reward of a run with the fake engine, whose texts solve nothing."""

import zlib


def score(data_source: str, solution_str: str, ground_truth: str) -> float:
    """Returns 0 or 1, by the text alone."""
    return float(zlib.crc32(solution_str.encode()) % 2)
