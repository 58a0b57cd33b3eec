"""Collects what is wrong with the user's input, so that it is said at once and not one by one.

Invariant: one problem is raised as it is, with its own type and text; several are one
`SeveralProblems`, in the order in which they were found, each text once.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from treadle.agent_loop import SetupError

__all__ = ["Problems", "SeveralProblems"]


class SeveralProblems(SetupError):
    """More than one thing is wrong; the text numbers them."""

    def __init__(self, errors: tuple[Exception, ...]) -> None:
        self.errors = errors
        numbered = (_item(number, error) for number, error in enumerate(errors, start=1))
        super().__init__("\n".join((f"{len(errors)} problems", *numbered)))


class Problems:
    """The problems that were found so far.

    Args:
        kinds: The exceptions that are problems of the user's input.
    """

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds: tuple[type[Exception], ...] = (*kinds, SeveralProblems)
        self._errors: dict[str, Exception] = {}

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._errors)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Takes a problem that ends the block; what follows the block is executed."""
        try:
            yield
        except self._kinds as error:
            self.add(error)

    def add(self, error: Exception) -> None:
        """Adds a problem, or each of several."""
        for each in error.errors if isinstance(error, SeveralProblems) else (error,):
            self._errors.setdefault(str(each), each)

    def raise_if_any(self) -> None:
        """Raises what was found.

        Raises:
            SeveralProblems: There is more than one.
            Exception: The only one, as it was found.
        """
        errors = tuple(self._errors.values())
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise SeveralProblems(errors)


def _item(number: int, error: Exception) -> str:
    lines = "\n".join((str(error), *getattr(error, "__notes__", ()))).splitlines()
    return f"{number:>3}. " + "\n     ".join(lines)
