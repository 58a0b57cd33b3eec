import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.policy.algorithms.value_loss import value_loss

numbers = st.floats(-3.0, 3.0, width=32)


def formula(value: float, old: float, target: float, clip: float | None) -> tuple[float, bool]:
    """verl's compute_value_loss of one token, with the factor 1/2 of its reduction."""
    error = (value - target) ** 2
    if clip is None:
        return 0.5 * error, False
    near = min(max(value, old - clip), old + clip)
    return 0.5 * max(error, (near - target) ** 2), (near - target) ** 2 > error


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=6),
    clip=st.sampled_from([None, 0.2, 0.5]),
)
def test_the_loss_is_the_greater_of_two_squared_errors(
    tokens: list[tuple[float, float, float]], clip: float | None
) -> None:
    values, old, returns = (torch.tensor(x, dtype=torch.float64) for x in zip(*tokens, strict=True))
    loss, clipped = value_loss(values, old, returns, clip=clip)
    want = [formula(*token, clip) for token in tokens]
    assert loss.tolist() == pytest.approx([each for each, _ in want], abs=1e-9)
    assert clipped.tolist() == [float(flag) for _, flag in want]


@pytest.mark.parametrize(
    ("value", "gradient"),
    [
        (0.3, 0.3 - 2.0),  # within the clip of 0.5 around 0
        (0.6, 0.0),  # beyond it, towards the return of 2: no way further
        (-0.6, -0.6 - 2.0),  # beyond it, away from the return: the way back is open
    ],
)
def test_a_value_that_has_moved_too_far_has_no_gradient_to_go_on(
    value: float, gradient: float
) -> None:
    values = torch.tensor([value], requires_grad=True)
    loss, _ = value_loss(values, torch.zeros(1), torch.tensor([2.0]), clip=0.5)
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(gradient)
