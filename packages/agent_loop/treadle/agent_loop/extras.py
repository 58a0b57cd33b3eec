"""The message of an import whose extra is not installed."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(extra: str, module: str) -> Iterator[None]:
    """Names the extra if an import in the block finds a library missing.

    Args:
        extra: Extra of treadle-agent-loop that installs the library.
        module: The module that cannot be imported without it. `python -m` then prints the message
            without a traceback.

    Raises:
        ModuleNotFoundError: A library is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("treadle."):
            raise
        message = (
            f"{module} needs {error.name}, which is not installed: "
            f'pip install "treadle-agent-loop[{extra}]"'
        )
        raise ModuleNotFoundError(message, name=module) from error
