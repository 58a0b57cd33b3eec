"""Plain values for the tests of what travels between driver and workers."""

import datetime
from dataclasses import fields, is_dataclass
from typing import Any, Final

from hypothesis import strategies as st

# With halves of surrogate pairs, also two that would be a pair.
TEXTS: Final = st.text(st.characters(), max_size=4)
_ZONES = st.none() | st.just(datetime.UTC)
_HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    TEXTS,
    st.binary(max_size=4),
    # Which of two equal times it is, where clocks are set back, is not kept.
    st.datetimes(timezones=_ZONES).map(lambda value: value.replace(fold=0)),
    st.dates(),
    st.times(timezones=_ZONES).map(lambda value: value.replace(fold=0)),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.tuples(st.integers(), TEXTS),
)
PLAIN: Final = st.recursive(
    _HASHABLE | st.sets(_HASHABLE, max_size=2) | st.frozensets(_HASHABLE, max_size=2),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(TEXTS | st.just("!"), inner, max_size=2),
        st.dictionaries(_HASHABLE, inner, max_size=2),
    ),
    max_leaves=5,
)


def shown(value: Any) -> str:
    """Returns a value as text with its types; NaN equals itself there, and sets have an order."""
    match value:
        case set() | frozenset():
            return f"{type(value)}{sorted(map(shown, value))}"
        case list() | tuple():
            return f"{type(value)}{list(map(shown, value))}"
        case dict():
            return f"dict{[(shown(key), shown(item)) for key, item in value.items()]}"
        case _ if is_dataclass(value):
            of_fields = [(each.name, shown(getattr(value, each.name))) for each in fields(value)]
            return f"{type(value)}{of_fields}"
        case _:
            return repr(value)
