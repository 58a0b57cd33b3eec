"""The command line: `treadle [COMMAND] ...`; without a command, it trains.

Exit status: 0, it succeeded; 2, the user's input is wrong, as one message says; 1, the work failed;
130 or 143, it was interrupted.
"""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType

from treadle.trainer.cli.console import say

__all__ = ["main"]


def _train(argv: Sequence[str]) -> int:
    from treadle.trainer.cli.train import main as command

    return command(argv)


def _sft(argv: Sequence[str]) -> int:
    from treadle.trainer.cli.sft import main as command

    return command(argv)


def _export(argv: Sequence[str]) -> int:
    from treadle.trainer.cli.export import main as command

    return command(argv)


def _eval(argv: Sequence[str]) -> int:
    from treadle.trainer.cli.eval import main as command

    return command(argv)


def _data(argv: Sequence[str]) -> int:
    from treadle.trainer.cli.data import main as command

    return command(argv)


def _doctor(argv: Sequence[str]) -> int:
    from treadle.trainer.cli.doctor import main as command

    return command(argv)


def _new(argv: Sequence[str]) -> int:
    from treadle.trainer.cli.new import main as command

    return command(argv)


def _report(argv: Sequence[str]) -> int:
    from treadle.trainer.cli.report import main as command

    return command(argv)


def _serve(argv: Sequence[str]) -> int:
    from treadle.trainer.cli.serve import main as command

    return command(argv)


def _servers(argv: Sequence[str]) -> int:
    from treadle.trainer.cli.servers import main as command

    return command(argv)


def _trajectories(argv: Sequence[str]) -> int:
    from treadle.trainer.cli.trajectories import main as command

    try:
        return command(argv)
    except BrokenPipeError:
        # The reader has enough, as `head` has. Python's own flush at the end must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _verify(argv: Sequence[str]) -> int:
    from treadle.trainer.cli.verify import main as command

    return command(argv)


def _view(argv: Sequence[str]) -> int:
    from treadle.trainer.cli.view import main as command

    return command(argv)


# A command loads its module only when it is called, so that `--help` stays quick.
_COMMANDS = MappingProxyType[str, Callable[[Sequence[str]], int]](
    {
        "train": _train,
        "sft": _sft,
        "eval": _eval,
        "export": _export,
        "data": _data,
        "doctor": _doctor,
        "new": _new,
        "report": _report,
        "serve": _serve,
        "servers": _servers,
        "trajectories": _trajectories,
        "verify": _verify,
        "view": _view,
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    first = arguments[0] if arguments else ""
    if first and first not in _COMMANDS and "=" not in first and not first.startswith("-"):
        from treadle.trainer.cli.help import unknown_command

        say(f"error: {unknown_command(first)}", error=True)
        return 2
    command = _COMMANDS[arguments.pop(0) if first in _COMMANDS else "train"]
    atexit.register(gc.freeze)  # Or Python looks for garbage once more: 2 s after a run.
    try:
        return command(arguments)
    except KeyboardInterrupt:
        say("interrupted", error=True)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
