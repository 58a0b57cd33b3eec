"""Typed arrays: the values of a trajectory's tokens, one machine number each.

Invariants:

1. An array never changes. Slices share its memory. It holds `bytes` where it can, and makes the
   view of them (`data`) on reading: a view takes 300 bytes, more than a short array has. It may
   also hold less (`LateMemory`), of which the memory is made on reading.
2. It is a `Sequence`, equal to an array or a tuple of the same values, with the hash of that tuple.
3. A copy of it is made of its memory: no Python object is made per token.

`numpy.asarray(array)` has the values without a copy; nothing here imports numpy.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self, SupportsIndex, TypeVar, overload

__all__ = ["BoolArray", "FloatArray", "IntArray", "LateMemory", "TypedArray"]

T = TypeVar("T", bool, int, float)


class LateMemory:
    """Makes the memory of an array, at least one item, whenever it is read."""

    __slots__ = ()

    def __len__(self) -> int:
        """Returns the number of items."""
        raise NotImplementedError

    def read(self) -> bytes:
        """Returns the memory."""
        raise NotImplementedError


class TypedArray(Sequence[T]):
    """The parent of the typed arrays.

    Args:
        values: Any values of the type; an array of the class shares its memory.

    Raises:
        OverflowError: A number does not fit.
        TypeError: A value is of another type.
    """

    __slots__ = ("_memory",)

    _TYPECODE: ClassVar[str]
    """What `array` makes of the values."""

    _FORMAT: ClassVar[str]
    """What the memory is read as, as in `struct`."""

    _BYTES: ClassVar[int]
    """Size of an item."""

    _memory: bytes | memoryview | LateMemory
    """Bytes, not empty; what makes them; or what `data` returns."""

    def __init__(self, values: Iterable[T] = ()) -> None:
        if isinstance(values, type(self)):
            self._memory = values._memory
        else:
            self._memory = self.of_buffer(array(self._TYPECODE, values).tobytes())._memory

    @classmethod
    def of(cls, values: Iterable[T]) -> Self:
        """Returns an array of the values: the same object where they are one of the class."""
        return values if type(values) is cls else cls(values)

    @classmethod
    def of_buffer(cls, buffer: bytes | bytearray | memoryview) -> Self:
        """Returns an array that has the memory of a buffer, which nobody may change any more.

        Raises:
            TypeError: The buffer's size is no multiple of the item's.
        """
        found = cls.__new__(cls)
        whole: Any = memoryview(buffer)
        if not whole.nbytes:
            found._memory = _EMPTY  # an empty view cannot be cast, whatever its type
            return found
        view = whole.cast("B").cast(cls._FORMAT).toreadonly()
        found._memory = buffer if type(buffer) is bytes else view
        return found

    @classmethod
    def of_late(cls, memory: LateMemory) -> Self:
        """Returns an array whose memory is made when it is read."""
        found = cls.__new__(cls)
        found._memory = memory
        return found

    @property
    def data(self) -> memoryview:
        """The memory, read only, one item per value."""
        memory = self._memory
        if isinstance(memory, memoryview):
            return memory
        whole: Any = memoryview(memory if isinstance(memory, bytes) else memory.read())
        view: memoryview = whole.cast(self._FORMAT)
        return view

    def __len__(self) -> int:
        memory = self._memory
        return len(memory) // self._BYTES if isinstance(memory, bytes) else len(memory)

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: SupportsIndex | slice) -> T | Self:
        if not isinstance(index, slice):
            if isinstance(self._memory, LateMemory):
                self._memory = self._memory.read()  # else each item would take the time of all
            items: Any = self.data
            value: T = items[index.__index__()]
            return value
        part = self.data[index]
        return self.of_buffer(part if part.contiguous else part.tobytes())

    def __iter__(self) -> Iterator[T]:
        values: list[Any] = self.data.tolist()
        return iter(values)

    def __reversed__(self) -> Iterator[T]:
        values: list[Any] = self.data.tolist()
        return reversed(values)

    def __contains__(self, value: object) -> bool:
        return value in self.data.tolist()

    def count(self, value: T) -> int:
        """Returns how many values equal this one."""
        values: list[Any] = self.data.tolist()
        return values.count(value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, tuple):
            return len(other) == len(self) and tuple(self) == other
        if isinstance(other, TypedArray):
            return self.data == other.data
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return self.of_buffer, (self.data.tobytes(),)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        numpy: Any = sys.modules["numpy"]  # which calls this
        make = numpy.array if copy else numpy.asarray
        return make(self.data, dtype=dtype)


class IntArray(TypedArray[int]):
    """Token ids, uint32."""

    __slots__ = ()
    _TYPECODE = _FORMAT = "I"
    _BYTES = 4


class FloatArray(TypedArray[float]):
    """Log-probabilities, float32: a value that is given with more digits is rounded."""

    __slots__ = ()
    _TYPECODE = _FORMAT = "f"
    _BYTES = 4


class BoolArray(TypedArray[bool]):
    """Flags, one byte each."""

    __slots__ = ()
    _TYPECODE, _FORMAT, _BYTES = "B", "?", 1


_EMPTY = memoryview(b"")
