import pytest

from treadle.policy.algorithms.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("num_tokens", "want"),
    [(1, 0.0), (16384, 0.0), (17408, -0.25), (18432, -0.5), (20480, -1.0), (20500, -1.0)],
)
def test_known_values_of_dapo(num_tokens: int, want: float) -> None:
    """Of the paper's run: 20,480 tokens at most, of which the last 4,096 are punished."""
    got = overlong_penalty(num_tokens, max_tokens=20480, buffer=4096, factor=1.0)
    assert got == want
    assert overlong_penalty(num_tokens, max_tokens=20480, buffer=4096, factor=0.5) == want / 2
