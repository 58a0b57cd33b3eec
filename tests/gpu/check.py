"""A check: one thing that a machine with GPUs must show, with what it needs and what it returns.

Invariant: a check runs in a separate process, with a directory that nobody else writes to. It
returns figures, or raises `CheckFailed` with what was seen instead. Whether it can run at all
(GPUs, engines, checks before it) is decided before it starts, by `runner.py`; a reason that shows
only later is a `CheckSkipped`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Device = Literal["cuda", "cpu"]
Figures = dict[str, float | str]


class CheckFailed(Exception):
    """A check does not hold; the message says what was seen and what was expected."""


class CheckSkipped(Exception):
    """A check cannot run here, for a reason that shows only while it runs; the message says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a check is given.

    Attributes:
        device: Where policy and servers compute; "cpu" shows that the check itself works.
        num_gpus: Number of GPUs that this process may use; 0 on the CPU.
        folder: Directory for its files, which is kept.
        engines: Engine -> program and leading arguments of a server in its environment.
        model: Hugging Face directory that servers load; None: one that the checks write.
    """

    device: Device
    num_gpus: int
    folder: Path
    engines: Mapping[str, tuple[str, ...]]
    model: Path | None

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        name: Its name in the page and on the command line.
        shows: What holds if it passes, in one sentence.
        run: The check.
        needs: Names of checks without which it means nothing. They come before it.
        engine: The engine whose environment it needs; "" for none.
        gpus: Number of GPUs that it needs.
        only_gpu: Why it is not run on the CPU; "" if it is.
        limit_s: Seconds after which it is ended and has failed.
        about_s: Seconds that it is expected to take on one GPU; where a call has fewer left, it is
            left to the next one.
    """

    name: str
    shows: str
    run: Callable[[Context], Figures]
    needs: tuple[str, ...] = ()
    engine: str = ""
    gpus: int = 1
    only_gpu: str = ""
    limit_s: float = 900.0
    about_s: float = 30.0


def expect(holds: bool, seen: str) -> None:
    """Raises `CheckFailed` with what was seen unless the condition holds."""
    if not holds:
        raise CheckFailed(seen)
