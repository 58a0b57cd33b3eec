"""A field of a frozen dataclass that is made when it is first read.

A trajectory comes from another process as bytes, and most of it is never read: so the spans of
tokens and the messages of a trajectory stay as they came until somebody reads them.

Invariants:

1. Whether a field is late changes nothing that a reader sees: values, equality, hash, `repr`,
   `dataclasses.replace` and copies are those of an object that had it from the start.
2. All readers get the same object, also where threads read at once.
"""

import threading
from abc import ABC, abstractmethod
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, cast

__all__ = ["FieldSource", "LateField"]


V = TypeVar("V")
_KEEPING = threading.Lock()


class FieldSource(ABC, Generic[V]):
    """Makes the value of a field."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: V | None = None

    @abstractmethod
    def make(self) -> V:
        """Returns a new value, which is not None."""

    @property
    def is_made(self) -> bool:
        """Whether somebody has read the field."""
        return self._made is not None

    def value(self) -> V:
        """Returns the value, the same object at each call."""
        made = self._made
        if made is None:
            new = self.make()
            with _KEEPING:
                made = self._made = new if self._made is None else self._made
        return made


S = TypeVar("S", bound=FieldSource[Any])


class LateField(Generic[S]):
    """The parent of a frozen dataclass with slots, one of whose fields may be late."""

    __slots__ = ("_source",)

    _LATE: ClassVar[str]
    """Name of the field."""

    _source: S

    @classmethod
    def of_source(cls, source: S, **values: object) -> Self:
        """Returns an object with a late field, without the checks of its class."""
        made = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(made, name, value)
        object.__setattr__(made, "_source", source)
        return made

    @property
    def source(self) -> S | None:
        """The source of the field; None if the object had it from the start."""
        try:
            return self._source
        except AttributeError:
            return None

    def values_but_late(self) -> dict[str, Any]:
        """Returns the values of all fields but the late one, by name."""
        names = (field.name for field in fields(cast(Any, self)))
        return {name: getattr(self, name) for name in names if name != self._LATE}

    if not TYPE_CHECKING:  # else every name would be an attribute

        def __getattr__(self, name: str) -> object:
            """Returns the late field. Called for a slot that is empty, or a name without one."""
            if name == self._LATE:
                return self._source.value()
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
