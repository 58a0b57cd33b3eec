"""What a fuzz target is: something real that takes inputs, and what must hold for each of them."""

import asyncio
import contextlib
import logging
import resource
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Self

from fuzz.inputs import Input
from fuzz.mutate import Form

MAX_LOG_CHARACTERS = 4000
"""Of one input: a sentence for each of a few parts, and no trace."""


class Fell(AssertionError):
    """An input for which something did not hold; the message says what."""


class Target(ABC):
    """Something that takes inputs, as a context manager.

    Invariant: `check` leaves the target as it found it, so that an input that fell falls alone too.

    Attributes:
        promises: What holds for every input, for people.
        form: Kind of the bodies.
        words: Words of their format.
        heads: Heads that a part may get.
    """

    promises: ClassVar[str]
    form: ClassVar[Form]
    words: ClassVar[Sequence[bytes]] = ()
    heads: Sequence[str] = ()

    @abstractmethod
    def check(self, parts: Input) -> None:
        """Gives it an input.

        Raises:
            Fell: Something did not hold.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class AsyncTarget(Target):
    """A target that runs in an event loop of its own.

    `serving` is entered once; again after an input that fell, or that `reset` is set after.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self.reset = False

    def __enter__(self) -> Self:
        self._runner.__enter__()
        self._runner.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._stop())
        self._runner.__exit__(None, None, None)

    @abstractmethod
    def serving(self) -> contextlib.AbstractAsyncContextManager[None]:
        """What is given the inputs."""

    @abstractmethod
    async def give(self, parts: Input) -> None:
        """As `check`."""

    def check(self, parts: Input) -> None:
        if self.reset:
            self._runner.run(self._stop())
            self._runner.run(self._start())
        self.reset = True  # unless it ends well
        with logged() as log:
            self._runner.run(asyncio.wait_for(self.give(parts), 60))
        if len(text := "\n".join(log)) > MAX_LOG_CHARACTERS:
            raise Fell(f"{len(text)} characters were logged, beginning with: {text[:3000]}")

    async def _start(self) -> None:
        self.reset = False
        await self._stack.enter_async_context(self.serving())

    async def _stop(self) -> None:
        await self._stack.aclose()


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Yields the warnings and errors that are logged meanwhile, with their traces."""
    lines, root = _Lines(), logging.getLogger()
    root.addHandler(lines)
    try:
        yield lines.lines
    finally:
        root.removeHandler(lines)


def peak_mib() -> int:
    """Returns the most memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
