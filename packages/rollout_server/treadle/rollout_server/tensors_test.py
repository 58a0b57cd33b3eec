import pytest

from treadle.rollout_server.engine import ElementType, TensorSpec
from treadle.rollout_server.errors import TensorMismatch
from treadle.rollout_server.tensors import check_tensors


def spec(name: str, *shape: int, element_type: ElementType = ElementType.FLOAT32) -> TensorSpec:
    return TensorSpec(name=name, element_type=element_type, shape=shape)


HELD = (spec("a", 2, 3), spec("b", 4))


def test_the_same_set_passes_in_any_order_and_element_type() -> None:
    check_tensors(HELD, [spec("b", 4, element_type=ElementType.BFLOAT16), spec("a", 2, 3)])
    check_tensors(None, [spec("anything", 1)])


@pytest.mark.parametrize(
    ("announced", "message"),
    [
        ([spec("a", 2, 3)], r"tensor 'b' is absent, expected float32\[4\]"),
        ([*HELD, spec("c", 1)], r"tensor 'c' is float32\[1\], expected absent"),
        ([spec("a", 3, 2), HELD[1]], r"tensor 'a' is float32\[3, 2\], expected float32\[2, 3\]"),
        ([*HELD, HELD[0]], "tensor 'a' is announced twice"),
    ],
)
def test_a_difference_is_named(announced: list[TensorSpec], message: str) -> None:
    with pytest.raises(TensorMismatch, match=message):
        check_tensors(HELD, announced)
