"""Arguments that a user's function takes of a row, by the names of its parameters."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from treadle.agent_loop.errors import SetupError

__all__ = ["Parameters"]

_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a function that a row fills.

    Attributes:
        defaults: By name; `inspect.Parameter.empty` where there is none.
        every: Whether it has `**kwargs`, and so takes all values.
    """

    defaults: Mapping[str, object]
    every: bool

    @classmethod
    def of(cls, call: Callable[..., object], *, leading: int = 0) -> Self:
        """Returns those of a function, without `self` and the leading ones."""
        parameters = list(inspect.signature(call).parameters.values())
        named = [each for each in parameters[leading:] if each.kind not in _SEVERAL]
        return cls(
            {each.name: each.default for each in named if each.name != "self"},
            any(each.kind is each.VAR_KEYWORD for each in parameters),
        )

    def arguments(
        self, what: str, fields: Mapping[str, object], given: Mapping[str, object] = {}
    ) -> dict[str, object]:
        """Returns the arguments, each from `given`, `extra_info` or a column of the row.

        A null is the same as no value.

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
        row = {**columns, **given}
        empty = inspect.Parameter.empty
        if lacking := [n for n, d in self.defaults.items() if d is empty and n not in row]:
            raise SetupError(
                f"{what} takes {', '.join(lacking)}, and the row has none: write it into the row "
                f"or its extra_info, or give it a default; the row has: {', '.join(columns)}"
            )
        return {name: v for name, v in row.items() if self.every or name in self.defaults}
