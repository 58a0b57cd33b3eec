"""Typed arrays: sequences that equal tuples, in few bytes."""

import copy
import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.agent_loop.tokens.arrays import BoolArray, FloatArray, IntArray, TypedArray
from treadle.agent_loop.tokens.transcript import Origin, Span, Tokens

_BOUNDS = st.none() | st.integers(-9, 9)
_INTS = st.lists(st.integers(0, 2**32 - 1), max_size=8).map(tuple)
_BOOLS = st.lists(st.booleans(), max_size=8).map(tuple)
_FLOATS = st.lists(st.floats(width=32, allow_nan=False), max_size=8).map(tuple)


@given(
    made=st.one_of(
        _INTS.map(lambda v: (IntArray(v), v)),
        _BOOLS.map(lambda v: (BoolArray(v), v)),
        _FLOATS.map(lambda v: (FloatArray(v), v)),
    ),
    part=st.builds(slice, _BOUNDS, _BOUNDS, st.sampled_from([None, 1, 2, -1])),
)
def test_an_array_is_like_the_tuple_of_its_values(
    made: tuple[TypedArray[float], tuple[float, ...]], part: slice
) -> None:
    array, values = made
    assert array == values
    assert values == array
    assert hash(array) == hash(values)
    assert [type(value) for value in array] == [type(value) for value in values]
    assert array[part] == values[part]
    assert type(array[part]) is type(array)
    assert tuple(reversed(array)) == values[::-1]
    assert array != (*values, 1)
    for index, value in enumerate(values):
        assert type(array[index]) is type(value)
        assert (array[index], array.count(value)) == (value, values.count(value))
        assert value in array
    assert copy.deepcopy(array[part]) == values[part]


def test_a_number_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        IntArray((2**32,))
    with pytest.raises(TypeError, match="read-only"):
        IntArray((1,)).data[0] = 2
    assert FloatArray((0.1,))[0] == 0.10000000149011612, "float32 has fewer digits"


@pytest.mark.parametrize("over", ["given", "copied", "made"])
def test_an_array_holds_bytes_and_no_view_of_them(over: str) -> None:
    made = IntArray((1, 2)) if over == "made" else IntArray.of_buffer(b"\1\0\0\0\2\0\0\0")
    if over == "copied":
        made = copy.copy(made)
    assert made.data.tolist() == [1, 2]
    held = [each for each in gc.get_referents(made) if not isinstance(each, type)]
    assert held == [b"\1\0\0\0\2\0\0\0"]
    assert IntArray.of(made) is made


def test_tokens_that_do_not_describe_the_same_length_are_refused() -> None:
    prompt = (Span(origin=Origin.PROMPT, start=0, stop=2),)
    with pytest.raises(ValueError, match="2 ids have 1 logprobs"):
        Tokens(ids=(1, 2), logprobs=(0.0,), spans=prompt)
    with pytest.raises(ValueError, match="3 ids have spans"):
        Tokens(ids=(1, 2, 3), logprobs=(0.0,) * 3, spans=prompt)
