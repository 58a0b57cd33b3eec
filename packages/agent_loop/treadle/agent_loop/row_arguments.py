"""Arguments that a user's function takes of a row, by the names of its parameters."""

import inspect
from collections.abc import Callable, Mapping

from treadle.agent_loop.errors import SetupError

__all__ = ["row_arguments"]

_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def row_arguments(
    what: str,
    call: Callable[..., object],
    fields: Mapping[str, object],
    given: Mapping[str, object] = {},
) -> dict[str, object]:
    """Returns the arguments of a function, each from `given`, `extra_info` or a column of the row.

    A null is the same as no value. A function with `**kwargs` gets all values.

    Args:
        what: Names the function in the error, as "the class Game".
        fields: The columns of the row.
        given: Values that are the same for all rows, or are not in the row.

    Raises:
        SetupError: A parameter without a default has no value.
    """
    extra = fields.get("extra_info")
    columns = {**fields, **(extra if isinstance(extra, Mapping) else {})}
    columns = {name: value for name, value in columns.items() if value is not None}
    parameters = inspect.signature(call).parameters.values()
    known = {each.name: each.default for each in parameters if each.kind not in _SEVERAL}
    known.pop("self", None)
    row = {**columns, **given}
    lacking = [n for n, d in known.items() if d is inspect.Parameter.empty and n not in row]
    if lacking:
        raise SetupError(
            f"{what} takes {', '.join(lacking)}, and the row has none: write it into the row "
            f"or its extra_info, or give it a default; the row has: {', '.join(columns)}"
        )
    every = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return {name: value for name, value in row.items() if every or name in known}
